"""API keys from a file that may change."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from flowprefill.errors import InvalidConfiguration
from flowprefill.hosting.auth import RECHECK_S, ApiKeyMiddleware, KeyFile


class Time:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_keys_are_one_a_line_without_comments(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# for the team\nsecret-1\n\n  secret-2  \n")
    keys = KeyFile(file)
    assert keys.accepts("secret-1")
    assert keys.accepts("secret-2")
    for wrong in ("", "# for the team", "secret-3", "secret-1 ", "\ud7ff"):
        assert not keys.accepts(wrong)


def test_one_of_the_keys_is_read_when_it_is_needed_and_kept_nowhere(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# for the team\nsecret-1\nsecret-2\n")
    keys = KeyFile(file)
    assert keys.one() == "secret-1"
    replace(file, "secret-3\n")
    assert keys.one() == "secret-3"
    assert not any("secret" in repr(value) for value in vars(keys).values())
    replace(file, "")
    with pytest.raises(InvalidConfiguration, match="holds 0 keys"):
        keys.one()


def test_a_changed_file_is_read_again_and_a_broken_one_keeps_the_last_keys(tmp_path: Path) -> None:
    file, time = tmp_path / "keys", Time()
    file.write_text("old\n")
    keys = KeyFile(file, now_s=time)
    replace(file, "new\n")
    assert keys.accepts("old")  # looked at a moment ago
    time.now_s += RECHECK_S
    assert keys.accepts("new")
    assert not keys.accepts("old")
    for broken in ("", "# nothing\n"):
        replace(file, broken)
        time.now_s += RECHECK_S
        assert keys.accepts("new")
    file.unlink()
    time.now_s += RECHECK_S
    assert keys.accepts("new")


def test_a_mounted_secrets_symlink_is_followed(tmp_path: Path) -> None:
    time = Time()
    for number in (1, 2):
        (tmp_path / f"v{number}").mkdir()
        (tmp_path / f"v{number}" / "keys").write_text(f"key-{number}\n")
    (tmp_path / "..data").symlink_to("v1")
    (tmp_path / "keys").symlink_to("..data/keys")
    keys = KeyFile(tmp_path / "keys", now_s=time)
    (tmp_path / "next").symlink_to("v2")
    os.replace(tmp_path / "next", tmp_path / "..data")
    time.now_s += RECHECK_S
    assert keys.accepts("key-2")
    assert not keys.accepts("key-1")


@pytest.mark.parametrize("content", [None, "", "# only a comment\n"])
def test_a_file_without_keys_is_a_start_up_error(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InvalidConfiguration, match="keys"):
        KeyFile(file)


async def test_requests_without_a_key_are_401_in_the_envelope(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\n")
    app = Starlette(routes=[Route("/v1/models", lambda request: PlainTextResponse("in"))])
    app.add_middleware(ApiKeyMiddleware, keys=KeyFile(tmp_path / "keys"))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        for headers in (
            {},
            {"authorization": "secret"},
            {"authorization": "Bearer wrong"},
            {"authorization": "Basic secret"},
        ):
            answer = await client.get("/v1/models", headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert "secret" not in answer.text.replace("'Authorization: Bearer KEY'", "")
        answer = await client.get("/v1/models", headers={"authorization": "bearer secret"})
        assert answer.text == "in"


def replace(file: Path, text: str) -> None:
    """Write anew, as a mount does: another inode."""
    other = file.with_suffix(".next")
    other.write_text(text)
    os.replace(other, file)
