"""The chart installs exactly the CRD of crds/, when its values say so."""

from __future__ import annotations

from typing import Any

import yaml

from flowprefill_crd.crd import CRD_NAME, custom_resource_definition
from flowprefill_crd.generate import ROOT
from support.helm import CHART, Helm, by_kind, only

KIND = "CustomResourceDefinition"
TEMPLATE = CHART / "templates" / "crds" / f"{CRD_NAME}.yaml"


def test_the_chart_holds_the_crd_of_crds_and_little_else() -> None:
    """Without the lines of Helm the template is the file in crds/, byte for byte."""
    lines = TEMPLATE.read_text().splitlines(keepends=True)
    plain = [line for line in lines if "{{" not in line and "helm.sh/resource-policy" not in line]
    assert "".join(plain) == (ROOT / "crds" / f"{CRD_NAME}.yaml").read_text()
    assert [line.strip() for line in lines if line not in plain] == [
        "{{- if .Values.crds.create }}",
        "{{- if .Values.crds.keep }}",
        "helm.sh/resource-policy: keep",
        "{{- end }}",
        "{{- end }}",
    ]


def test_the_crd_is_installed_and_kept_by_default() -> None:
    assert yaml.safe_load((CHART / "values.yaml").read_text())["crds"] == {"create": True, "keep": True}


def test_helm_renders_the_crd_as_the_values_say(helm: Helm) -> None:
    def crds(**values: bool) -> list[dict[str, Any]]:
        return by_kind(helm.template({"crds": values}), KIND)

    kept = only(helm.template(), KIND)
    assert kept["metadata"]["annotations"].pop("helm.sh/resource-policy") == "keep"
    assert kept == custom_resource_definition()
    assert crds(keep=False) == [custom_resource_definition()]
    assert crds(create=False) == []
