"""Certificates and tokens of a control plane that lives for one test run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import trustme
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

SERVICE_IP = "10.96.0.1"

AGGREGATOR = "front-proxy-client"
"""Name of the API server towards the API services behind it."""

USERS = {
    "admin": ("admin", "system:masters"),
    "controller-manager": ("system:kube-controller-manager", ""),
    "scheduler": ("system:kube-scheduler", ""),
}
"""User and group behind each token."""


@dataclass(frozen=True, slots=True)
class Pki:
    """Files in one folder. Make them with `create`."""

    folder: Path

    @property
    def ca(self) -> Path:
        return self.folder / "ca.crt"

    @property
    def ca_key(self) -> Path:
        return self.folder / "ca.key"

    @property
    def server(self) -> tuple[Path, Path]:
        """Certificate and key of the API server."""
        return self.folder / "server.crt", self.folder / "server.key"

    @property
    def aggregator(self) -> tuple[Path, Path]:
        """Certificate and key that the API server shows to the API services behind it."""
        return self.folder / "aggregator.crt", self.folder / "aggregator.key"

    @property
    def kubelet_client(self) -> tuple[Path, Path]:
        """Certificate and key that the API server shows to kubelets."""
        return self.folder / "kubelet-client.crt", self.folder / "kubelet-client.key"

    @property
    def service_account_key(self) -> Path:
        return self.folder / "service-account.key"

    @property
    def tokens(self) -> Path:
        return self.folder / "tokens.csv"

    def kubeconfig(self, user: str) -> Path:
        return self.folder / f"{user}.kubeconfig"

    @staticmethod
    def create(
        folder: Path,
        server_url: str,
        *,
        addresses: Sequence[str] = (),
        users: Mapping[str, tuple[str, str]] | None = None,
    ) -> Pki:
        """A certificate authority, the API server's certificates, a signing key, a token and kubeconfig per user.

        `addresses` are more addresses of the API server, `users` more users than `USERS`.
        """
        folder.mkdir(parents=True)
        pki = Pki(folder)
        authority = trustme.CA(key_type=trustme.KeyType.RSA)
        authority.cert_pem.write_to_path(pki.ca)
        authority.private_key_pem.write_to_path(pki.ca_key)
        issued = authority.issue_cert(
            "127.0.0.1",
            "localhost",
            SERVICE_IP,
            "kubernetes",
            "kubernetes.default",
            "kubernetes.default.svc",
            *addresses,
        )
        _write(issued, *pki.server)
        _write(authority.issue_cert(AGGREGATOR, common_name=AGGREGATOR), *pki.aggregator)
        _write(
            authority.issue_cert(
                "kubelet-client", common_name="kubelet-client", organization_name="system:masters"
            ),
            *pki.kubelet_client,
        )
        signing = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        pki.service_account_key.write_bytes(
            signing.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.TraditionalOpenSSL,
                serialization.NoEncryption(),
            )
        )
        known = {**USERS, **(users or {})}
        pki.tokens.write_text(
            "".join(f'{name}-token,{user},{name},"{group}"\n' for name, (user, group) in known.items())
        )
        for name in known:
            pki.kubeconfig(name).write_text(json.dumps(_kubeconfig(server_url, pki.ca, f"{name}-token")))
        return pki


def _write(issued: trustme.LeafCert, certificate: Path, key: Path) -> None:
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(key)


def _kubeconfig(url: str, ca: Path, token: str) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": url, "certificate-authority": str(ca)}}],
        "users": [{"name": "test", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    }
