"""What pods of the vLLM engine have that other pods have not: GPUs, shared memory, caches, ports of NIXL.

Read off vLLM 0.32.0 (`envs.py`, `v1/executor/multiproc_executor.py`, `kv_connector/v1/nixl`) and off NIXL 1.5.1 in two
network namespaces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flowprefill_crd.v1alpha1.roles import GPU, WorkerRole
from flowprefill_operator.labels import Role
from flowprefill_operator.resources.base import Context, Object

STARTUP_PERIOD_S = 5
"""Between two looks at a pod that starts: vLLM takes from half a minute to ten."""

CACHE_VOLUME = "vllm-cache"
CACHE_DIR = "/var/cache/vllm"
"""Where compiled graphs and kernels are kept while the pod lives: a restarted container compiles nothing again."""
CACHE_SIZE = "10Gi"

SHARED_MEMORY_MIB = 512
"""Size of /dev/shm beside the ranks' own parts: the queue from the engine to its ranks takes 160 MiB at most."""
SHARED_MEMORY_PER_RANK_MIB = 512
"""Of it a rank's answers take 240 MiB at most; NCCL's buffers between GPUs without a direct way have the rest."""

TRANSFER_PORTS = (7100, 7611)
"""First and last port that UCX, below NIXL, may listen on. Each rank opens 5 of them a network device, at random places."""


def runs(context: Context, role: Role) -> bool:
    """Whether a role's pods run vLLM."""
    return role != "proxy" and context.service.spec.engine.type == "vllm"


def shared_memory_mib(ranks: int) -> int:
    """Most that the processes of one pod put into /dev/shm. It counts as memory of the container."""
    return SHARED_MEMORY_MIB + SHARED_MEMORY_PER_RANK_MIB * ranks


def cache_volume(context: Context, role: Role) -> Object | None:
    """The volume at `CACHE_DIR`. None without vLLM, and on this machine, where the user's own caches serve."""
    if not runs(context, role) or context.settings.local is not None:
        return None
    return {"name": CACHE_VOLUME, "emptyDir": {"sizeLimit": CACHE_SIZE}}


def environment(context: Context, role: Role) -> list[object]:
    """Variables of a role's container; none without vLLM.

    What Kubernetes itself would add is kept away by `enableServiceLinks: false`: a Service called `vllm` makes a
    `VLLM_PORT=tcp://...`, which vLLM refuses to start with.
    """
    if not runs(context, role):
        return []
    values = {
        "VLLM_NO_USAGE_STATS": "1",
        # Without the node's CPU manager every pod would bind its threads to the same first cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    if context.settings.local is None:
        # The root file system is read-only; homes and XDG folders are shared with the model, or small.
        values |= {
            "VLLM_CACHE_ROOT": CACHE_DIR,
            "VLLM_CONFIG_ROOT": f"{CACHE_DIR}/config",
            "TORCHINDUCTOR_CACHE_DIR": f"{CACHE_DIR}/inductor",
            "TRITON_CACHE_DIR": f"{CACHE_DIR}/triton",
            "CUDA_CACHE_PATH": f"{CACHE_DIR}/cuda",
            "FLASHINFER_WORKSPACE_BASE": CACHE_DIR,
        }
        if role != "colocated":
            # Otherwise a free port of the system's choice, which no policy can name.
            values["UCX_TCP_PORT_RANGE"] = "-".join(map(str, TRANSFER_PORTS))
    address = {"name": "VLLM_HOST_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    return [address, *({"name": name, "value": value} for name, value in values.items())]


def transfer_ports(context: Context) -> list[object]:
    """Ports for a policy, beside the side channel, that KV blocks come through; none without vLLM.

    Decode pods open every connection: they ask the side channel for a rank's address and then read from it. Behind a
    closed port a read neither ends nor fails.
    """
    if context.service.spec.engine.type != "vllm":
        return []
    first, last = TRANSFER_PORTS
    return [{"protocol": "TCP", "port": first, "endPort": last}]


def gpus(context: Context, role: Role, container: str) -> dict[str, str]:
    """Limits that a role's container has beside those of the spec: a GPU a rank.

    Empty without vLLM, and where the spec or its podTemplate names GPUs of any kind for this container, be it none of
    them (`nvidia.com/gpu: 0`), or claims devices.
    """
    spec = context.spec_of(role)
    if not runs(context, role) or not isinstance(spec, WorkerRole):
        return {}
    named = {*spec.resources.limits, *spec.resources.requests, *_of_template(spec, container)}
    if spec.resources.claims or any(_is_gpu(name) for name in named):
        return {}
    return {GPU: str(spec.tensor_parallel_size)}


def _of_template(spec: WorkerRole, container: str) -> Iterable[str]:
    """Names of resources that the podTemplate gives the container; a claim of devices counts as GPU."""
    own = spec.pod_template.spec.get("containers")
    for item in own if isinstance(own, list) else ():
        resources = (
            item.get("resources") if isinstance(item, Mapping) and item.get("name") == container else None
        )
        if isinstance(resources, Mapping):
            for part in ("limits", "requests"):
                amounts = resources.get(part)
                yield from amounts if isinstance(amounts, Mapping) else ()
            if resources.get("claims"):
                yield GPU


def _is_gpu(resource: str) -> bool:
    """Such as nvidia.com/gpu, nvidia.com/mig-1g.10gb, amd.com/gpu, gpu.intel.com/xe; not a network card."""
    return "gpu" in resource or "/mig-" in resource
