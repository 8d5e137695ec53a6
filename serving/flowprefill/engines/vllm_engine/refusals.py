"""Configurations of vLLM that the engine does not run, each with the flag to change. A pure look at vLLM's config."""

from __future__ import annotations

from typing import Any

from flowprefill.errors import InvalidConfiguration


def refusals(config: Any) -> list[str]:
    """What is refused in this `VllmConfig`, a sentence each; empty when it is accepted."""
    parallel, scheduling, model = config.parallel_config, config.scheduler_config, config.model_config
    found = []
    if parallel.data_parallel_size > 1:
        found.append(
            f"--data-parallel-size is {parallel.data_parallel_size}; accepted is 1: run more prefill pods instead"
        )
    if parallel.pipeline_parallel_size > 1:
        found.append(
            f"--pipeline-parallel-size is {parallel.pipeline_parallel_size}; accepted is 1: use --tensor-parallel-size"
        )
    if config.speculative_config is not None:
        found.append("--speculative-config is set; accepted is none: leave it out")
    if scheduling.async_scheduling:
        found.append("--async-scheduling is on; accepted is --no-async-scheduling")
    if model.runner_type != "generate":
        found.append(
            f"--runner is {model.runner_type!r}; accepted is 'generate': pooling models have no TTFT"
        )
    if getattr(model, "is_encoder_decoder", False):
        found.append(f"{model.model} is an encoder-decoder model; accepted are decoders")
    if model.multimodal_config is not None and not model.multimodal_config.language_model_only:
        found.append(f"{model.model} takes images or sound; accepted is text: add --language-model-only")
    if config.lora_config is not None:
        found.append("--enable-lora is set; accepted is none: merge the adapter into the model")
    if config.use_v2_model_runner:
        found.append("model runner V2 is on; accepted is V1: set VLLM_USE_V2_MODEL_RUNNER=0")
    connector = config.kv_transfer_config.kv_connector if config.kv_transfer_config is not None else None
    if connector is not None and connector.startswith("LMCache"):
        found.append(
            f"KV connector {connector} keeps state per layer; accepted are NixlConnector and the like"
        )
    return found


def require_accepted(config: Any) -> None:
    """Raises InvalidConfiguration with everything that is refused."""
    found = refusals(config)
    if found:
        raise InvalidConfiguration(
            "the preemptive engine does not run with these settings: " + "; ".join(found)
        )
