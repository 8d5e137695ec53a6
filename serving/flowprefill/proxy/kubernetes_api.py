"""Lists and watches the EndpointSlices of one service: one request each, every one of them bounded in time.

Credentials are the pod's own inside a cluster, whose token is read anew as it is rotated, and the user's kubeconfig
elsewhere.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
from kubernetes.aio import config as credentials
from kubernetes.aio.client import ApiClient, Configuration, DiscoveryV1Api
from pydantic import ValidationError

from flowprefill.errors import FlowPrefillError, InvalidConfiguration, reason_of
from flowprefill.proxy.slices import Slice
from flowprefill_crd.labels import ROLE, SERVICE, label_value

LIST_S = 20.0
"""A list that takes longer has failed."""

WATCH_S = (40, 50)
"""The server ends a watch after as many seconds, drawn anew each time, so that proxies do not come all at once."""

WATCH_GRACE_S = 15.0
"""A watch that goes on for so much longer has been cut silently."""

MAX_REASON = 300

BROKEN = (
    aiohttp.ClientError,
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    credentials.ConfigException,
)
"""What the client, and reading what it brought, may raise."""

Trouble = Literal["unauthorized", "forbidden", "refused", "connection", "timeout", "malformed", "unexpected"]


class SlicesUnavailable(FlowPrefillError):
    """The API server did not give what was asked for; `trouble` is the kind of reason."""

    def __init__(self, trouble: Trouble, reason: str) -> None:
        super().__init__(reason)
        self.trouble: Trouble = trouble


class Expired(FlowPrefillError):
    """The API server no longer knows the version that a watch goes on from (410): list again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """All slices at one version."""

    slices: tuple[Slice, ...]
    resource_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The watch is established."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A slice was added or changed."""

    slice: Slice
    resource_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """A slice is gone."""

    name: str
    resource_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bookmark:
    """Nothing changed up to this version."""

    resource_version: str


Event = Opened | Stored | Removed | Bookmark


async def api_configuration() -> Configuration:
    """Where the API server is and who we are. Raises `InvalidConfiguration`."""
    found = Configuration()
    # Python 3.13 by itself refuses authorities without a key identifier, which kubectl and other clients accept.
    found.disable_strict_ssl_verification = True
    inside = "KUBERNETES_SERVICE_HOST" in os.environ
    try:
        if inside:
            credentials.load_incluster_config(client_configuration=found)  # type: ignore[no-untyped-call]
        else:
            await credentials.load_kube_config(client_configuration=found)  # type: ignore[no-untyped-call]
    except (credentials.ConfigException, OSError) as error:
        where = "the pod's service account" if inside else "a kubeconfig, as this is no pod,"
        raise InvalidConfiguration(
            f"pods cannot be discovered: {where} gives no access to a cluster ({reason_of(error)}); "
            "--endpoints FILE needs none"
        ) from None
    return found


class SliceApi:
    """The EndpointSlices of `service` in `namespace`. Raises `SlicesUnavailable` for whatever goes wrong."""

    def __init__(
        self,
        api: ApiClient,
        *,
        namespace: str,
        service: str,
        watch_s: tuple[int, int] = WATCH_S,
        grace_s: float = WATCH_GRACE_S,
    ) -> None:
        self._api = DiscoveryV1Api(api)
        self._watch_s, self._grace_s = watch_s, grace_s
        self._namespace = namespace
        self._selector = f"{SERVICE}={label_value(service)},{ROLE}"

    async def list(self) -> Listing:
        """What is there now."""
        try:
            response = await self._asked(_request_timeout=LIST_S)
            async with response:
                body = await response.json(content_type=None)
            return Listing(
                slices=tuple(Slice.model_validate(item) for item in body.get("items") or ()),
                resource_version=str(body["metadata"]["resourceVersion"]),
            )
        except BROKEN as error:
            raise _unavailable(error) from error

    async def watch(self, resource_version: str) -> AsyncIterator[Event]:
        """Changes after `resource_version`, until the server ends the watch. Also raises `Expired`."""
        seconds = random.randint(*self._watch_s)
        try:
            response = await self._asked(
                watch=True,
                resource_version=resource_version,
                allow_watch_bookmarks=True,
                timeout_seconds=seconds,
                _request_timeout=seconds + self._grace_s,
            )
            async with response:
                yield Opened()
                async for line in response.content:
                    if not line.endswith(b"\n"):
                        raise SlicesUnavailable("connection", "a watch broke off in the middle of an event")
                    if line.strip():
                        yield _event(json.loads(line))
        except BROKEN as error:
            raise _unavailable(error) from error

    async def _asked(self, **parameters: Any) -> aiohttp.ClientResponse:  # Any: one value for each parameter
        response = await self._api.list_namespaced_endpoint_slice_without_preload_content(
            self._namespace, label_selector=self._selector, **parameters
        )
        if response.status == 200:
            return response
        async with response:
            text = await response.text(errors="replace")
        raise _refusal(response.status, text)


def _event(body: dict[str, Any]) -> Event:  # Any: JSON
    found = body["object"]
    match body["type"]:
        case "ADDED" | "MODIFIED":
            stored = Slice.model_validate(found)
            return Stored(slice=stored, resource_version=stored.metadata.resource_version)
        case "DELETED":
            version = str(found["metadata"]["resourceVersion"])
            return Removed(name=str(found["metadata"]["name"]), resource_version=version)
        case "BOOKMARK":
            return Bookmark(resource_version=str(found["metadata"]["resourceVersion"]))
        case "ERROR":
            raise _refusal(int(found.get("code") or 500), json.dumps(found))
        case other:
            raise SlicesUnavailable("malformed", f"a watch brought an event of unknown type {other!r}")


def _refusal(status: int, text: str) -> FlowPrefillError:
    try:
        message = str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        message = text
    reason = f"the API server answered {status}: {message[:MAX_REASON]}"
    match status:
        case 410:
            return Expired(reason)
        case 401:
            return SlicesUnavailable("unauthorized", reason)
        case 403:
            return SlicesUnavailable("forbidden", reason)
        case _:
            return SlicesUnavailable("refused", reason)


def _unavailable(error: Exception) -> SlicesUnavailable:
    trouble: Trouble
    match error:
        case TimeoutError():
            trouble = "timeout"
        case credentials.ConfigException():  # the token file is empty or gone
            trouble = "unauthorized"
        case aiohttp.ClientError() | OSError():
            trouble = "connection"
        case _:
            trouble = "malformed"
    reason = "not what an API server answers" if isinstance(error, ValidationError) else ""
    return SlicesUnavailable(trouble, f"{reason}: {reason_of(error)[:MAX_REASON]}".removeprefix(": "))
