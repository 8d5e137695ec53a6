"""What planning needs to know besides the service itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Literal, Self


def _default_images() -> dict[str, str]:
    release = version("flowprefill")
    return {
        "torch": f"flowprefill/serving:{release}",
        "simulated": f"flowprefill/serving:{release}",
        "vllm": f"flowprefill/serving-vllm:{release}",
        "proxy": f"flowprefill/proxy:{release}",
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPlaces:
    """Paths of this machine that planned pods refer to when they run as processes.

    `endpoints` is the folder with the file that proxies discover pods from, `claims` has a folder for each
    PersistentVolumeClaim, `cache` stands in for a model cache (as
    `XDG_CACHE_HOME`), `files` holds a folder for each Secret and ConfigMap that the service names but does not own.
    """

    endpoints: Path
    claims: Path
    cache: Path
    files: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """Settings of the operator that shape the objects it plans.

    `images` maps an engine type to the image of its pods; the proxy runs in `proxy_image`. All pods may use
    `image_pull_secrets` (names, in the service's namespace) besides the service's own. Containers run as `user_id`,
    and volumes belong to it. Admin ports are open to the service's own pods, to the namespace of the operator
    (None outside a cluster) and to `monitoring_from`, NetworkPolicyPeers as in a policy's `from`; None admits every
    namespace. `local` is set when the pods run as processes here.
    """

    images: Mapping[str, str] = field(
        default_factory=lambda: {name: image for name, image in _default_images().items() if name != "proxy"}
    )
    proxy_image: str = field(default_factory=lambda: _default_images()["proxy"])
    image_pull_policy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    user_id: int = 10001
    network_policy: bool = True
    monitoring_from: tuple[Mapping[str, object], ...] | None = None
    operator_namespace: str | None = None
    local: LocalPlaces | None = None

    def __post_init__(self) -> None:
        missing = {"torch", "simulated", "vllm"} - set(self.images)
        if missing:
            raise ValueError(f"images has no entry for engine {', '.join(sorted(missing))}")

    def pinned(self, images: Mapping[str, str]) -> Self:
        """These settings with the images of a revision, by role of its pods, in place of this release's."""
        (worker,) = {image for role, image in images.items() if role != "proxy"}
        return replace(self, images=dict.fromkeys(self.images, worker), proxy_image=images["proxy"])
