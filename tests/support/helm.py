"""The real helm, run from tests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from flowprefill_crd.generate import ROOT
from support.capabilities import require

CHART = ROOT / "charts" / "flowprefill"
HELM_S = 120.0
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Helm:
    """helm with a home of its own, and the cluster of a kubeconfig where one is given."""

    def __init__(self, program: str, folder: Path, kubeconfig: Path | None = None) -> None:
        self._program = program
        self._folder = folder
        self._env = {"PATH": os.environ["PATH"], "HOME": str(folder)}
        # Without a cluster helm must not find one by accident.
        self._env["KUBECONFIG"] = str(kubeconfig or folder / "none")
        self._rendered: dict[tuple[str, ...], str] = {}

    def __call__(
        self, *args: str, values: Mapping[str, Any] | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run helm, with values in a file. With `check` an exit status other than 0 fails the test with what it said."""
        if values is not None:
            args = (*args, "--values", self._values_file(values))
        done = subprocess.run(
            [self._program, *args],
            cwd=self._folder,
            env=self._env,
            capture_output=True,
            text=True,
            timeout=HELM_S,
            check=False,
        )
        assert not check or done.returncode == 0, f"helm {' '.join(args)}: {done.stdout}{done.stderr}"
        return done

    def template(
        self,
        values: Mapping[str, Any] | None = None,
        *args: str,
        name: str = "flowprefill",
        namespace: str = "system",
        apis: Iterable[str] = (),
        chart: Path = CHART,
    ) -> list[dict[str, Any]]:
        """What the chart renders; `apis` are group/version/kind that the cluster has besides its own."""
        flags = [flag for api in apis for flag in ("--api-versions", api)]
        done = self(
            "template", name, str(chart), "--namespace", namespace, *flags, *args, values=values or {}
        )
        return [item for item in yaml.safe_load_all(done.stdout) if item]

    def refusal(self, values: Mapping[str, Any], *args: str) -> str:
        """What helm says when it refuses to render with the values; rendering fails the test."""
        done = self("template", "flowprefill", str(CHART), *args, values=values, check=False)
        assert done.returncode != 0, f"helm accepted {json.dumps(dict(values))}"
        return done.stderr

    def _values_file(self, values: Mapping[str, Any]) -> str:
        path = self._folder / "values.json"
        path.write_text(json.dumps(values))
        return str(path)


def default_values() -> dict[str, Any]:
    """What values.yaml says."""
    found: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    return found


def values_schema() -> dict[str, Any]:
    """What values.schema.json says."""
    found: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    return found


def helm_program() -> str:
    """Path of helm: FLOWPREFILL_HELM, or the first on PATH; without it the test skips."""
    found = os.environ.get("FLOWPREFILL_HELM") or shutil.which("helm")
    require("helm", found is not None, "no helm on PATH; install it or name the binary in FLOWPREFILL_HELM")
    assert found is not None
    return found


def by_kind(objects: Iterable[Mapping[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The objects of a kind."""
    return [dict(item) for item in objects if item["kind"] == kind]


def only(objects: Iterable[Mapping[str, Any]], kind: str, name: str | None = None) -> dict[str, Any]:
    """The one object of a kind (and name)."""
    found = [item for item in by_kind(objects, kind) if name is None or item["metadata"]["name"] == name]
    assert len(found) == 1, f"{kind} {name or ''}: {[item['metadata']['name'] for item in found]}"
    return found[0]
