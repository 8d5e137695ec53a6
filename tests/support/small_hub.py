"""A Hugging Face hub of one repository over HTTP: as much of its API as its own library asks for a download.

What it answers follows huggingface_hub: `hf_api.py` (model_info, list_repo_tree) and `file_download.py`
(get_hf_file_metadata: ETag, X-Repo-Commit, size).
"""

from __future__ import annotations

import hashlib
import json
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

REPOSITORY = "org/name"


def weights(value: int) -> bytes:
    """A safetensors file of one tensor."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [16], "data_offsets": [0, 16]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes([value]) * 16


def commit_of(number: int) -> str:
    """The name of the repository's n-th commit."""
    return hashlib.sha1(str(number).encode()).hexdigest()


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
SHARDED: Mapping[str, bytes] = {
    "config.json": b'{"model_type": "llama"}',
    SHARDS[0]: weights(3),
    SHARDS[1]: weights(4),
    INDEX: json.dumps({"weight_map": {"v": SHARDS[0], "w": SHARDS[1]}}).encode(),
    "tokenizer.json": b"{}",
}


class SmallHub:
    """Commits 1 and 2 of the repository, and 3 with weights in two files; `branches` says where each branch stands and may
    be changed any time. Files in `refused` are not sent (403).

    `questions` are the revisions that were asked for, `downloads` commit and file of each file that was sent.
    """

    def __init__(self) -> None:
        self.branches: dict[str, str] = {"main": commit_of(1)}
        self.commits: Mapping[str, Mapping[str, bytes]] = {
            commit_of(number): {
                "config.json": json.dumps({"model_type": "llama", "number": number}).encode(),
                "model.safetensors": weights(number),
            }
            for number in (1, 2)
        } | {commit_of(3): SHARDED}
        self.refused: set[str] = set()
        self.questions: list[str] = []
        self.downloads: list[tuple[str, str]] = []
        self.url = ""

    def answer(self, path: str, *, send: bool) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body; `send` says that the body leaves."""
        match [unquote(part) for part in path.strip("/").split("/")]:
            case ["api", "models", *name, "revision", revision] if "/".join(name) == REPOSITORY:
                self.questions.append(revision)
                commit = self.branches.get(revision, revision)
                if commit not in self.commits:
                    return 404, {"X-Error-Code": "RevisionNotFound"}, b""
                body = {"id": REPOSITORY, "sha": commit, "siblings": self._siblings(commit)}
                return 200, {"Content-Type": "application/json"}, json.dumps(body).encode()
            case ["api", "models", *name, "tree", commit] if "/".join(name) == REPOSITORY:
                tree = [
                    {"type": "file", "path": file, "oid": _etag(data), "size": len(data)}
                    for file, data in self.commits[commit].items()
                ]
                return 200, {"Content-Type": "application/json"}, json.dumps(tree).encode()
            case [owner, name, "resolve", commit, file] if f"{owner}/{name}" == REPOSITORY:
                data = self.commits[commit].get(file)
                if data is None:
                    return 404, {"X-Error-Code": "EntryNotFound"}, b""
                if file in self.refused:
                    return 403, {"X-Error-Message": "not now"}, b""
                if send:
                    self.downloads.append((commit, file))
                return 200, {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": commit}, data
        return 404, {"X-Error-Code": "RepoNotFound"}, b""

    def _siblings(self, commit: str) -> list[dict[str, str]]:
        return [{"rfilename": file} for file in self.commits[commit]]


@contextmanager
def small_hub() -> Iterator[SmallHub]:
    """A hub that listens at `url`."""
    hub = SmallHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(send=True)

        def do_HEAD(self) -> None:
            self._answer(send=False)

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _answer(self, *, send: bool) -> None:
            status, headers, body = hub.answer(urlsplit(self.path).path, send=send)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if send:
                self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, name="small hub")
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


def _etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
