"""What every owned object has in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from flowprefill_crd import FlowPrefillService, restart_hash
from flowprefill_crd.v1alpha1.roles import Role as RoleSpec
from flowprefill_operator import labels
from flowprefill_operator.labels import PodRole, Role
from flowprefill_operator.names import child_name, label_value
from flowprefill_operator.settings import PlanSettings

Object = dict[str, object]
"""A Kubernetes object, or a part of one, as it is written in JSON."""

PART_OF = "flowprefill"
WORKER_API_PORT = 8000
WORKER_ADMIN_PORT = 9000
WORKER_KV_PORT = 7000


@dataclass(frozen=True)
class Context:
    """A service, the settings and what follows from them; handed to every builder."""

    service: FlowPrefillService
    settings: PlanSettings
    named_revision: str | None = None
    """Name of the revision; the hash of the restart-relevant spec when left out."""
    scaled_revision: str | None = None
    """The revision whose Deployments autoscalers aim at; `revision` itself when left out."""
    proxies_port: int | None = None
    """The API port of proxies of another revision that clients still go to; the spec's own when left out."""

    @cached_property
    def revision(self) -> str:
        """Name of the revision that is planned."""
        return self.named_revision or restart_hash(self.service)

    @property
    def worker_roles(self) -> tuple[Role, ...]:
        """The roles that run an engine."""
        return ("colocated",) if self.service.spec.mode == "Colocated" else ("prefill", "decode")

    @property
    def roles(self) -> tuple[Role, ...]:
        return (*self.worker_roles, "proxy")

    def spec_of(self, role: Role) -> RoleSpec:
        """The part of the spec that describes a role; colocated pods are prefill pods that decode too."""
        spec = self.service.spec
        match role:
            case "prefill" | "colocated":
                return spec.prefill
            case "decode":
                return spec.decode
            case "proxy":
                return spec.proxy

    @property
    def service_port(self) -> int:
        """The port at which clients reach the API."""
        return self.proxies_port or self.service.spec.proxy.port_api

    def name(self, *suffixes: str) -> str:
        """Name of an owned object."""
        return child_name(self.service.metadata.name, *suffixes)

    def workload_name(self, role: Role) -> str:
        """Name of a role's Deployment: one a revision for workers, one for ever for the proxy, which serves
        the pods of any revision."""
        return self.name(role) if role == "proxy" else self.name(role, self.revision)

    def scale_target(self, role: Role) -> str:
        """Name of the Deployment that a role's autoscaler scales."""
        revision = self.scaled_revision or self.revision
        return self.name(role) if role == "proxy" else self.name(role, revision)

    @property
    def config_name(self) -> str:
        return self.name(self.revision)

    @property
    def live_name(self) -> str:
        return self.name("live")

    @property
    def cache_name(self) -> str:
        return self.name("model-cache")

    def selector(self, *roles: PodRole, revision: bool = False) -> dict[str, str]:
        """Labels that pods of the service have; with one role, those of that role."""
        found = {labels.SERVICE: label_value(self.service.metadata.name)}
        if len(roles) == 1:
            found[labels.ROLE] = roles[0]
        if revision:
            found[labels.REVISION] = self.revision
        return found

    def labels(self, role: PodRole | None = None, *, revision: bool = False) -> dict[str, str]:
        """Labels of an owned object or pod."""
        found = {
            "app.kubernetes.io/name": "flowprefill",
            "app.kubernetes.io/instance": label_value(self.service.metadata.name),
            "app.kubernetes.io/part-of": PART_OF,
            "app.kubernetes.io/managed-by": "flowprefill-operator",
        }
        if role is not None:
            found["app.kubernetes.io/component"] = role
            return found | self.selector(role, revision=revision)
        return found | self.selector(revision=revision)

    def metadata(
        self,
        name: str,
        role: PodRole | None = None,
        *,
        revision: bool = False,
        owned: bool = True,
        also: Mapping[str, str] = MappingProxyType({}),
    ) -> Object:
        """Name, namespace, labels and, once the service has a uid, the controller reference.

        `owned=False` leaves the reference out: the object then stays when the service is deleted. Of the labels in
        `also` those count that the object has no own value for.
        """
        meta = self.service.metadata
        all_labels = {**also, **self.labels(role, revision=revision)}
        found: Object = {"name": name, "namespace": meta.namespace, "labels": all_labels}
        if meta.uid:
            all_labels[labels.OWNER] = meta.uid
            if owned:
                found["ownerReferences"] = [
                    {
                        "apiVersion": self.service.api_version,
                        "kind": self.service.kind,
                        "name": meta.name,
                        "uid": meta.uid,
                        "controller": True,
                        "blockOwnerDeletion": True,
                    }
                ]
        return found
