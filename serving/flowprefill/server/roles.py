"""Makes the role that a pod was started as."""

from __future__ import annotations

from flowprefill.errors import InvalidConfiguration
from flowprefill.execution.decode import DecodeListener
from flowprefill.server.decode_role import DecodeRole, ThreadedDecoder
from flowprefill.server.loading import Loaded
from flowprefill.server.prefill_role import PrefillRole
from flowprefill.server.role import Pod, Role


def new_role(pod: Pod, loaded: Loaded, *, host: str, kv_port: int, advertise_host: str) -> Role:
    """The role object of `pod.role`; on the event loop. Nothing runs before its `start`."""
    match pod.role:
        case "prefill":
            assert loaded.predictor is not None, "a pod that prefills has a predictor"
            return PrefillRole(
                pod, loaded.predictor, host=host, kv_port=kv_port, advertise_host=advertise_host
            )
        case "decode":
            return DecodeRole(pod, lambda listener: _decode_loop(pod, listener))
        case _:
            raise InvalidConfiguration(f"no role {pod.role!r}; accepted are prefill and decode")


def _decode_loop(pod: Pod, listener: DecodeListener) -> ThreadedDecoder:
    from flowprefill.execution.decode_loop import DecodeLoop

    return DecodeLoop(pod.engine, listener, max_batch_size=pod.config.decode.max_batch_size)
