"""Names of objects are valid, and different, for every release that Helm accepts."""

from __future__ import annotations

import re

import pytest

from support.helm import Helm, only

DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
LONG = "a" * 53
"""Helm's longest release name."""


@pytest.mark.parametrize(
    ("release", "values", "name"),
    [
        ("flowprefill", {}, "flowprefill-operator"),
        ("my-flowprefill", {}, "my-flowprefill-operator"),
        ("fp", {}, "fp-flowprefill-operator"),
        ("fp", {"nameOverride": "server"}, "fp-server-operator"),
        ("fp", {"fullnameOverride": "mine"}, "mine-operator"),
    ],
)
def test_names_come_from_the_release_unless_they_are_overridden(
    helm: Helm, release: str, values: dict[str, str], name: str
) -> None:
    assert only(helm.template(values, name=release), "Deployment")["metadata"]["name"] == name


@pytest.mark.parametrize("release", ["1st", "a.b", f"{LONG}", "0.0", f"{LONG[:40]}.{LONG[:12]}"])
def test_names_of_any_release_are_valid(helm: Helm, release: str) -> None:
    for values in ({}, {"namespaces": ["n" * 63]}):
        for item in helm.template(values, name=release, namespace="s" * 63):
            if item["kind"] == "CustomResourceDefinition":
                continue
            name = item["metadata"]["name"]
            assert len(name) <= 63
            assert DNS_1035.fullmatch(name), name
            assert all(len(value) <= 63 for value in item["metadata"]["labels"].values())


def test_releases_whose_names_are_cut_or_changed_share_no_object(helm: Helm) -> None:
    names = ["a.b", "a-b", f"{LONG[:52]}b", LONG, "1a", "r1a"]
    found = {only(helm.template(name=name), "Deployment")["metadata"]["name"] for name in names}
    assert len(found) == len(names)
