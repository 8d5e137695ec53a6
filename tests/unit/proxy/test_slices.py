"""From EndpointSlices, as the API writes them, to endpoints. Expected values by hand from the API's reference."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowprefill.proxy.revisions import num_proxies, usable_revisions
from flowprefill.proxy.slices import Slice, endpoints_of
from flowprefill.wire import Endpoint
from support.slices import pod, slice_of, slices_of

UNSET = object()


def read(*stored: dict[str, Any]) -> tuple[Endpoint, ...]:
    return endpoints_of([Slice.model_validate(each) for each in stored])


def with_conditions(**conditions: Any) -> dict[str, Any]:
    stored = slice_of([pod("p0")], role="prefill", revision="r1")
    stored["endpoints"][0]["conditions"] = conditions
    return stored


def test_a_slice_as_the_cluster_writes_it_becomes_an_endpoint() -> None:
    stored = {
        "addressType": "IPv4",
        "apiVersion": "discovery.k8s.io/v1",
        "endpoints": [
            {
                "addresses": ["10.244.0.7"],
                "conditions": {"ready": True, "serving": True, "terminating": False},
                "nodeName": "node",
                "targetRef": {"kind": "Pod", "name": "demo-prefill-r1-abc", "namespace": "ns", "uid": "u"},
            }
        ],
        "kind": "EndpointSlice",
        "metadata": {
            "creationTimestamp": "2026-11-30T10:00:00Z",
            "generateName": "demo-prefill-r1-",
            "labels": {
                "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
                "flowprefill.io/revision": "r1",
                "flowprefill.io/role": "prefill",
                "flowprefill.io/service": "demo",
                "kubernetes.io/service-name": "demo-prefill-r1",
                "service.kubernetes.io/headless": "",
            },
            "name": "demo-prefill-r1-x7k2p",
            "resourceVersion": "1",
        },
        "ports": [
            {"name": "kv", "port": 7000, "protocol": "TCP"},
            {"name": "api", "port": 8000, "protocol": "TCP"},
            {"name": "admin", "port": 9000, "protocol": "TCP"},
        ],
    }
    assert read(stored) == (
        Endpoint(
            name="demo-prefill-r1-abc",
            role="prefill",
            revision="r1",
            address="10.244.0.7:8000",
            admin="10.244.0.7:9000",
            ready=True,
            terminating=False,
            created_s=1796032800.0,
        ),
    )


@pytest.mark.parametrize(
    ("conditions", "ready", "terminating"),
    [
        ({}, True, False),
        ({"ready": None, "serving": None, "terminating": None}, True, False),
        ({"ready": False, "serving": False, "terminating": False}, False, False),
        ({"ready": True}, True, False),
        ({"ready": False, "serving": True, "terminating": True}, True, True),
        ({"ready": False, "serving": False, "terminating": True}, False, True),
        ({"ready": False, "terminating": True}, False, True),
    ],
)
def test_conditions_mean_what_the_api_says(
    conditions: dict[str, Any], ready: bool, terminating: bool
) -> None:
    (endpoint,) = read(with_conditions(**conditions))
    assert (endpoint.ready, endpoint.terminating) == (ready, terminating)


def test_an_endpoint_without_any_conditions_counts_as_ready() -> None:
    stored = with_conditions()
    for conditions in (None, UNSET):
        if conditions is UNSET:
            del stored["endpoints"][0]["conditions"]
        else:
            stored["endpoints"][0]["conditions"] = conditions
        assert [e.ready for e in read(stored)] == [True]


@pytest.mark.parametrize("suffixes", ["ab", "ba"])
def test_all_slices_of_a_service_count_and_a_pod_in_two_of_them_once_and_as_ready(suffixes: str) -> None:
    stale = [pod("p0", ready=False), pod("p1")]
    now = [pod("p0"), pod("p2")]
    found = read(
        slice_of(stale, role="prefill", revision="r1", suffix=suffixes[0]),
        slice_of(now, role="prefill", revision="r1", suffix=suffixes[1]),
    )
    assert [e.name for e in found] == ["p0", "p1", "p2"]
    assert all(e.ready for e in found)


@pytest.mark.parametrize("suffixes", ["ab", "ba"])
def test_a_pod_that_goes_in_one_slice_and_serves_in_another_serves(suffixes: str) -> None:
    found = read(
        slice_of([pod("p0", terminating=True)], role="prefill", revision="r1", suffix=suffixes[0]),
        slice_of([pod("p0")], role="prefill", revision="r1", suffix=suffixes[1]),
    )
    assert [e.terminating for e in found] == [False]


def test_a_revision_is_as_old_as_its_oldest_slice_whatever_it_grew_by_later() -> None:
    old = [
        slice_of([pod("p0", created_s=1000.0)], role="prefill", revision="r1", suffix="a"),
        slice_of([pod("p9", created_s=9000.0)], role="prefill", revision="r1", suffix="b"),
        slice_of([pod("d0", "decode", created_s=1001.0)], role="decode", revision="r1"),
    ]
    new = [
        slice_of([pod("p1", revision="r2", created_s=5000.0)], role="prefill", revision="r2"),
        slice_of([pod("d1", "decode", "r2", created_s=5000.0)], role="decode", revision="r2"),
    ]
    found = read(*old, *new)
    assert {e.name: e.created_s for e in found} == {
        "p0": 1000.0,
        "p9": 1000.0,
        "d0": 1000.0,
        "p1": 5000.0,
        "d1": 5000.0,
    }
    assert [r.name for r in usable_revisions(found)] == ["r2", "r1"]


def test_proxies_are_found_without_a_revision_and_without_an_admin_port() -> None:
    members = [pod("x", "proxy", ""), pod("y", "proxy", ""), pod("z", "proxy", "", ready=False)]
    stored = slice_of(members, role="proxy")
    stored["ports"] = [{"name": "api", "port": 80, "protocol": "TCP"}]
    found = read(stored)
    assert {(e.name, e.role, e.revision) for e in found} == {(n, "proxy", "") for n in "xyz"}
    assert num_proxies(found) == 2


def test_what_cannot_be_used_is_left_out() -> None:
    no_revision = slice_of([pod("p0")], role="prefill")
    other_role = slice_of([pod("p1")], role="profile", revision="r1")
    no_ports = slice_of([pod("p2")], role="decode", revision="r1") | {"ports": None}
    no_address = slice_of([pod("p3")], role="decode", revision="r2")
    no_address["endpoints"][0]["addresses"] = []
    empty = slice_of([], role="decode", revision="r3") | {"endpoints": None}
    assert read(no_revision, other_role, no_ports, no_address, empty) == ()


def test_an_address_of_version_6_is_written_as_urls_have_it() -> None:
    stored = slice_of([pod("p0")], role="prefill", revision="r1") | {"addressType": "IPv6"}
    stored["endpoints"][0] |= {"addresses": ["fd00::7"], "targetRef": None}
    (endpoint,) = read(stored)
    assert (endpoint.name, endpoint.address, endpoint.admin) == (
        "[fd00::7]",
        "[fd00::7]:8000",
        "[fd00::7]:9000",
    )


members = st.lists(
    st.builds(
        pod,
        st.sampled_from(["a", "b", "c", "d"]),
        st.sampled_from(["prefill", "decode", "colocated"]),
        st.sampled_from(["r1", "r2"]),
        ready=st.booleans(),
        terminating=st.booleans(),
    ),
    unique_by=lambda e: (e.name, e.role),
)


@given(members)
def test_endpoints_survive_the_way_through_slices(endpoints: list[Endpoint]) -> None:
    assert set(read(*slices_of(endpoints))) == set(endpoints)
