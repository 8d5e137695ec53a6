"""The command line of `vllm serve`. What each flag means is in `vllm serve --help=all` of vLLM 0.32.0."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from flowprefill.errors import InvalidConfiguration
from flowprefill.scheduling.profile import Profile, ProfileSample, Provenance
from flowprefill.server.vllm.core_settings import core_settings
from support.pods import live_config
from support.vllm_launch import json_value, launch, values

ENGINE = "flowprefill.engines.vllm_engine"


def test_the_service_decides_name_address_sizes_and_number_format() -> None:
    config = {
        "engine": {"type": "vllm", "dtype": "bfloat16", "blockSize": 32},
        "model": {"uri": "hf://org/m", "servedName": "m", "maxModelLen": 4096},
        "prefill": {"tensorParallelSize": 2},
        "decode": {"tensorParallelSize": 4},
    }
    found = values(launch("prefill", config=config))
    assert found["--served-model-name"] == "m"
    assert (found["--host"], found["--port"]) == ("10.0.0.1", "8000")
    assert (found["--dtype"], found["--block-size"], found["--max-model-len"]) == ("bfloat16", "32", "4096")
    assert found["--tensor-parallel-size"] == "2"
    assert values(launch("decode", config=config))["--tensor-parallel-size"] == "4"


@pytest.mark.parametrize("role", ["prefill", "colocated"])
def test_pods_that_prefill_run_our_scheduler_worker_and_executor_without_async_scheduling(role: str) -> None:
    found = values(launch(role))
    assert found["--scheduler-cls"] == f"{ENGINE}.scheduler.AllocatingScheduler"
    assert found["--worker-cls"] == f"{ENGINE}.worker.PreemptiveWorker"
    assert found["--distributed-executor-backend"] == f"{ENGINE}.executor.InProcessExecutor"
    assert "--no-async-scheduling" in found


def test_several_ranks_have_a_worker_and_an_executor_of_their_own() -> None:
    found = values(launch("prefill", config={"prefill": {"tensorParallelSize": 2}}))
    assert found["--worker-cls"] == "flowprefill.server.vllm.ranks.worker.RankedWorker"
    assert found["--distributed-executor-backend"] == "flowprefill.server.vllm.ranks.executor.RankedExecutor"


def test_a_decode_pod_is_stock_vllm_with_a_connector() -> None:
    of = launch("decode")
    assert not [word for word in map(str, values(of).values()) if "flowprefill" in word]
    assert json_value(of, "--kv-transfer-config")["kv_role"] == "kv_consumer"


def test_the_engine_core_reads_our_settings_as_they_were_meant() -> None:
    profile = Profile(
        provenance=Provenance(
            model="m", engine="vllm", device="cuda", dtype="bfloat16", taken_on=datetime.date(2026, 3, 1)
        ),
        samples=(ProfileSample(num_new=16, seconds=0.01),),
    )
    live = live_config(maxSuspended=3, policy="edf")
    section = json_value(launch(live=live, channel="/run/core", profile=profile), "--additional-config")
    read = core_settings(section["flowprefill"])
    assert (read.live, read.channel, read.profile) == (live, "/run/core", profile)
    assert read.slots == 4, "one that runs beside three that are suspended"
    assert (read.model, read.revision) == ("org/m", "abc")


def test_measuring_at_the_start_can_be_switched_off() -> None:
    off = json_value(launch(config={"predictor": {"warmup": False}}), "--additional-config")
    assert core_settings(off["flowprefill"]).warm_up_seconds == 0.0
    on = json_value(launch(), "--additional-config")
    assert core_settings(on["flowprefill"]).warm_up_seconds > 0.0


@pytest.mark.parametrize(
    ("asked", "budget", "wanted"), [(4096, 2048, 4096), (None, 2048, 8192), (1024, 2048, 2048)]
)
def test_a_whole_prompt_and_a_whole_batch_fit_one_step(asked: int | None, budget: int, wanted: int) -> None:
    model = {"uri": "hf://org/m", "servedName": "m"} | ({} if asked is None else {"maxModelLen": asked})
    of = launch("prefill", config={"model": model}, live=live_config(batchTokenBudget=budget))
    assert values(of)["--max-num-batched-tokens"] == str(wanted)


def test_a_step_takes_no_more_than_the_kv_cache_holds() -> None:
    of = launch("prefill", kv_cache_tokens=3000)
    assert values(of)["--max-num-batched-tokens"] == "3000"


def test_kv_size_is_in_blocks_and_one_more_that_vllm_keeps_for_itself() -> None:
    assert (
        values(launch(kv_cache_tokens=1000))["--num-gpu-blocks-override"] == "64"
    )  # 63 blocks hold 1000 tokens
    assert "--num-gpu-blocks-override" not in values(launch())


def test_the_longest_prompt_is_the_models_unless_the_kv_cache_is_smaller() -> None:
    assert values(launch())["--max-model-len"] == "auto"
    assert values(launch(kv_cache_tokens=1000))["--max-model-len"] == "1000"
    assert values(launch(kv_cache_tokens=100_000))["--max-model-len"] == "8192"


def test_on_a_cpu_blocks_are_of_a_size_that_attention_takes_and_nothing_is_compiled() -> None:
    found = values(launch(device="cpu", kv_cache_tokens=1000))
    assert found["--block-size"] == "32"
    assert found["--num-gpu-blocks-override"] == "33"
    assert "--enforce-eager" in found
    assert (
        values(launch(device="cpu", config={"engine": {"type": "vllm", "blockSize": 64}}))["--block-size"]
        == "64"
    )
    assert "--enforce-eager" not in values(launch())


@pytest.mark.parametrize(
    "asked", ["-O3", "-O=2", "-cc.mode=3", "--compilation_config={}", "--no-enforce-eager"]
)
def test_on_a_cpu_a_user_may_ask_for_compilation(asked: str) -> None:
    assert "--enforce-eager" not in values(launch(device="cpu"), asked)


def test_a_colocated_pod_has_no_connector_and_others_have_the_one_of_nixl() -> None:
    assert "--kv-transfer-config" not in values(launch())
    assert json_value(
        launch("prefill", config={"kvTransfer": {"leaseSeconds": 45}}), "--kv-transfer-config"
    ) == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"kv_lease_duration": 45},
    }
    assert json_value(launch("decode", device="cpu"), "--kv-transfer-config")["kv_buffer_device"] == "cpu"


@pytest.mark.parametrize(("role", "kv_role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
def test_a_connector_that_a_user_names_is_told_the_pods_role(role: str, kv_role: str) -> None:
    named = '--kv-transfer-config={"kv_connector":"MooncakeConnector"}'
    assert json_value(launch(role), "--kv-transfer-config", named) == {
        "kv_connector": "MooncakeConnector",
        "kv_role": kv_role,
    }
    both = '--kv-transfer-config={"kv_connector":"MooncakeConnector","kv_role":"kv_both"}'
    assert json_value(launch(role), "--kv-transfer-config", both)["kv_role"] == "kv_both"


def test_the_connector_that_shows_unfinished_prompts_is_replaced_where_prompts_stop_in_the_middle() -> None:
    named = '--kv-transfer-config={"kv_connector":"ExampleConnector"}'
    config = json_value(launch("prefill"), "--kv-transfer-config", named)
    assert config["kv_connector"] == "WholeFolders"
    assert config["kv_connector_module_path"] == "flowprefill.engines.vllm_engine.whole_folders"
    stock = json_value(launch("decode"), "--kv-transfer-config", named)
    assert stock == {"kv_connector": "ExampleConnector", "kv_role": "kv_consumer"}


@pytest.mark.parametrize(
    "args",
    [
        ("--kv-transfer-config", "[]"),
        ("--kv-transfer-config", "{"),
        ("--kv-transfer-config.kv_connector", "X"),
        ("--kv-transfer-config",),
    ],
)
def test_half_a_connector_is_refused(args: tuple[str, ...]) -> None:
    with pytest.raises(InvalidConfiguration, match="--kv-transfer-config"):
        values(launch("prefill"), *args)


def test_what_a_user_adds_comes_last_and_wins() -> None:
    config = {"engine": {"type": "vllm", "args": ["--gpu-memory-utilization=0.8", "--max-num-seqs", "32"]}}
    found = values(launch("prefill", config=config), "--gpu-memory-utilization=0.7", "--quantization", "fp8")
    assert (found["--gpu-memory-utilization"], found["--max-num-seqs"]) == ("0.7", "32")
    assert found["--quantization"] == "fp8"


def test_requests_are_logged_when_the_service_asks_for_it() -> None:
    assert "--disable-uvicorn-access-log" in values(launch())
    assert "--disable-uvicorn-access-log" not in values(launch(live=live_config(perRequestLog=True)))


def test_vllm_may_take_the_drain_time_for_its_last_requests() -> None:
    termination: dict[str, Any] = {"drainSeconds": 90}
    assert values(launch(config={"termination": termination}))["--shutdown-timeout"] == "90"
