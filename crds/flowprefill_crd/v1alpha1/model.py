"""Which model is served, where its files come from and where they are kept."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from flowprefill_crd.base import ApiObject, DnsSubdomain, Quantity, SecretKeyRef
from flowprefill_crd.rules import Rule, Rules, Unique

Scheme = Literal["embedded", "hf", "file", "pvc"]

# One pattern for Python and for CEL (RE2), so it uses neither lookarounds nor \w and \s.
_URI = (
    r"^(embedded://[a-z0-9][-._a-z0-9]*"
    r"|hf://[A-Za-z0-9][-._A-Za-z0-9]*/[A-Za-z0-9][-._A-Za-z0-9]*(@[A-Za-z0-9][-._/A-Za-z0-9]*)?"
    r"|file:///[!-~]+"
    r"|pvc://[a-z0-9]([-.a-z0-9]*[a-z0-9])?/[!-~]+)$"
)

DEFAULT_CACHE_SIZE = "100Gi"

URI_RULE = Rule(
    message="use embedded://NAME, hf://ORG/NAME, hf://ORG/NAME@REVISION, file:///PATH or pvc://CLAIM/PATH",
    cel=f"self.matches(r'{_URI}')",
    holds=lambda uri: re.fullmatch(_URI.removeprefix("^").removesuffix("$"), uri) is not None,
    seen=lambda uri: str(uri),
)


class ExistingClaim(ApiObject):
    """A PersistentVolumeClaim that exists already and that the operator never changes or deletes."""

    name: DnsSubdomain
    """Name of the claim in the service's namespace. Restarts pods."""


class ManagedClaim(ApiObject):
    """A PersistentVolumeClaim that the operator creates for the model's files."""

    storage: Quantity
    """Size of the claim, for example "50Gi". Cannot be made smaller, and larger only where the StorageClass
    allows it. Restarts pods."""

    storage_class_name: DnsSubdomain | None = None
    """StorageClass of the claim; the cluster's default when absent. Cannot be changed once the claim is there.
    Restarts pods."""

    access_modes: Annotated[
        tuple[Literal["ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod"], ...],
        Field(min_length=1, max_length=3),
        Unique(),
    ] = ("ReadWriteOnce",)
    """Access modes of the claim. Pods on several nodes need ReadWriteMany. Cannot be changed once the claim is
    there. Restarts pods."""

    retain: bool = True
    """Keep the claim and the files in it when the service is deleted. Applied live."""


class EmptyDirCache(ApiObject):
    """A volume of one pod that goes away with the pod; every pod downloads the model for itself."""

    size_limit: Quantity = DEFAULT_CACHE_SIZE
    """Most disk the files may take before the pod is evicted. Restarts pods."""


class ModelCache(ApiObject):
    """Where downloaded model files are kept. Exactly one kind is set."""

    rules: ClassVar = (
        Rule(
            message="set exactly one of claim, persistentVolumeClaim and emptyDir",
            cel="[has(self.claim), has(self.persistentVolumeClaim), has(self.emptyDir)].filter(set, set).size() == 1",
            holds=lambda c: [c.claim, c.persistent_volume_claim, c.empty_dir].count(None) == 2,
        ),
    )

    claim: ExistingClaim | None = None
    """A claim that exists already. Restarts pods."""

    persistent_volume_claim: ManagedClaim | None = None
    """A claim that the operator creates. Each field says whether it restarts pods."""

    empty_dir: EmptyDirCache | None = None
    """A volume of each pod that goes away with it. Restarts pods."""


class Model(ApiObject):
    """The model to serve."""

    rules: ClassVar = (
        Rule(
            message="revision applies to hf:// models only; the other schemes name exact files",
            cel="!has(self.revision) || self.uri.startsWith('hf://')",
            holds=lambda m: m.revision is None or m.scheme == "hf",
            field="revision",
        ),
        Rule(
            message="the revision is given twice; set it in uri after the @ or in revision, not in both",
            cel="!(has(self.revision) && self.uri.startsWith('hf://') && self.uri.contains('@'))",
            holds=lambda m: not (m.revision is not None and m.scheme == "hf" and "@" in m.uri),
            field="revision",
        ),
        Rule(
            message="secretRef applies to hf:// models only; nothing else is downloaded",
            cel="!has(self.secretRef) || self.uri.startsWith('hf://')",
            holds=lambda m: m.secret_ref is None or m.scheme == "hf",
            field="secretRef",
        ),
        Rule(
            message="cache applies to hf:// models only; nothing else is downloaded",
            cel="!has(self.cache) || self.uri.startsWith('hf://')",
            holds=lambda m: m.cache is None or m.scheme == "hf",
            field="cache",
        ),
    )

    uri: Annotated[str, StringConstraints(min_length=1, max_length=512), Rules(URI_RULE)]
    """Where the model's files are: embedded://NAME (a layer of the serving image), hf://ORG/NAME or
    hf://ORG/NAME@REVISION (downloaded from the Hugging Face hub), file:///PATH (in the pod),
    pvc://CLAIM/PATH (read-only from a claim). Restarts pods."""

    revision: (
        Annotated[
            str, StringConstraints(pattern=r"^[A-Za-z0-9][-._/A-Za-z0-9]*$", min_length=1, max_length=128)
        ]
        | None
    ) = None
    """Branch, tag or commit of an hf:// model; "main" when absent. It is resolved to a commit once, for
    prefill and decode together. Restarts pods."""

    served_name: (
        Annotated[
            str, StringConstraints(pattern=r"^[A-Za-z0-9][-._/:A-Za-z0-9]*$", min_length=1, max_length=128)
        ]
        | None
    ) = None
    """Name that clients send as "model"; derived from the uri when absent (ORG/NAME, or the last part of
    the path). Restarts pods."""

    secret_ref: SecretKeyRef | None = None
    """Key of a Secret that holds the download token of a private hf:// model. Restarts pods."""

    cache: ModelCache | None = None
    """Where the files of an hf:// model are kept; an emptyDir of at most 100Gi when absent. Each field
    says whether it restarts pods."""

    max_model_len: Annotated[int, Field(ge=16, le=10_000_000)] | None = None
    """Most tokens of prompt and answer together; the model's own limit when absent. Restarts pods."""

    @property
    def scheme(self) -> Scheme:
        """The part of the uri before `://`."""
        match self.uri.partition("://")[0]:
            case "embedded":
                return "embedded"
            case "hf":
                return "hf"
            case "file":
                return "file"
            case _:
                return "pvc"

    @property
    def location(self) -> str:
        """The part of the uri after `://`, without a revision: NAME, ORG/NAME, /PATH or CLAIM/PATH."""
        rest = self.uri.partition("://")[2]
        return rest.partition("@")[0] if self.scheme == "hf" else rest

    @property
    def resolved_revision(self) -> str | None:
        """The revision asked for: "main" for an hf:// model that names none, None for other schemes."""
        if self.scheme != "hf":
            return None
        return self.revision or self.uri.partition("@")[2] or "main"

    @property
    def resolved_served_name(self) -> str:
        """The name that clients send as `model`."""
        if self.served_name is not None:
            return self.served_name
        if self.scheme == "hf":
            return self.location
        return self.location.rstrip("/").rpartition("/")[2]

    @property
    def resolved_cache(self) -> ModelCache | None:
        """The cache in use; None when the model is not downloaded."""
        if self.scheme != "hf":
            return None
        return self.cache or ModelCache(empty_dir=EmptyDirCache())
