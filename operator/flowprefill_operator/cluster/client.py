"""Requests to the API server. Thin: no retries (the queue repeats whole passes), no cache, no policy."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
from kubernetes.aio.client import ApiClient
from kubernetes.aio.client.exceptions import ApiException

from flowprefill_operator.cluster.errors import ClusterError, NotFound, answer_error, no_answer
from flowprefill_operator.kinds import CRD_PATH, Kind, kind_of
from flowprefill_operator.resources.base import Object

MANAGER = "flowprefill-operator"
"""Field manager of everything that the operator applies."""

REPLICAS_MANAGER = "flowprefill-operator-replicas"
"""Co-owner of `spec.replicas` while the field passes from the operator to an autoscaler."""

REPAIR_MANAGER = "flowprefill-operator-repair"
"""Who takes out what server-side apply cannot: fields of others that contradict the operator's own."""

REQUEST_TIMEOUT_S = 20.0
PAGE = 500
APPLY_TYPE = "application/apply-patch+yaml"  # JSON is YAML
JSON_PATCH_TYPE = "application/json-patch+json"


class Cluster:
    """One API server, seen with the operator's credentials."""

    def __init__(self, api: ApiClient) -> None:
        self._api = api

    async def get(self, kind: Kind, namespace: str, name: str) -> dict[str, Any] | None:
        """The object, or None."""
        try:
            return await self._request("GET", "get", kind.resource, kind.path(namespace, name))
        except NotFound:
            return None

    async def list(
        self,
        kind: Kind,
        *,
        namespace: str | None = None,
        labels: str | None = None,
        fields: str | None = None,
    ) -> tuple[list[dict[str, Any]], str]:
        """All objects and the resource version of the list, fetched in pages.

        The items carry apiVersion and kind, which the server leaves out. Raises `NotFound` when the API is absent.
        """
        items: list[dict[str, Any]] = []
        token = ""
        while True:
            query = [("limit", str(PAGE))]
            query += [
                (key, value)
                for key, value in (("labelSelector", labels), ("fieldSelector", fields), ("continue", token))
                if value
            ]
            page = await self._request("GET", "list", kind.resource, kind.path(namespace), query=query)
            items += ({"apiVersion": kind.api_version, "kind": kind.kind} | item for item in page["items"])
            token = page["metadata"].get("continue", "")
            if not token:
                return items, str(page["metadata"]["resourceVersion"])

    async def apply(
        self,
        item: Object,
        *,
        force: bool,
        manager: str = MANAGER,
        part: str | None = None,
        dry_run: bool = False,
    ) -> dict[str, Any]:
        """Server-side apply; the object as it is now. Without `force`, `Conflict` when another manager owns a field."""
        kind = kind_of(item)
        meta = item["metadata"]
        assert isinstance(meta, Mapping)
        query = [("fieldManager", manager), ("force", "true" if force else "false")]
        if dry_run:
            query.append(("dryRun", "All"))
        resource = kind.resource if part is None else f"{kind.resource}/{part}"
        path = kind.path(meta["namespace"], meta["name"], part)
        return await self._request(
            "PATCH", "patch", resource, path, query=query, body=item, content_type=APPLY_TYPE
        )

    async def replace_spec(
        self, kind: Kind, found: Mapping[str, Any], spec: Object, *, dry_run: bool = False
    ) -> dict[str, Any]:
        """Give an object as it was found another spec as a whole. `Conflict` or `Invalid` when it changed since."""
        meta = found["metadata"]
        changes = [
            {"op": "test", "path": "/metadata/resourceVersion", "value": meta["resourceVersion"]},
            {"op": "replace", "path": "/spec", "value": spec},
        ]
        return await self._request(
            "PATCH",
            "patch",
            kind.resource,
            kind.path(meta["namespace"], meta["name"]),
            query=[("fieldManager", REPAIR_MANAGER), *([("dryRun", "All")] if dry_run else [])],
            body=changes,
            content_type=JSON_PATCH_TYPE,
        )

    async def create(self, item: Object) -> dict[str, Any]:
        """Create the object."""
        kind = kind_of(item)
        meta = item["metadata"]
        assert isinstance(meta, Mapping)
        return await self._request("POST", "create", kind.resource, kind.path(meta["namespace"]), body=item)

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str) -> None:
        """Delete exactly this object, what it owns in the background. Done already is done."""
        body: Object = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        try:
            await self._request("DELETE", "delete", kind.resource, kind.path(namespace, name), body=body)
        except NotFound:
            return
        except ClusterError as error:
            if error.status != 409:  # another object has the name by now
                raise

    async def serves(self, kind: Kind) -> bool:
        """Whether the API of a kind is there."""
        try:
            found = await self._request("GET", "get", kind.resource, kind.root)
        except NotFound:
            return False
        return any(entry.get("name") == kind.plural for entry in found.get("resources", ()))

    async def try_watch(self, kind: Kind, *, namespace: str | None, labels: str | None, since: str) -> None:
        """Watch for a second. Raises `Forbidden` when that is not allowed."""
        query = [("watch", "true"), ("timeoutSeconds", "1"), ("resourceVersion", since)]
        if labels is not None:
            query.append(("labelSelector", labels))
        await self._send("GET", "watch", kind.resource, kind.path(namespace), query=query)

    async def crd(self) -> dict[str, Any] | None:
        """The CustomResourceDefinition of services as it is served."""
        try:
            return await self._request(
                "GET", "get", "customresourcedefinitions.apiextensions.k8s.io", CRD_PATH
            )
        except NotFound:
            return None

    async def _request(
        self,
        method: str,
        verb: str,
        resource: str,
        path: str,
        *,
        query: Sequence[tuple[str, str]] = (),
        body: object = None,
        content_type: str = "application/json",
    ) -> dict[str, Any]:
        data = await self._send(
            method, verb, resource, path, query=query, body=body, content_type=content_type
        )
        try:
            found: dict[str, Any] = json.loads(data)
        except ValueError as error:  # something in between has answered
            raise no_answer(verb, resource, error) from error
        return found

    async def _send(
        self,
        method: str,
        verb: str,
        resource: str,
        path: str,
        *,
        query: Sequence[tuple[str, str]] = (),
        body: object = None,
        content_type: str = "application/json",
    ) -> bytes:
        prepared = await self._api.param_serialize(
            method,
            path,
            query_params=list(query),
            header_params={"Accept": "application/json", "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            answer = await self._api.call_api(*prepared, _request_timeout=REQUEST_TIMEOUT_S)
            data: bytes = await answer.read()  # type: ignore[no-untyped-call]
        except (TimeoutError, aiohttp.ClientError, OSError, ApiException) as error:
            raise no_answer(verb, resource, error) from error
        if not 200 <= answer.status <= 299:
            raise answer_error(verb, resource, answer.status, data)
        return data
