"""The chart in a real cluster: releases of one test, in namespaces that no other test uses."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from flowprefill_crd.crd import CRD_NAME
from flowprefill_crd.samples import sample_path
from support.control_plane.plane import ControlPlane
from support.helm import CHART, Helm, helm_program
from support.rbac import Triple, allowed

RELEASE = "flowprefill"
OPERATOR = "flowprefill-operator"
"""Name of the operator's objects in a release of that name."""

WAIT_S = 60.0
"""Until controllers and garbage collection of a test's control plane have done something."""

_numbers = itertools.count(1)


class ChartCluster:
    """helm and kubectl for one test. Use it through `chart_cluster`."""

    def __init__(self, plane: ControlPlane, folder: Path) -> None:
        self.plane = plane
        self.kubectl = plane.kubectl
        self.helm = Helm(helm_program(), folder, plane.kubeconfig)
        self._number = next(_numbers)
        self.namespace = self.create_namespace("system")
        self.account = f"system:serviceaccount:{self.namespace}:{OPERATOR}"

    def create_namespace(self, name: str) -> str:
        """A namespace of this test alone; its name."""
        unique = f"{name}-{self._number}"
        self.kubectl("create", "namespace", unique)
        return unique

    def install(self, values: dict[str, Any] | None = None, *args: str) -> None:
        """`helm install` as `RELEASE`; takes over the CRD that an earlier test has left."""
        if self.kubectl("get", "crd", CRD_NAME, check=False).returncode == 0:
            args = (*args, "--take-ownership")
        self.helm("install", RELEASE, str(CHART), "--namespace", self.namespace, *args, values=values or {})

    def upgrade(self, values: dict[str, Any] | None = None, *, of_values: str = "--reset-values") -> None:
        """`helm upgrade`; `of_values` says what becomes of values that are not given again."""
        self.helm(
            "upgrade", RELEASE, str(CHART), "--namespace", self.namespace, of_values, values=values or {}
        )

    def uninstall(self) -> str:
        """`helm uninstall`; what it said."""
        return self.helm("uninstall", RELEASE, "--namespace", self.namespace, "--wait").stdout

    def get(self, *args: str) -> dict[str, Any]:
        """`kubectl get` in the release's namespace."""
        return self.plane.get("-n", self.namespace, *args)

    def until(self, wanted: Callable[[dict[str, Any]], bool], *args: str) -> dict[str, Any]:
        """`get` until `wanted` says yes to the object."""
        end_s = time.monotonic() + WAIT_S
        while not wanted(found := self.get(*args)):
            assert time.monotonic() < end_s, json.dumps(found)[-2000:]
            time.sleep(0.2)
        return found

    def established(self) -> None:
        self.plane.until_done(
            "wait", "--for=condition=Established", f"--timeout={WAIT_S:.0f}s", f"crd/{CRD_NAME}"
        )

    def apply_sample(self) -> str:
        """The quickstart sample in the release's namespace; its uid."""
        self.established()
        self.plane.until_done("-n", self.namespace, "apply", "-f", str(sample_path("quickstart.yaml")))
        return self.uid("fps", "quickstart")

    def uid(self, *args: str) -> str:
        return str(self.get(*args)["metadata"]["uid"])

    def config(self) -> dict[str, Any]:
        """The operator's configuration as it is in the cluster."""
        found: dict[str, Any] = yaml.safe_load(self.get("configmap", OPERATOR)["data"]["config.yaml"])
        return found

    def test_pod(self) -> dict[str, Any]:
        """The pod of `helm test`."""
        said = self.helm("get", "hooks", RELEASE, "--namespace", self.namespace).stdout
        (pod,) = [item for item in yaml.safe_load_all(said) if item]
        return dict(pod)

    def may(self, user: str, *question: str) -> bool:
        """`kubectl auth can-i`."""
        said = self.kubectl("auth", "can-i", f"--as={user}", *question, check=False)
        answer = said.stdout.strip()
        assert answer in ("yes", "no"), said
        return answer == "yes"

    def rights(self, account: str, namespace: str) -> frozenset[Triple]:
        """What the API server says that an account may do in a namespace, beyond what every account may do."""
        return self._rights(account, namespace) - self._rights(
            "system:serviceaccount:default:nobody", namespace
        )

    def _rights(self, user: str, namespace: str) -> frozenset[Triple]:
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectRulesReview",
            "spec": {"namespace": namespace},
        }
        groups = ["system:serviceaccounts", "system:authenticated"]
        done = self.kubectl(
            f"--as={user}",
            *(f"--as-group={group}" for group in groups),
            *("create", "--validate=false", "-f", "-", "-o", "json"),
            stdin=json.dumps(review),
        )
        return allowed(
            {"apiGroups": [], **rule} for rule in json.loads(done.stdout)["status"]["resourceRules"]
        )


@contextmanager
def chart_cluster(plane: ControlPlane, folder: Path) -> Iterator[ChartCluster]:
    """A cluster without releases and services. The CRD may be there: to remove and add it again takes a minute."""
    cluster = ChartCluster(plane, folder)
    yield cluster
    for release in json.loads(cluster.helm("list", "--all-namespaces", "--output=json").stdout):
        cluster.helm("uninstall", release["name"], "--namespace", release["namespace"])
    cluster.kubectl("delete", "fps", "--all", "--all-namespaces", check=False)
