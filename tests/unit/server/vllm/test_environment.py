"""The environment of `vllm serve`. What the variables mean is in vLLM 0.32.0's `vllm/envs.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowprefill.server.vllm.environment import Surroundings, environment
from support.pods import live_config
from support.vllm_launch import launch

GOMP = Path("/venv/torch/lib/libgomp.so.1")


def around(**changes: Any) -> Surroundings:
    fields: dict[str, Any] = {
        "channel_key": "abcd",
        "advertise_host": "10.0.0.1",
        "kv_port": 7000,
        "kv_bytes": 0,
        "gomp": GOMP,
        "logging_config": Path("/tmp/logging.json"),
    }
    return Surroundings(**{**fields, **changes})


def test_vllm_asks_no_hub_and_reports_to_nobody() -> None:
    found = environment({"PATH": "/bin", "HF_HUB_OFFLINE": "0"}, launch(), around())
    assert found["PATH"] == "/bin"
    assert found["HF_HUB_OFFLINE"] == "1", "the model is here: whatever was meant for fetching it"
    assert found["VLLM_NO_USAGE_STATS"] == "1"
    assert found["FLOWPREFILL_CHANNEL_KEY"] == "abcd"
    assert found["VLLM_LOGGING_CONFIG_PATH"] == "/tmp/logging.json"


def test_on_a_cpu_threads_stay_unbound_kv_has_its_size_and_torchs_openmp_is_the_only_one() -> None:
    of = launch(device="cpu", config={"engine": {"type": "vllm", "threads": 3}})
    found = environment({}, of, around(kv_bytes=2 * 2**30 + 1))
    assert found["VLLM_CPU_KVCACHE_SPACE"] == "3"  # GiB, whole ones
    assert found["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert found["OMP_NUM_THREADS"] == "3"
    assert found["LD_PRELOAD"] == str(GOMP)
    assert environment({}, of, around(kv_bytes=5))["VLLM_CPU_KVCACHE_SPACE"] == "1"


def test_nixl_waits_for_its_sockets_where_every_core_is_the_models() -> None:
    name = "FLOWPREFILL_NIXL_PROGRESS_DELAY_US"
    assert int(environment({}, launch("prefill", device="cpu"), around())[name]) > 0
    assert environment({name: "7"}, launch("decode", device="cpu"), around())[name] == "7"
    assert name not in environment({}, launch("decode"), around())


def test_other_preloaded_libraries_stay_and_an_openmp_is_not_doubled() -> None:
    of = launch(device="cpu")
    assert (
        environment({"LD_PRELOAD": "/x/tcmalloc.so"}, of, around())["LD_PRELOAD"] == f"{GOMP}:/x/tcmalloc.so"
    )
    own = "/usr/lib/libgomp.so.1:/x/tcmalloc.so"
    assert environment({"LD_PRELOAD": own}, of, around())["LD_PRELOAD"] == own


def test_a_gpu_pod_has_nothing_of_that() -> None:
    found = environment({}, launch(), around())
    assert not {name for name in found if name.startswith("VLLM_CPU")} | (
        {"LD_PRELOAD", "OMP_NUM_THREADS"} & set(found)
    )


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_pods_that_exchange_kv_tell_where_their_side_channel_is(role: str) -> None:
    found = environment({}, launch(role), around())
    assert (found["VLLM_NIXL_SIDE_CHANNEL_HOST"], found["VLLM_NIXL_SIDE_CHANNEL_PORT"]) == (
        "10.0.0.1",
        "7000",
    )
    assert "UCX_TLS" not in found
    assert environment({}, launch(role, device="cpu"), around())["UCX_TLS"] == "tcp"
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT" not in environment({}, launch(), around())


def test_what_a_user_has_set_stays() -> None:
    own = {
        "UCX_TLS": "rc,tcp",
        "VLLM_CPU_KVCACHE_SPACE": "9",
        "OMP_NUM_THREADS": "8",
        "VLLM_LOGGING_LEVEL": "DEBUG",
    }
    found = environment(own, launch("prefill", device="cpu"), around())
    assert own.items() <= found.items()


def test_variables_that_kubernetes_adds_for_a_service_called_vllm_are_dropped() -> None:
    links = {
        "VLLM_PORT": "tcp://10.96.0.7:8000",
        "VLLM_SERVICE_HOST": "10.96.0.7",
        "VLLM_SERVICE_PORT": "8000",
        "VLLM_SERVICE_PORT_HTTP": "8000",
        "VLLM_PORT_8000_TCP": "tcp://10.96.0.7:8000",
        "VLLM_PORT_8000_TCP_ADDR": "10.96.0.7",
        "VLLM_PORT_8000_TCP_PROTO": "tcp",
    }
    assert not set(links) & set(environment(links, launch(), around()))
    kept = {"VLLM_PORT": "29500", "VLLM_HOST_IP": "10.0.0.1", "VLLM_PORT_RANGE": "1"}
    assert kept.items() <= environment(kept, launch(), around()).items()


def test_our_plugin_is_loaded_also_where_plugins_are_named() -> None:
    assert "VLLM_PLUGINS" not in environment({}, launch(), around())
    assert environment({"VLLM_PLUGINS": "other"}, launch(), around())["VLLM_PLUGINS"] == "other,flowprefill"
    assert environment({"VLLM_PLUGINS": ""}, launch(), around())["VLLM_PLUGINS"] == "flowprefill"
    named = {"VLLM_PLUGINS": "flowprefill,x"}
    assert environment(named, launch(), around())["VLLM_PLUGINS"] == "flowprefill,x"


def test_the_runner_that_the_engine_is_proven_on_is_pinned_where_it_runs() -> None:
    assert environment({}, launch(), around())["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert "VLLM_USE_V2_MODEL_RUNNER" not in environment({}, launch("decode"), around())


def test_vllm_logs_at_the_services_level() -> None:
    assert (
        environment({}, launch(live=live_config(logLevel="warning")), around())["VLLM_LOGGING_LEVEL"]
        == "WARNING"
    )
