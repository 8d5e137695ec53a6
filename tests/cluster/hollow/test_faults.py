"""The faulty API server: what passes through it is the API server's, what it breaks is broken as a case says."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from support.control_plane.faults import FaultyApiServer
from support.control_plane.plane import ControlPlane
from support.control_plane.waiting import until

MAPS = "/api/v1/namespaces/{}/configmaps"


@pytest.fixture(scope="module")
def faulty(plane: ControlPlane) -> Iterator[FaultyApiServer]:
    with FaultyApiServer(plane) as faulty:
        yield faulty


@pytest.fixture
def http(faulty: FaultyApiServer) -> Iterator[httpx.Client]:
    faulty.heal()
    faulty.calls.clear()
    headers = {"authorization": "Bearer admin-token", "user-agent": "a-test"}
    with httpx.Client(base_url=faulty.url, headers=headers, trust_env=False, timeout=10.0) as client:
        yield client


def write(http: httpx.Client, namespace: str, name: str) -> httpx.Response:
    return http.post(MAPS.format(namespace), json={"metadata": {"name": name}})


def names(plane: ControlPlane, namespace: str) -> set[str]:
    items = plane.get("configmaps", "-n", namespace)["items"]
    return {item["metadata"]["name"] for item in items} - {"kube-root-ca.crt"}


class Watch:
    """A watch of a namespace's ConfigMaps in the background; `names` gets each name that it tells."""

    def __init__(self, http: httpx.Client, namespace: str) -> None:
        self.names: queue.Queue[str] = queue.Queue()
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(http, namespace), daemon=True)
        self._thread.start()

    def _run(self, http: httpx.Client, namespace: str) -> None:
        try:
            with http.stream("GET", MAPS.format(namespace), params={"watch": "1"}, timeout=None) as answer:
                for line in answer.iter_lines():
                    self.names.put(json.loads(line)["object"]["metadata"].get("name", "none"))
        except httpx.HTTPError:
            pass
        self.ended.set()


def test_requests_pass_with_the_callers_credentials_and_are_counted_by_caller(
    plane: ControlPlane, faulty: FaultyApiServer, http: httpx.Client, namespace: str
) -> None:
    assert write(http, namespace, "one").status_code == 201
    assert write(http, namespace, "one").status_code == 409
    assert http.get(MAPS.format(namespace), headers={"authorization": "Bearer nobody"}).status_code == 401
    assert names(plane, namespace) == {"one"}
    assert faulty.calls.writes_by_agent() == {"a-test": 2}
    assert [(c.verb, c.resource, c.status) for c in faulty.calls.all()] == [
        ("create", "configmaps", 201),
        ("create", "configmaps", 409),
        ("list", "configmaps", 401),
    ]


def test_a_lease_an_event_and_a_dry_run_are_no_writes(
    faulty: FaultyApiServer, http: httpx.Client, namespace: str
) -> None:
    http.post(f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases", json={"metadata": {"name": "l"}})
    http.post(f"/api/v1/namespaces/{namespace}/events", json={})
    http.post(MAPS.format(namespace), params={"dryRun": "All"}, json={"metadata": {"name": "dry"}})
    assert len(faulty.calls.all()) == 3
    assert faulty.calls.writes() == []


@pytest.mark.parametrize(("when", "done"), [("before", {"one"}), ("after", {"one", "two"})])
def test_the_hook_runs_at_the_kth_write_before_or_after_it_is_done(
    plane: ControlPlane,
    faulty: FaultyApiServer,
    http: httpx.Client,
    namespace: str,
    when: Any,
    done: set[str],
) -> None:
    ran: list[str] = []
    faulty.calls.at_write(2, lambda: ran.append("hook"), when)
    write(http, namespace, "one")
    assert ran == []
    with pytest.raises(httpx.TransportError):
        write(http, namespace, "two")
    assert ran == ["hook"]
    assert names(plane, namespace) == done
    assert write(http, namespace, "three").status_code == 201


def test_a_refusal_meets_its_verb_and_resource_alone(
    plane: ControlPlane, faulty: FaultyApiServer, http: httpx.Client, namespace: str
) -> None:
    refusal = faulty.refuse(403, verb="create", resource="configmaps")
    refused = write(http, namespace, "one")
    assert (refused.status_code, refused.json()["reason"]) == (403, "Forbidden")
    assert http.get(MAPS.format(namespace)).status_code == 200
    faulty.heal(refusal)
    assert write(http, namespace, "one").status_code == 201


def test_a_silenced_watch_stays_open_and_tells_nothing_while_a_new_one_does(
    plane: ControlPlane, faulty: FaultyApiServer, http: httpx.Client, namespace: str
) -> None:
    watch = Watch(http, namespace)
    write(http, namespace, "one")
    until(lambda: "one" in list(watch.names.queue), "the watch tells of one")
    assert faulty.silence_watches("configmaps") == 1
    assert faulty.num_watches("configmaps") == 0
    later = Watch(http, namespace)
    write(http, namespace, "two")
    until(lambda: "two" in list(later.names.queue), "a new watch tells of two")
    assert "two" not in list(watch.names.queue)
    assert not watch.ended.is_set()


def test_an_api_server_that_is_down_refuses_and_cuts_and_comes_back(
    faulty: FaultyApiServer, http: httpx.Client, namespace: str
) -> None:
    watch = Watch(http, namespace)
    write(http, namespace, "one")
    until(lambda: "one" in list(watch.names.queue), "the watch tells of one")
    faulty.go_down()
    assert watch.ended.wait(10.0)
    with pytest.raises(httpx.ConnectError):
        http.get("/readyz")
    faulty.come_back()
    assert http.get("/readyz").status_code == 200
