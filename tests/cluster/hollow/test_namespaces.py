"""An operator of listed namespaces serves them with rights there alone, and is silent about every other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flowprefill_operator.kinds import CONFIG_MAPS
from support.control_plane.operated import Operated, operated, simulated
from support.control_plane.plane import ControlPlane
from support.control_plane.waiting import until

SERVED = ("served-one", "served-two")
OTHER = "not-served"


@pytest.fixture(scope="module")
def cluster(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    """An operator of two namespaces, of three that there are."""
    names = (*SERVED, OTHER)
    for name in names:
        plane.kubectl("create", "namespace", name)
    folder = tmp_path_factory.mktemp("operator")
    with operated(plane, folder, account="namespaced-operator", namespaces=SERVED) as found:
        yield found
    plane.kubectl("delete", "namespace", *names, "--wait=false")


def test_services_of_listed_namespaces_get_ready_and_others_stay_as_they_are(cluster: Operated) -> None:
    cluster.apply(OTHER, simulated("web"))
    for name in SERVED:
        cluster.apply(name, simulated("web"))
    for name in SERVED:
        cluster.wait_ready(name, "web")
    found = cluster.service(OTHER, "web")
    assert "status" not in found
    assert cluster.owned(OTHER, found["metadata"]["uid"]) == {}
    refused = [call for call in cluster.faulty.calls.all() if call.status == 403]
    assert refused == [], "it asks for nothing that it may not"
    outside = {call.namespace for call in cluster.faulty.calls.writes()} - set(SERVED)
    assert outside == set()


def test_drift_is_mended_there_too(cluster: Operated) -> None:
    (name, _) = SERVED
    cluster.wait_ready(name, "web")
    cluster.delete(CONFIG_MAPS, name, "web-live")
    until(lambda: cluster.get(CONFIG_MAPS, name, "web-live"), "it is there again", within_s=10.0)
