"""Objects behind a small API: enough of an API server for one client that applies, reads, lists and deletes.

It merges nothing and validates nothing; what server-side apply really does is tested on real API servers.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from flowprefill_crd.crd import HASH_ANNOTATION
from flowprefill_crd.schema_hash import SCHEMA_HASH
from flowprefill_operator.cluster.client import MANAGER
from flowprefill_operator.kinds import CRD_PATH, SERVICES, WATCHED, Kind
from support.cluster_objects import status_body
from support.small_api import Answer, Request, SmallApi

Raw = dict[str, Any]
KINDS = {kind.root + "/" + kind.plural: kind for kind in (*WATCHED, SERVICES)}


class KeptObjects:
    """`refuse` is asked before each request and may answer in the server's place."""

    def __init__(self, api: SmallApi) -> None:
        self.items: dict[tuple[Kind, str, str], Raw] = {}
        self.events: list[Raw] = []
        self.refuse: Callable[[Request], Answer | None] = lambda request: None
        self.absent: set[Kind] = set()
        self.crd: Raw | None = {"metadata": {"annotations": {HASH_ANNOTATION: SCHEMA_HASH}}}
        self._numbers = itertools.count(1)
        self._api = api
        api.answer = self._answer

    def add(self, item: Raw) -> Raw:
        """Somebody else's object, or one that is there already."""
        meta = item["metadata"]
        kind = next(
            k for k in KINDS.values() if (k.api_version, k.kind) == (item["apiVersion"], item["kind"])
        )
        meta["resourceVersion"] = str(next(self._numbers))
        meta.setdefault("uid", f"uid-{next(self._numbers)}")
        meta.setdefault("creationTimestamp", datetime.now(UTC).isoformat(timespec="seconds"))
        self.items[kind, meta["namespace"], meta["name"]] = item
        return item

    def find(self, kind: str, name: str) -> Raw | None:
        return next((i for (k, _, n), i in self.items.items() if (k.kind, n) == (kind, name)), None)

    def names(self, kind: str) -> set[str]:
        return {name for k, _, name in self.items if k.kind == kind}

    def writes(self) -> list[str]:
        """Requests that change something, as `METHOD plural/name`, and forget them."""
        found = [
            f"{r.method} {r.path.partition('/namespaces/')[2].partition('/')[2]}"
            for r in self._api.requests
            if r.method != "GET" and "dryRun" not in r.query and "events" not in r.path
        ]
        self._api.requests.clear()
        return found

    def _answer(self, request: Request) -> Answer | None:
        refused = self.refuse(request)
        if refused is not None:
            return refused
        if request.path == CRD_PATH:
            return _missing(SERVICES, CRD_PATH) if self.crd is None else (200, self.crd)
        if "watch" in request.query:
            return 200, b""
        if request.path.endswith("/events"):
            self.events.append(request.body)
            return 201, request.body
        found = self._kind(request.path)
        if found is None:
            return self._discover(request.path)
        kind, namespace, name, part = found
        if kind in self.absent:
            return 404, json.loads(
                status_body(404, "NotFound", "the server could not find the requested resource")
            )
        if name is None:
            return self._list(kind, namespace)
        key = (kind, namespace or "", name)
        known = self.items.get(key)
        match request.method:
            case "GET":
                return _missing(kind, name) if known is None else (200, known)
            case "DELETE":
                if known is None or known["metadata"]["uid"] != request.body["preconditions"]["uid"]:
                    return _missing(kind, name)
                del self.items[key]
                return 200, {}
            case "PATCH" if isinstance(request.body, list):
                assert known is not None
                return 200, self._put(key, {**known, "spec": request.body[-1]["value"]}, None)
            case "PATCH" if "dryRun" in request.query:
                return 200, request.body
            case "PATCH" if part == "status":
                if known is None or request.body["metadata"].get("uid") not in (
                    None,
                    known["metadata"]["uid"],
                ):
                    return _missing(kind, name)
                return 200, self._put(key, {**known, "status": request.body["status"]}, None)
            case _:
                manager = request.query["fieldManager"]
                item = {**(known or {}), **request.body}
                if known is not None and "spec" in request.body:
                    item["spec"] = {**_others(known), **request.body["spec"]}
                if manager != MANAGER and known is not None:
                    item = {**known, "spec": {**known["spec"], **request.body["spec"]}}
                return 200, self._put(key, item, request.body if manager == MANAGER else None)

    def _put(self, key: tuple[Kind, str, str], item: Raw, applied: Raw | None) -> Raw:
        known = self.items.get(key)
        item = copy.deepcopy(item)
        before = {} if known is None else known["metadata"]
        item["metadata"] = {
            **item["metadata"],
            "uid": before.get("uid") or f"uid-{next(self._numbers)}",
            "generation": before.get("generation", 0)
            + (known is None or known.get("spec") != item.get("spec")),
            "managedFields": before.get("managedFields", []),
        }
        if applied is not None:
            item["metadata"]["managedFields"] = [
                {
                    "manager": MANAGER,
                    "operation": "Apply",
                    "apiVersion": item["apiVersion"],
                    "fieldsV1": fields_v1(applied),
                }
            ]
        item["metadata"]["resourceVersion"] = before.get("resourceVersion", "0")
        if known is None or item != known:
            item["metadata"]["resourceVersion"] = str(next(self._numbers))
        self.items[key] = item
        return item

    def _list(self, kind: Kind, namespace: str | None) -> Answer:
        found = [
            item for (k, place, _), item in self.items.items() if k == kind and namespace in (None, place)
        ]
        return 200, {"metadata": {"resourceVersion": str(next(self._numbers))}, "items": found}

    def _kind(self, path: str) -> tuple[Kind, str | None, str | None, str | None] | None:
        head, _, rest = path.partition("/namespaces/")
        if not rest:
            kind = KINDS.get(path)
            return None if kind is None else (kind, None, None, None)
        namespace, plural, *more = rest.split("/")
        name, part = (*more, None, None)[:2]
        return KINDS[f"{head}/{plural}"], namespace, name, part

    def _discover(self, path: str) -> Answer:
        served = [{"name": k.plural} for k in KINDS.values() if k.root == path and k not in self.absent]
        return (200, {"resources": served}) if served else _missing(SERVICES, path)


def _others(known: Raw) -> Raw:
    """The parts of a spec that the operator does not own."""
    managed = known["metadata"].get("managedFields") or [{"fieldsV1": {}}]
    owned = managed[0]["fieldsV1"].get("f:spec", {})
    return {key: value for key, value in known.get("spec", {}).items() if f"f:{key}" not in owned}


def fields_v1(applied: Raw) -> Raw:
    """What the operator owns then, with lists as wholes."""
    body = {key: value for key, value in applied.items() if key not in ("apiVersion", "kind")}
    body["metadata"] = {k: v for k, v in applied["metadata"].items() if k not in ("name", "namespace")}
    return _fields(body)


def _fields(value: Raw) -> Raw:
    return {f"f:{key}": _fields(child) if isinstance(child, dict) else {} for key, child in value.items()}


def _missing(kind: Kind, name: str) -> Answer:
    return 404, status_body(404, "NotFound", f'{kind.resource} "{name}" not found')
