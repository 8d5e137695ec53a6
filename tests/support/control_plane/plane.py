"""The control plane itself: started in order, stopped in reverse, nothing left."""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from flowprefill_operator.node.ports import free_ports
from support.control_plane.daemon import Daemon
from support.control_plane.kubectl import Kubectl
from support.control_plane.pki import AGGREGATOR, Pki

AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata"}],
}
"""Who called what: the log tells used verbs and counts writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Where the programs run. `prefix` starts each of them, as in `nsenter --net=...`.

    `address` is where this process reaches the API server. `advertised` is where pods reach it; None where there are
    none, and then the Service `kubernetes` has no endpoint. `users` are more users, see `pki.USERS`. `manager_flags` are
    more flags of the controller manager.
    """

    prefix: tuple[str, ...] = ()
    address: str = "127.0.0.1"
    advertised: str | None = None
    users: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    manager_flags: tuple[str, ...] = ()


READYZ = "/readyz"


class ControlPlane(Kubectl):
    """etcd, API server, controller manager and scheduler on free ports of 127.0.0.1, RBAC on."""

    def __init__(self, assets: Path, folder: Path, surroundings: Surroundings | None = None) -> None:
        """`assets` holds the programs, `folder` (must not exist) everything that they write."""
        self._surroundings = surroundings or Surroundings()
        self._assets = assets
        self._folder = folder
        self._running = ExitStack()
        etcd, peer, api, self._manager_port, self._scheduler_port = free_ports(5)
        self._etcd, self._peer = f"http://127.0.0.1:{etcd}", f"http://127.0.0.1:{peer}"
        self._api_port = api
        around = self._surroundings
        self.url = f"https://{around.address}:{api}"
        addresses = {around.address, around.advertised or around.address} - {"127.0.0.1"}
        self.pki = Pki.create(folder / "pki", self.url, addresses=sorted(addresses), users=around.users)
        super().__init__(assets / "kubectl", self.pki.kubeconfig("admin"), folder)
        self._http = httpx.Client(
            base_url=self.url,
            headers={"authorization": "Bearer admin-token"},
            verify=ssl.create_default_context(cafile=str(self.pki.ca)),
            trust_env=False,
        )

    @property
    def audit_log(self) -> Path:
        return self._folder / "audit.jsonl"

    def start(self) -> None:
        """Ready when namespaces get their service accounts."""
        try:
            self._start("etcd", *self._etcd_flags())
            self._api = self._start("kube-apiserver", *self._api_flags(), ready=READYZ)
            self._start(
                "kube-controller-manager",
                *self._controller_flags("controller-manager", self._manager_port),
                *self._manager_flags(),
                ready="/api/v1/namespaces/default/serviceaccounts/default",
            )
            self._start("kube-scheduler", *self._controller_flags("scheduler", self._scheduler_port))
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        self._running.close()
        self._http.close()

    def stop_api(self) -> None:
        """End the API server alone; the others wait for it."""
        self._api.stop()

    def start_api(self) -> None:
        """Begin it again, with everything that it knew."""
        self._api.start(lambda: self._answers(READYZ))

    def _start(self, program: str, *flags: str, ready: str | None = None) -> Daemon:
        argv = [*self._surroundings.prefix, str(self._assets / program), *flags]
        daemon = Daemon(program, argv, self._folder / f"{program}.log")
        self._running.callback(daemon.stop)
        daemon.start(lambda: ready is None or self._answers(ready))
        return daemon

    def _answers(self, path: str) -> bool:
        try:
            return self._http.get(path).status_code == 200
        except httpx.TransportError:
            return False

    def _etcd_flags(self) -> list[str]:
        return [
            f"--data-dir={self._folder / 'etcd'}",
            f"--listen-client-urls={self._etcd}",
            f"--advertise-client-urls={self._etcd}",
            f"--listen-peer-urls={self._peer}",
            "--unsafe-no-fsync",
        ]

    def _api_flags(self) -> list[str]:
        policy = self._folder / "audit-policy.json"
        policy.write_text(json.dumps(AUDIT_POLICY))
        certificate, key = self.pki.server
        return [
            f"--etcd-servers={self._etcd}",
            *self._address_flags(),
            f"--secure-port={self._api_port}",
            f"--tls-cert-file={certificate}",
            f"--tls-private-key-file={key}",
            f"--client-ca-file={self.pki.ca}",
            f"--token-auth-file={self.pki.tokens}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=OwnerReferencesPermissionEnforcement",
            f"--audit-policy-file={policy}",
            f"--audit-log-path={self.audit_log}",
            "--allow-privileged=true",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-signing-key-file={self.pki.service_account_key}",
            f"--service-account-key-file={self.pki.service_account_key}",
            *self._client_flags(),
        ]

    def _address_flags(self) -> list[str]:
        advertised = self._surroundings.advertised
        if advertised is None:
            return [
                "--bind-address=127.0.0.1",
                "--advertise-address=127.0.0.1",
                "--endpoint-reconciler-type=none",
            ]
        return ["--bind-address=0.0.0.0", f"--advertise-address={advertised}"]

    def _client_flags(self) -> list[str]:
        """How the API server calls kubelets and the API services behind it."""
        aggregator, aggregator_key = self.pki.aggregator
        kubelet, kubelet_key = self.pki.kubelet_client
        return [
            f"--proxy-client-cert-file={aggregator}",
            f"--proxy-client-key-file={aggregator_key}",
            f"--requestheader-client-ca-file={self.pki.ca}",
            f"--requestheader-allowed-names={AGGREGATOR}",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--kubelet-client-certificate={kubelet}",
            f"--kubelet-client-key={kubelet_key}",
            "--kubelet-preferred-address-types=InternalIP",
        ]

    def _controller_flags(self, user: str, port: int) -> list[str]:
        """What controller manager and scheduler share; as fast as they can be, so that tests measure what is ours."""
        kubeconfig = self.pki.kubeconfig(user)
        return [
            f"--kubeconfig={kubeconfig}",
            f"--authentication-kubeconfig={kubeconfig}",
            f"--authorization-kubeconfig={kubeconfig}",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            f"--cert-dir={self._folder / user}",
            "--leader-elect=false",
            "--kube-api-qps=300",
            "--kube-api-burst=600",
        ]

    def _manager_flags(self) -> list[str]:
        return [
            "--use-service-account-credentials",
            f"--service-account-private-key-file={self.pki.service_account_key}",
            f"--root-ca-file={self.pki.ca}",
            f"--cluster-signing-cert-file={self.pki.ca}",
            f"--cluster-signing-key-file={self.pki.ca_key}",
            *self._surroundings.manager_flags,
        ]
