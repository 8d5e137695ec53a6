"""What a running service says of itself: the supervisor's status, and what proxies and pods answer on admin ports."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from flowprefill_crd import FlowPrefillService, InvalidDocument, load_services
from flowprefill_operator.node.logs import is_note, last_lines
from flowprefill_operator.node.state import ContainerReport, NodeStatus, PodReport, StateDir

ANSWER_TIMEOUT_S = 1.0
WINDOW = "5m"
LOOK_BACK = 50
"""Lines of a log among which the container's own last one is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassView:
    """An SLO class: its promise and how often it was kept, since the start and lately. Counts are requests."""

    name: str
    ttft_milliseconds: int
    objective: str
    met: int
    missed: int
    recently_met: int
    recently_missed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """A worker's own words: waiting requests, KV blocks."""

    waiting: int
    kv_blocks: int
    kv_blocks_free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Everything `flowprefill status` shows of a service. `generations` (of the live document in use), `engines` and
    `last_lines` are by pod name; a pod that does not answer, or has nothing to say, is not in them."""

    running: bool
    status: NodeStatus
    policy: str
    classes: tuple[ClassView, ...]
    generations: Mapping[str, int]
    engines: Mapping[str, EngineView]
    last_lines: Mapping[str, str]

    def as_json(self) -> dict[str, object]:
        """The view for programs."""
        return {
            **self.status.model_dump(mode="json"),
            "running": self.running,
            "policy": self.policy,
            "sloClasses": [{key: getattr(c, key) for key in c.__slots__} for c in self.classes],
            "generations": dict(self.generations),
            "engines": {
                pod: {key: getattr(e, key) for key in e.__slots__} for pod, e in self.engines.items()
            },
            "lastLines": dict(self.last_lines),
        }


def look(state: StateDir) -> View:
    """Ask everything that runs; pods that do not answer within a second are left out."""
    running = state.is_running()
    status = state.read_status() or NodeStatus(
        service=state.name, namespace=state.namespace, pid=0, started_at=0.0
    )
    if not running:
        status = status.model_copy(update={"pods": (), "ready": False, "stopping": False})
    service = _service(state)
    with httpx.Client(timeout=ANSWER_TIMEOUT_S, trust_env=False) as http:
        answers = {pod.name: own_words(http, pod) for pod in status.pods}
    roles = {pod.name: pod.role for pod in status.pods}
    counts = [answer["classes"] for answer in answers.values() if "classes" in answer]
    return View(
        running=running,
        status=status,
        policy="" if service is None else service.spec.scheduling.policy,
        classes=() if service is None else _classes(service, counts),
        generations={
            name: _count(answer, "generation") for name, answer in answers.items() if "generation" in answer
        },
        engines={
            name: EngineView(
                waiting=_count(answer, "waiting"),
                kv_blocks=_count(answer, "kv_blocks"),
                kv_blocks_free=_count(answer, "kv_blocks_free"),
            )
            for name, answer in answers.items()
            if answer and roles[name] != "proxy"
        },
        last_lines={
            pod.name: line
            for pod in status.pods
            if not pod.ready and not pod.terminating and (line := _last_line(pod))
        },
    )


def _service(state: StateDir) -> FlowPrefillService | None:
    try:
        return load_services(state.service)[0]
    except InvalidDocument:
        return None


def _classes(service: FlowPrefillService, answers: Sequence[object]) -> tuple[ClassView, ...]:
    found = []
    for slo in service.spec.slo_classes:
        of_class = [counts for answer in answers if isinstance(counts := _entry(answer, slo.name), Mapping)]
        recent = [_entry(counts, "windows", WINDOW) for counts in of_class]
        found.append(
            ClassView(
                name=slo.name,
                ttft_milliseconds=slo.ttft_milliseconds,
                objective=slo.objective,
                met=sum(_count(counts, "met") for counts in of_class),
                missed=sum(_count(counts, "missed") for counts in of_class),
                recently_met=sum(_count(counts, "met") for counts in recent),
                recently_missed=sum(_count(counts, "missed") for counts in recent),
            )
        )
    return tuple(found)


def generation_of(http: httpx.Client, pod: PodReport) -> int:
    """The generation of the live document that a pod follows; -1 when it does not say."""
    answer = own_words(http, pod)
    return _count(answer, "generation") if "generation" in answer else -1


def own_words(http: httpx.Client, pod: PodReport) -> Mapping[str, object]:
    """What a pod says of itself on its admin port; empty when it does not answer.

    A proxy's attainment (`generation`, `classes`), or the first line of a worker's state stream (`PodState`).
    """
    if "admin" not in pod.ports:
        return {}
    path = "/v1/attainment" if pod.role == "proxy" else "/v1/state"
    try:
        with http.stream("GET", f"http://127.0.0.1:{pod.ports['admin']}{path}") as response:
            if response.status_code != 200:
                return {}
            answer = json.loads(next(response.iter_lines(), ""))
    except (httpx.HTTPError, ValueError):
        return {}
    return answer if isinstance(answer, dict) else {}


def _entry(value: object, *path: str) -> object:
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _count(value: object, key: str) -> int:
    number = _entry(value, key)
    return number if isinstance(number, int) else 0


def _last_line(pod: PodReport) -> str:
    """The last thing that a container of the pod that is not ready has written."""
    for container in (*pod.init_containers, *pod.containers):
        if not container.ready and (lines := _lines(container)):
            return lines[-1]
    return ""


def _lines(container: ContainerReport) -> list[str]:
    return [line for line in last_lines(Path(container.log), LOOK_BACK) if not is_note(line)]
