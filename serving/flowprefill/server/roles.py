"""Makes the role that a pod was started as."""

from __future__ import annotations

import socket

from flowprefill.errors import InvalidConfiguration
from flowprefill.server.colocated_role import ColocatedRole
from flowprefill.server.decode_role import DecodeRole
from flowprefill.server.loading import Loaded
from flowprefill.server.prefill_role import PrefillRole
from flowprefill.server.role import Pod, Role


def new_role(pod: Pod, loaded: Loaded, *, kv_socket: socket.socket | None, advertise_host: str) -> Role:
    """The role object of `pod.role`; on the event loop. Nothing runs before its `start`."""
    match pod.role:
        case "prefill":
            assert kv_socket is not None, "a prefill pod has a KV port"
            return PrefillRole(
                pod, loaded.needed_predictor, kv_socket=kv_socket, advertise_host=advertise_host
            )
        case "decode":
            return DecodeRole(pod)
        case "colocated":
            return ColocatedRole(pod, loaded.needed_predictor)
        case _:
            raise InvalidConfiguration(f"no role {pod.role!r}; accepted are prefill, decode and colocated")
