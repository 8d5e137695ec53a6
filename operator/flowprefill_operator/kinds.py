"""The kinds of objects that the operator reads and writes, and their paths in the API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flowprefill_crd.crd import CRD_NAME
from flowprefill_crd.v1alpha1 import GROUP, KIND, PLURAL, VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of namespaced object. `optional`: its API belongs to another project and may be absent."""

    group: str = ""
    version: str = "v1"
    kind: str
    plural: str
    optional: bool = False

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def resource(self) -> str:
        """As RBAC and people name it: `deployments.apps`, `configmaps`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def root(self) -> str:
        """Path of the group and version in the API."""
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    def path(self, namespace: str | None = None, name: str | None = None, part: str | None = None) -> str:
        """Path of a collection, an object or one of its subresources."""
        steps = [self.root]
        if namespace is not None:
            steps += ["namespaces", namespace]
        steps += [step for step in (self.plural, name, part) if step is not None]
        return "/".join(steps)


SERVICES = Kind(group=GROUP, version=VERSION, kind=KIND, plural=PLURAL)
PODS = Kind(kind="Pod", plural="pods")
EVENTS = Kind(group="events.k8s.io", kind="Event", plural="events")

CONFIG_MAPS = Kind(kind="ConfigMap", plural="configmaps")
RECORDS = Kind(group="apps", kind="ControllerRevision", plural="controllerrevisions")
DEPLOYMENTS = Kind(group="apps", kind="Deployment", plural="deployments")
JOBS = Kind(group="batch", kind="Job", plural="jobs")
CLAIMS = Kind(kind="PersistentVolumeClaim", plural="persistentvolumeclaims")

OWNED: tuple[Kind, ...] = (
    RECORDS,
    CONFIG_MAPS,
    Kind(kind="ServiceAccount", plural="serviceaccounts"),
    Kind(group="rbac.authorization.k8s.io", kind="Role", plural="roles"),
    Kind(group="rbac.authorization.k8s.io", kind="RoleBinding", plural="rolebindings"),
    CLAIMS,
    Kind(group="networking.k8s.io", kind="NetworkPolicy", plural="networkpolicies"),
    Kind(kind="Service", plural="services"),
    DEPLOYMENTS,
    JOBS,
    Kind(group="policy", kind="PodDisruptionBudget", plural="poddisruptionbudgets"),
    Kind(
        group="autoscaling", version="v2", kind="HorizontalPodAutoscaler", plural="horizontalpodautoscalers"
    ),
    Kind(group="keda.sh", version="v1alpha1", kind="ScaledObject", plural="scaledobjects", optional=True),
    Kind(group="monitoring.coreos.com", kind="PodMonitor", plural="podmonitors", optional=True),
    Kind(group="gateway.networking.k8s.io", kind="HTTPRoute", plural="httproutes", optional=True),
)
"""Every kind that some release of the operator has created. The list only grows: what an older release made is
still pruned by a newer one."""

WATCHED = (*OWNED, PODS)

_BY_NAME = {(kind.api_version, kind.kind): kind for kind in (*WATCHED, SERVICES, EVENTS)}


def kind_of(item: Mapping[str, object]) -> Kind:
    """The kind of an object as written. Raises KeyError for one that the operator does not know."""
    return _BY_NAME[(str(item["apiVersion"]), str(item["kind"]))]


def is_known(item: Mapping[str, object]) -> bool:
    """Whether the operator knows the kind of an object."""
    return (str(item["apiVersion"]), str(item["kind"])) in _BY_NAME


CRD_PATH = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{CRD_NAME}"
