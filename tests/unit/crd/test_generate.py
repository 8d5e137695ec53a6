"""The files made from the models: current, repeatable, and what an API server takes."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from flowprefill_crd.crd import CRD_NAME, HASH_ANNOTATION, custom_resource_definition, root_schema
from flowprefill_crd.generate import ROOT, chart_text, crd_text, files, main
from flowprefill_crd.schema_hash import SCHEMA_HASH
from support.services import is_leaf, nodes, spec_schema, text_path
from support.structural import violations


@pytest.mark.parametrize("path", list(files()), ids=str)
def test_the_generated_file_is_current(path: Path) -> None:
    assert (ROOT / path).read_text(encoding="utf-8") == files()[path], f"{path} is stale; run make crds"


def test_generating_twice_in_different_processes_gives_the_same_bytes(tmp_path: Path) -> None:
    for seed in ("1", "2"):
        command = [sys.executable, "-m", "flowprefill_crd.generate", "--root", str(tmp_path / seed)]
        subprocess.run(
            command, check=True, capture_output=True, env={**os.environ, "PYTHONHASHSEED": seed}, timeout=120
        )
    for path in files():
        assert (tmp_path / "1" / path).read_bytes() == (tmp_path / "2" / path).read_bytes()


def test_check_writes_nothing_and_fails_on_a_stale_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--root", str(tmp_path)]
    assert main([*arguments, "--check"]) == 1
    assert list(tmp_path.iterdir()) == []
    assert main(arguments) == 0
    assert main([*arguments, "--check"]) == 0
    crd = tmp_path / "crds" / f"{CRD_NAME}.yaml"
    crd.write_text(crd.read_text() + "# edited\n")
    capsys.readouterr()
    assert main([*arguments, "--check"]) == 1
    assert capsys.readouterr().err == f"crds/{CRD_NAME}.yaml: is stale; run make crds\n"
    assert crd.read_text().endswith("# edited\n")


def test_the_schema_is_structural() -> None:
    assert violations(root_schema()) == []


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda s: s["mode"].update(nullable=True), "spec.mode: nullable is not part of"),
        (lambda s: s["mode"].pop("type"), "spec.mode: type None is missing"),
        (lambda s: s["mode"].update(default="Both"), "spec.mode: default 'Both' is not one of"),
        (lambda s: s["scheduling"].update(default={}), "spec.scheduling: default leaves out policy"),
        (
            lambda s: s["engine"].update(additionalProperties=False),
            "spec.engine: properties and additionalProperties",
        ),
        (lambda s: s["sloClasses"]["items"]["required"].remove("name"), "spec.sloClasses: the key 'name'"),
        (lambda s: s["model"]["required"].append("color"), "spec.model: required field color is no property"),
        (
            lambda s: s["proxy"]["x-kubernetes-validations"][0].update(fieldPath=".replica"),
            "spec.proxy: fieldPath replica is no field",
        ),
    ],
)
def test_the_structural_check_sees_what_an_api_server_refuses(
    spoil: Callable[[dict[str, Any]], object], complaint: str
) -> None:
    schema = copy.deepcopy(root_schema())
    spoil(schema["properties"]["spec"]["properties"])
    assert [v for v in violations(schema) if v.startswith(complaint)]


def test_the_crd_fits_into_an_annotation_of_kubectl_apply() -> None:
    assert len(crd_text().encode()) < 256 * 1024


def test_the_crd_is_named_as_users_type_it() -> None:
    crd = custom_resource_definition()
    assert crd["metadata"]["name"] == "flowprefillservices.flowprefill.io"
    assert crd["spec"]["names"]["shortNames"] == ["fps"]
    (version,) = crd["spec"]["versions"]
    assert (version["name"], version["served"], version["storage"]) == ("v1alpha1", True, True)
    assert version["subresources"] == {"status": {}}
    columns = [c["name"] for c in version["additionalPrinterColumns"] if not c.get("priority")]
    assert columns == ["Ready", "Prefill", "Decode", "TTFT SLO", "URL", "Age"]


def test_printer_columns_read_fields_of_the_status() -> None:
    fields = {"." + text_path(("status", *path)) for path, _ in nodes(root_schema()["properties"]["status"])}
    paths = [
        c["jsonPath"] for c in custom_resource_definition()["spec"]["versions"][0]["additionalPrinterColumns"]
    ]
    plain = [path for path in paths if path.startswith(".status") and "[" not in path]
    assert len(plain) == 6
    assert set(plain) <= fields


def test_integers_say_their_format_and_pod_specs_keep_unknown_fields() -> None:
    for path, node in nodes(spec_schema()):
        if node.get("type") == "integer":
            assert node["format"] in ("int32", "int64"), text_path(path)
    kept = [text_path(p) for p, n in nodes(spec_schema()) if n.get("x-kubernetes-preserve-unknown-fields")]
    assert kept == ["prefill.podTemplate.spec", "decode.podTemplate.spec", "proxy.podTemplate.spec"]


def test_the_status_has_no_defaults() -> None:
    """A default would be written into the status by the API server and belong to no one."""
    assert [text_path(p) for p, n in nodes(root_schema()["properties"]["status"]) if "default" in n] == []


def test_the_schema_hash_follows_what_has_an_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    crd = custom_resource_definition()
    assert crd["metadata"]["annotations"] == {HASH_ANNOTATION: SCHEMA_HASH}
    schema = copy.deepcopy(root_schema())
    schema["properties"]["spec"]["properties"]["mode"]["description"] = "Other words."
    monkeypatch.setattr("flowprefill_crd.crd.root_schema", lambda: schema)
    assert custom_resource_definition()["metadata"]["annotations"] == {HASH_ANNOTATION: SCHEMA_HASH}
    schema["properties"]["spec"]["properties"]["mode"]["enum"].append("Other")
    assert custom_resource_definition()["metadata"]["annotations"] != {HASH_ANNOTATION: SCHEMA_HASH}


def test_the_chart_refuses_text_that_helm_would_take_for_a_template() -> None:
    with pytest.raises(ValueError, match=r"holds \{\{"):
        chart_text("  annotations:\n    a: '{{ x }}'\n")


def test_the_reference_has_a_row_for_every_field() -> None:
    page = files()[Path("docs/reference/flowprefillservice.md")]
    for top in ("spec", "status"):
        section = ""
        for path, node in nodes(root_schema()["properties"][top], (top,)):
            section = text_path(path[:-1]).replace("[0]", "[]")
            rows = page.split(f"\n## {section}\n")[1].split("\n## ")[0]
            assert f"| `{path[-1]}` |" in rows, text_path(path)
            if not is_leaf(node) and "properties" in node:
                assert f"\n## {text_path(path)}\n".replace("[0]", "[]") in page


def test_links_of_the_reference_lead_to_its_headings() -> None:
    page = files()[Path("docs/reference/flowprefillservice.md")]
    anchors = {
        line.removeprefix("## ").lower().replace(".", "").replace("[]", "")
        for line in page.splitlines()
        if line.startswith("## ")
    }
    links = {part.split(")")[0] for part in page.split("](#")[1:]}
    assert links <= anchors
    assert len(links) > 20


def test_the_crd_is_yaml_that_says_the_same_as_the_models() -> None:
    assert yaml.safe_load(crd_text()) == custom_resource_definition()
