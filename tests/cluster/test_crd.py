"""The CRD on real API servers: it is accepted whole, and says of bad services what Python says."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from flowprefill_crd.crd import CRD_NAME
from flowprefill_crd.generate import ROOT
from flowprefill_crd.samples import sample_path
from support.bad_services import BAD_SERVICES, BadService
from support.control_plane.kubectl import Kubectl
from support.services import MINIMAL_SPEC, document

SAMPLES = sorted(path.name for path in sample_path("quickstart.yaml").parent.glob("*.yaml"))


@pytest.fixture(scope="module")
def api(api_server: Kubectl) -> Kubectl:
    api_server.kubectl("apply", "--server-side", "-f", str(ROOT / "crds" / f"{CRD_NAME}.yaml"))
    api_server.until_done("wait", "--for=condition=Established", "--timeout=60s", f"crd/{CRD_NAME}")
    return api_server


def apply(api: Kubectl, body: dict[str, Any], *, check: bool = True, dry: bool = True) -> str:
    """Apply on the server; what was said."""
    options = ["--dry-run=server"] if dry else []
    done = api.kubectl(
        "apply",
        "--server-side",
        "--validate=strict",
        *options,
        "-f",
        "-",
        stdin=json.dumps(body),
        check=check,
    )
    assert check or done.returncode != 0, f"accepted: {done.stdout}"
    return done.stdout + done.stderr


def test_its_schema_is_structural_and_has_no_complaint(api: Kubectl) -> None:
    conditions = {c["type"]: c for c in api.get("crd", CRD_NAME)["status"]["conditions"]}
    assert conditions["Established"]["status"] == "True"
    assert conditions["NamesAccepted"]["status"] == "True"
    assert "NonStructuralSchema" not in conditions


@pytest.mark.parametrize("name", SAMPLES)
def test_every_sample_is_accepted_as_it_is(api: Kubectl, name: str) -> None:
    apply(api, yaml.safe_load(sample_path(name).read_text()))


@pytest.mark.parametrize("bad", BAD_SERVICES, ids=str)
def test_a_bad_service_is_refused_with_its_field_and_what_is_accepted(api: Kubectl, bad: BadService) -> None:
    said = apply(api, document(bad.spec), check=False)
    assert bad.message in said
    assert bad.path in said


def test_an_unknown_field_is_refused_by_name(api: Kubectl) -> None:
    said = apply(api, document({**MINIMAL_SPEC, "replicaz": 3}), check=False)
    assert "replicaz" in said


def test_it_is_listed_and_explained(api: Kubectl) -> None:
    sample = yaml.safe_load(sample_path("quickstart.yaml").read_text())
    apply(api, sample, dry=False)
    header, row = api.kubectl("get", "fps").stdout.splitlines()
    assert header.split("  ")[0] == "NAME"
    for column in ("READY", "PREFILL", "DECODE", "TTFT SLO", "URL", "AGE"):
        assert column in header
    assert row.startswith("quickstart")
    # A CRD's schema is published some time after it is established.
    assert "ttftMilliseconds" in api.until_done("explain", "flowprefillservices.spec.sloClasses")
    assert "<required>" not in api.until_done("explain", "flowprefillservices.status")
    api.kubectl("delete", "fps", "quickstart")


def test_only_the_status_endpoint_writes_the_status(api: Kubectl) -> None:
    sample = yaml.safe_load(sample_path("quickstart.yaml").read_text())
    apply(api, {**sample, "status": {"url": "http://elsewhere"}}, dry=False)
    assert "url" not in api.get("fps", "quickstart").get("status", {})
    patch = json.dumps({"status": {"url": "http://here"}})
    api.kubectl("patch", "fps", "quickstart", "--subresource=status", "--type=merge", "-p", patch)
    found = api.get("fps", "quickstart")
    assert found["status"]["url"] == "http://here"
    assert found["metadata"]["generation"] == 1
    api.kubectl("delete", "fps", "quickstart")
