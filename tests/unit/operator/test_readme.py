"""The operator's README names every metric, every field of the configuration and every reason, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from flowprefill_crd.generate import ROOT
from flowprefill_operator.config import Images, LeaderElection, OperatorConfig
from flowprefill_operator.controller.metrics import OperatorMetrics

README = (ROOT / "operator" / "README.md").read_text()
STATUS = ROOT / "operator" / "flowprefill_operator" / "status"
HOLDS = {"Valid", "Applied", "Profiled", "PodsReady", "Complete", "InUse", "Serving"}
"""Reasons of conditions that hold; a table of what is wrong has no row for them."""

FROM_ELSEWHERE = {
    "InvalidSpec",
    "InvalidPodTemplate",
    "MultiNodeUnsupported",
    "ProfilingJobUnsupported",
    "NameConflict",
    "BeingDeleted",
}
"""Reasons that reach the status from outside its folder."""


def section(title: str) -> str:
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_every_metric_is_in_the_table() -> None:
    told = set(re.findall(r"^\| `(flowprefill_operator_\w+)`", section("Metrics"), re.MULTILINE))
    suffix = {"counter": "_total", "info": "_info"}
    found = {f"{m.name}{suffix.get(m.type, '')}" for m in OperatorMetrics().registry.collect()}
    assert told == found


def test_every_field_of_the_configuration_is_in_the_table() -> None:
    text = section("Configuration")
    for model in (OperatorConfig, Images, LeaderElection):
        for field in model.model_fields.values():
            assert re.search(rf"\b{field.alias}\b", text), field.alias


def test_every_reason_is_in_the_table_and_no_other() -> None:
    code = "\n".join(path.read_text() for path in Path(STATUS).glob("*.py"))
    made = set(
        re.findall(r'(?:stalled|pending|unknown|asked_for|reason=|return)\(?\s*"([A-Z][A-Za-z]+)"', code)
    )
    made |= set(re.findall(r'"([A-Z]\w+)" if missing', code)) | {
        "ContainerConfigError",
        "VolumeNotMounted",
        "SecretMissing",
    }
    table = section("Conditions").partition("reasons otherwise")[2]
    told = set(re.findall(r"`([A-Z][A-Za-z]+)`", "\n".join(row.rpartition("| ")[2] for row in _rows(table))))
    named = set(re.findall(r"`([A-Z][A-Za-z]+)`", section("Conditions")))
    assert made - HOLDS - named == set()
    assert named >= FROM_ELSEWHERE
    assert told - made - FROM_ELSEWHERE - {"ObjectsApplied"} == set()


def _rows(table: str) -> list[str]:
    return [line.rstrip(" |") for line in table.splitlines() if line.startswith("|")]
