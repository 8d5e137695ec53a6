"""kopf: the watches. A handler only passes on what it is told.

kopf's other ways to react (timers, daemons, deletion handlers) would put a finalizer on every service; none is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import kopf
from kubernetes.aio.client import Configuration

from flowprefill_operator.controller.resync import SELECTOR
from flowprefill_operator.kinds import SERVICES, WATCHED, Kind

log = logging.getLogger(__name__)

Event = Mapping[str, Any]
"""A watch event as kopf tells it; objects are what an API server sent."""

PREFIX = "operator.flowprefill.io"
"""Of everything that kopf itself might write on an object; with these handlers it writes nothing."""

SILENT_WATCH_S = 70.0
"""The API server sends a bookmark a minute; a watch without even that is dead."""


class EndlessBackoffs:
    """Pauses between tries of a request, in seconds: growing, capped, without end. A 403 is told in conditions and may be
    granted any time; an API server may be away for long."""

    def __iter__(self) -> Iterator[float]:
        yield from (0.5, 1.0, 2.0, 3.0)
        while True:
            yield 5.0


def quieten() -> None:
    """Log what kopf says of problems; what it says of every event would be a line for each change in the cluster."""
    objects = logging.getLogger("kopf.objects")
    objects.setLevel(logging.WARNING)
    objects.addFilter(_plain)
    for name in ("kopf.activities", "kopf._core.engines.activities"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # They tell with a traceback each what ends kopf, which `Watches` tells in a line. One warns that signals are not
    # its own, which is so on purpose.
    for name in ("kopf._core.reactor.orchestration", "kopf._core.reactor.running"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    logging.getLogger("kopf._core.reactor.observation").addFilter(_not_of_absent_kinds)


def _not_of_absent_kinds(record: logging.LogRecord) -> bool:
    """Which APIs there are is told by each look at everything; kopf advises to create the CRDs of other projects."""
    return "Unresolved resources" not in record.getMessage()


def _plain(record: logging.LogRecord) -> bool:
    """kopf's records carry all its settings, and the object as a mapping."""
    vars(record).pop("settings", None)
    ref = vars(record).pop("k8s_ref", None)
    vars(record).pop("k8s_skip", None)
    if isinstance(ref, dict):
        record.object = f"{ref.get('kind')} {ref.get('namespace')}/{ref.get('name')}"
    return True


def registry(
    *,
    on_service: Callable[[Event], object],
    on_object: Callable[[Kind, Event], object],
    configuration: Configuration,
) -> kopf.OperatorRegistry:
    """The handlers: one for services, one for every kind of object that belongs to them. They only pass on what they
    are told: `type` (None in a list, ADDED, MODIFIED or DELETED) and `object`."""
    handlers = kopf.OperatorRegistry()

    @kopf.on.event(SERVICES.group, SERVICES.version, SERVICES.plural, registry=handlers)
    async def service_event(event: kopf.RawEvent, **_: Any) -> None:
        on_service(dict(event))

    def watch(kind: Kind) -> None:
        @kopf.on.event(kind.group, kind.version, kind.plural, registry=handlers, id=f"watch-{kind.resource}")
        async def object_event(event: kopf.RawEvent, **_: Any) -> None:
            on_object(kind, dict(event))

    for kind in WATCHED:
        watch(kind)

    @kopf.on.login(registry=handlers)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return await connection(configuration)

    return handlers


def settings(*, clusterwide: bool) -> kopf.OperatorSettings:
    """kopf's settings, each with its reason."""
    chosen = kopf.OperatorSettings()
    # Objects of the kinds that are none of ours never leave the API server.
    for kind in WATCHED:
        chosen.watching.label_selectors[kind.group, kind.version, kind.plural] = SELECTOR
    chosen.watching.inactivity_timeout = SILENT_WATCH_S
    chosen.watching.connect_timeout = 5.0
    chosen.watching.chunk_size = 500
    chosen.networking.request_timeout = 30.0
    chosen.networking.connect_timeout = 5.0
    chosen.networking.error_backoffs = EndlessBackoffs()
    # A worker task for each object lives this long after the object's last event.
    chosen.queueing.idle_timeout = 1.0
    # Events are our own, on transitions only.
    chosen.posting.enabled = False
    chosen.scanning.disabled = not clusterwide
    chosen.peering.standalone = True
    chosen.process.ultimate_exiting_timeout = 30.0
    chosen.persistence.finalizer = f"{PREFIX}/finalizer"
    chosen.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=PREFIX)
    chosen.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=PREFIX)
    return chosen


async def connection(configuration: Configuration) -> kopf.ConnectionInfo:
    """The client's credentials for kopf, fresh: the token of a pod is rotated."""
    hook: Any = configuration.refresh_api_key_hook  # Any: annotated as never set
    if hook is not None:
        refreshed = hook(configuration)
        if hasattr(refreshed, "__await__"):
            await refreshed
    header = str(configuration.api_key.get("BearerToken", ""))
    scheme, _, token = header.partition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        scheme=scheme.capitalize() if token else None,
        token=token or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
    )
