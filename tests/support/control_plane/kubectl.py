"""kubectl with the rights of a cluster's admin."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

KUBECTL_S = 120.0


class Kubectl:
    """The kubectl of a cluster, run in a home of its own."""

    def __init__(self, program: Path, kubeconfig: Path, home: Path) -> None:
        self._program = program
        self._kubeconfig = kubeconfig
        self._home = home

    @property
    def kubeconfig(self) -> Path:
        """Everything is allowed to its user."""
        return self._kubeconfig

    def kubectl(
        self, *args: str, stdin: str | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl as the admin. With `check` an exit status other than 0 fails the test with what it said."""
        done = subprocess.run(
            [str(self._program), *args],
            input=stdin,
            env={"PATH": os.environ["PATH"], "HOME": str(self._home), "KUBECONFIG": str(self.kubeconfig)},
            capture_output=True,
            text=True,
            timeout=KUBECTL_S,
            check=False,
        )
        assert not check or done.returncode == 0, f"kubectl {' '.join(args)}: {done.stdout}{done.stderr}"
        return done

    def until_done(self, *args: str) -> str:
        """Run kubectl until it succeeds; its output."""
        end_s = time.monotonic() + KUBECTL_S
        while (done := self.kubectl(*args, check=False)).returncode:
            assert time.monotonic() < end_s, f"kubectl {' '.join(args)}: {done.stdout}{done.stderr}"
            time.sleep(0.2)
        return done.stdout

    def get(self, *args: str) -> dict[str, Any]:
        """`kubectl get ... -o json`."""
        found: dict[str, Any] = json.loads(self.kubectl("get", *args, "-o", "json").stdout)
        return found
