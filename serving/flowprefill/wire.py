"""What proxy and pods say to each other beyond the OpenAI API (DESIGN: prefill/decode protocol, placement).

The prefill leg is an OpenAI request with `stream: false`, `max_tokens: 1` and
`kv_transfer_params: {"do_remote_decode": true}`; its answer carries `kv_transfer_params`, which go with the
decode leg unchanged. That is vLLM's own protocol, so stock `vllm serve` pairs work behind the same proxy.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

XARG_BUDGET_S = "ttft_slo"
"""`vllm_xargs` key: the remaining TTFT budget in seconds when the request left the proxy."""
XARG_TARGET_S = "ttft_target"
"""`vllm_xargs` key: the request's whole TTFT target in seconds (ageing and feasibility are relative to it)."""
XARG_CLASS = "slo_class"
"""`vllm_xargs` key: the SLO class's name."""
XARG_DECODE_MAX_TOKENS = "decode_max_tokens"
"""`vllm_xargs` key on the prefill leg: the client's own `max_tokens`, so that prompt plus answer are checked
against the context length before any prefill. Absent when the client set no limit."""

KV_RELEASE_PATH = "/v1/kv/{remote_request_id}"
"""`DELETE` on a prefill pod's API port: nobody will pull this request's KV. 204, also for unknown ids."""


class _Wire(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class KVTransferParams(_Wire):
    """The answer of a prefill leg: where the prompt's KV blocks wait to be pulled (torch engine).

    `remote_block_ids` are in prompt order and cover `num_tokens` tokens. The producer holds them until the pull
    is acknowledged, the request is aborted or the lease ends.
    """

    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    remote_engine_id: str
    remote_host: str
    remote_port: int
    remote_request_id: str
    remote_block_ids: tuple[int, ...]
    num_tokens: int
    block_size: int
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    model: str
    revision: str
    num_cached_tokens: int = 0
    """Prompt tokens that the prefill pod found in its prefix cache; the answer's usage tells them."""
    first_token_id: int | None = None
    """The answer's first token, chosen at the end of prefill by the request's own sampling: the decode pod sends it as
    soon as the KV is in place and goes on from there. None: the decode pod runs the prompt's last token again, as vLLM's
    does."""


class TaskState(_Wire):
    """A running or suspended task. Times are seconds from the moment the state was sent."""

    num_tokens: int
    remaining_s: float
    deadline_in_s: float
    feasible: bool


class PodState(_Wire):
    """One line of a prefill pod's state stream (`GET /v1/state` on the admin port, newline-delimited JSON).

    Sent at every change and at least every 2 s. `sequence` grows by one per line. `waiting` counts requests that
    wait inside the pod, `waiting_s` their predicted work. `cached_prefixes` are block hashes that are likely to
    hit (newest first, bounded); `generation` is the live document in use; `prediction` are coefficients
    [a, b, c, d] of `a + b n + c n^2 + d n p` seconds for n new and p cached tokens, scaled by online correction.
    """

    sequence: int
    role: str
    revision: str
    ready: bool
    draining: bool = False
    generation: int = 0
    running: TaskState | None = None
    suspended: tuple[TaskState, ...] = ()
    waiting: int = 0
    waiting_s: float = 0.0
    waiting_tokens: int | None = None
    """New tokens (net of cached prefix) of the waiting requests; None when the pod does not say."""
    kv_blocks: int = 0
    kv_blocks_free: int = 0
    block_size: int = 16
    prediction: tuple[float, float, float, float] | None = None
    cached_prefixes: tuple[int, ...] = Field(default=(), max_length=4096)


class Endpoint(_Wire):
    """One pod as discovery reports it. `address` and `admin` are `host:port`."""

    name: str
    role: str
    revision: str
    address: str
    admin: str
    ready: bool = True
    terminating: bool = False
    created_s: float = 0.0
    """Unix time at which the pod's revision came to be, in seconds: tells the newest revision. 0 is unknown."""


class EndpointsFile(_Wire):
    """What the local node writes and the proxy's file discovery watches (JSON, replaced atomically)."""

    endpoints: tuple[Endpoint, ...] = ()
