"""Flags of `vllm serve` that fight the engine, in every spelling that vLLM understands."""

from __future__ import annotations

import pytest

from flowprefill.errors import InvalidConfiguration
from flowprefill.server.vllm.refused_flags import check, parsed


def refusal(*args: str) -> str:
    with pytest.raises(InvalidConfiguration) as error:
        check(parsed(args))
    return str(error.value)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--data-parallel-size", "2"], "more pods"),
        (["--data_parallel_size=2"], "more pods"),
        (["-dp", "2"], "more pods"),
        (["-dpl=2"], "more pods"),
        (["--data-parallel-hybrid-lb"], "more pods"),
        (["--pipeline-parallel-size=2"], "tensor parallelism"),
        (["-pp", "2"], "tensor parallelism"),
        (["--speculative-config", '{"method":"ngram"}'], "not supported"),
        (["-sc", '{"method":"ngram"}'], "not supported"),
        (["--speculative-config.method", "ngram"], "not supported"),
        (["--async-scheduling"], "out of order"),
        (["--enable-lora"], "merge the adapter"),
        (["--runner", "pooling"], "no first token"),
        (["--convert=embed"], "no first token"),
        (["--limit-mm-per-prompt", '{"image":1}'], "text"),
        (["--scheduler-cls", "a.B"], "scheduler of its own"),
        (["--scheduling-policy=priority"], "scheduling.policy"),
        (["--worker_cls=a.B"], "worker of its own"),
        (["--distributed-executor-backend", "ray"], "executors of its own"),
        (["--additional-config", "{}"], "our own settings"),
        (["--no-enable-chunked-prefill"], "chunkTokens"),
        (["--max-num-batched-tokens=512"], "chunkTokens"),
        (["--config", "x.yaml"], "as flags"),
        (["-n2"], "one machine"),
        (["--port", "1"], "--port of flowprefill serve"),
        (["--tensor-parallel-size", "2"], "tensorParallelSize"),
        (["-tp", "2"], "tensorParallelSize"),
        (["--served-model-name=x"], "model.servedName"),
    ],
)
def test_a_flag_that_fights_the_engine_is_refused_with_the_reason(words: list[str], reason: str) -> None:
    message = refusal("--seed", "1", *words)
    assert words[0].partition("=")[0] in message
    assert reason in message


@pytest.mark.parametrize("beginning", ["--scheduler-c=a.B", "--pipeline=2", "--speculative", "--enable-lor"])
def test_the_beginning_of_a_refused_name_does_not_get_past(beginning: str) -> None:
    assert "whole name" in refusal(beginning)


def test_all_of_them_are_named_at_once() -> None:
    message = refusal("--enable-lora", "-pp", "2")
    assert "--enable-lora" in message
    assert "-pp" in message


def test_a_word_without_a_flag_is_refused() -> None:
    with pytest.raises(InvalidConfiguration, match="begin with 'Qwen/Qwen3-8B'"):
        parsed(["Qwen/Qwen3-8B"])


@pytest.mark.parametrize(
    "words",
    [
        ["--seed", "1"],
        ["--gpu-memory-utilization=0.9"],
        ["--quantization", "fp8"],
        ["-q", "fp8"],
        ["--no-async-scheduling"],
        ["--enable-expert-parallel"],
        ["--max-num-seqs", "32"],
        ["--kv-cache-dtype=fp8"],
        ["--chat-template", "./x.jinja"],
        ["--hf-overrides", '{"rope_parameters":{"factor":-2.0}}'],
        ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"],
        ["--reasoning-parser=qwen3"],
        ["--disable-hybrid-kv-cache-manager"],
        ["-O3"],
        ["-cc.mode", "3"],
        ["--load-format", "dummy"],
        ["--language-model-only"],
        ["--trust-remote-code"],
    ],
)
def test_other_flags_are_vllms_business(words: list[str]) -> None:
    check(parsed(words))


def test_flags_are_read_as_vllm_reads_them() -> None:
    one, two, three, four = parsed(["--max_num_seqs", "8", "-cc.mode=3", "--lora-modules", "a", "b", "-O2"])
    assert (one.name, one.key, one.value, one.words) == ("--max-num-seqs", None, "8", ("--max_num_seqs", "8"))
    assert (two.name, two.key, two.value) == ("--compilation-config", "mode", "3")
    assert three.words == ("--lora-modules", "a", "b")
    assert (four.name, four.value) == ("--optimization-level", "2")
