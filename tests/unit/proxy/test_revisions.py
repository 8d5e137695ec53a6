from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flowprefill.proxy.revisions import num_proxies, usable_revisions
from flowprefill.wire import Endpoint


def pod(role: str, revision: str, name: str = "", **fields: object) -> Endpoint:
    name = name or f"{role}-{revision}"
    return Endpoint(name=name, role=role, revision=revision, address="h:1", admin="h:2", **fields)


def names(endpoints: list[Endpoint], **options: object) -> list[str]:
    return [r.name for r in usable_revisions(endpoints, **options)]


def test_a_revision_needs_a_ready_endpoint_in_both_roles():
    assert names([pod("prefill", "a"), pod("decode", "b")]) == []
    assert names([pod("prefill", "a"), pod("decode", "a", ready=False)]) == []
    assert names([pod("prefill", "a"), pod("decode", "a", terminating=True, ready=False)]) == []
    assert names([pod("prefill", "a"), pod("decode", "a")]) == ["a"]


def test_the_newest_complete_revision_comes_first():
    old = [pod("prefill", "a", created_s=10), pod("decode", "a", created_s=11)]
    new = [pod("prefill", "b", created_s=20), pod("decode", "b", created_s=20, ready=False)]
    assert names(old + new) == ["a"]
    ready = [new[0], new[1].model_copy(update={"ready": True})]
    assert names(old + ready) == ["b", "a"]
    assert names(ready + old) == ["b", "a"]


def test_our_own_revision_comes_before_a_newer_one_while_it_has_pods():
    old = [pod("prefill", "a", created_s=10), pod("decode", "a", created_s=10)]
    new = [pod("prefill", "b", created_s=20), pod("decode", "b", created_s=20)]
    assert names(old + new, own_revision="a") == ["a", "b"]
    leaving = [old[0], old[1].model_copy(update={"terminating": True})]
    assert names(leaving + new, own_revision="a") == ["b"]


def test_without_times_the_one_listed_last_comes_first():
    both = [pod(role, revision) for revision in "ab" for role in ("prefill", "decode")]
    assert names(both) == ["b", "a"]


def test_pods_that_terminate_are_used_only_while_no_revision_is_usable_without_them():
    leaving = [pod("prefill", "a", "p0", terminating=True), pod("decode", "a")]
    assert [(r.name, r.leaving) for r in usable_revisions(leaving)] == [("a", True)]
    successor = pod("prefill", "a", "p1")
    (revision,) = usable_revisions([*leaving, successor])
    assert (revision.leaving, [e.name for e in revision.first]) == (False, ["p1"])
    other = [pod("prefill", "b", created_s=-1.0), pod("decode", "b", created_s=-1.0)]
    assert names([*leaving, *other], own_revision="a") == ["b"]
    stopped = leaving[0].model_copy(update={"ready": False})
    assert names([stopped, leaving[1]]) == []


def test_colocated_pods_need_no_other_role():
    assert names([pod("colocated", "a"), pod("prefill", "b")]) == ["a"]


def test_a_revision_of_the_other_mode_is_usable_too():
    old = [pod("prefill", "a", created_s=1), pod("decode", "a", created_s=1)]
    new = [pod("colocated", "b", created_s=2)]
    assert [(r.name, r.colocated) for r in usable_revisions(old + new)] == [("b", True), ("a", False)]
    loading = [new[0].model_copy(update={"ready": False})]
    assert [(r.name, r.colocated) for r in usable_revisions(old + loading)] == [("a", False)]


def test_a_proxy_of_a_new_revision_uses_the_old_ones_pods_until_its_own_are_ready():
    old = [pod("prefill", "a"), pod("decode", "a")]
    new = [pod("prefill", "b", ready=False), pod("decode", "b")]
    assert names(old + new, own_revision="b") == ["a"]
    assert names(old, own_revision="b") == ["a"]


def test_ready_proxies_are_counted_and_we_are_one_of_them():
    assert num_proxies([]) == 1
    proxies = [pod("proxy", "a", "x"), pod("proxy", "a", "y"), pod("proxy", "a", "z", terminating=True)]
    assert num_proxies(proxies) == 2


endpoints = st.lists(
    st.builds(
        pod,
        st.sampled_from(["prefill", "decode", "colocated", "proxy"]),
        st.sampled_from("abc"),
        name=st.uuids().map(str),
        ready=st.booleans(),
        terminating=st.booleans(),
        created_s=st.sampled_from([0.0, 1.0, 2.0]),
    ),
    max_size=12,
)


@given(endpoints)
def test_a_usable_revision_never_holds_another_revisions_pod_and_a_leaving_one_only_where_it_says_so(
    all_endpoints,
):
    for revision in usable_revisions(all_endpoints):
        members = (*revision.first, *revision.decode)
        assert {m.revision for m in members} == {revision.name}
        assert all(m.ready for m in members)
        assert revision.leaving or not any(m.terminating for m in members)
        assert revision.first
        assert revision.decode or {m.role for m in members} == {"colocated"}
