"""What is relied on inside vLLM is as it was when the engine was proven. A change here asks for a look, then for a new digest."""

from __future__ import annotations

import hashlib
import importlib
import inspect

import pytest

from flowprefill.engines.vllm_engine.supported import SUPPORTED, installed_version, require_supported

RELIED_ON = {
    "vllm.v1.engine.core:EngineCoreProc.run_busy_loop": "790a9d50e05f23ac",
    "vllm.v1.engine.core:EngineCoreProc._process_input_queue": "215a7d373e636f98",
    "vllm.v1.engine.core:EngineCoreProc._handle_client_request": "b2026637e79970b6",
    "vllm.v1.engine.core:EngineCoreProc._handle_shutdown": "53b93bd4b9042c99",
    "vllm.v1.engine.core:EngineCoreProc.has_work": "5c90a45c5b5b46c9",
    "vllm.v1.engine.core:EngineCore.step": "a02d17986fb72adb",
    "vllm.v1.core.sched.scheduler:Scheduler.schedule": "da4f2cf2fc39c39e",
    "vllm.v1.core.sched.scheduler:Scheduler._reserve_prefill_lookahead": "c214e49d7610a63a",
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": "85b29db96051135c",
    "vllm.v1.core.sched.scheduler:Scheduler.finish_requests": "b7a4ef7b8aa588bf",
    "vllm.v1.core.sched.scheduler:Scheduler._preempt_request": "4113f5de8a84ec25",
    "vllm.v1.core.sched.scheduler:Scheduler._update_after_schedule": "2b527eb8070d3cce",
    "vllm.v1.core.sched.scheduler:Scheduler._update_from_kv_xfer_finished": "98d49f74d3997d2b",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots": "8c60d937fd9eb0c8",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.cache_blocks": "62ae87327fd28249",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states": "326599f31b273b94",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model": "e058bf791a298e98",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens": "047e6a4738dead56",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.initialize_kv_cache": "95985f4cf7f63c60",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.initialize_kv_cache_tensors": "81dd948e771ce8a5",
    "vllm.v1.worker.cpu_model_runner:CPUModelRunner._postprocess_tensors": "7ec5969f31a7bbb4",
    "vllm.v1.worker.gpu_worker:Worker.execute_model": "782126ba48e7e116",
    "vllm.v1.worker.gpu_worker:Worker.initialize_from_config": "71b1fbd048077170",
    "vllm.v1.worker.kv_connector_model_runner_mixin:KVConnectorModelRunnerMixin._get_kv_connector_output": "d31c3c5204c3e90f",
    "vllm.forward_context:override_forward_context": "96a30187fd05b912",
    "vllm.forward_context:set_forward_context": "70c3bad7ccba8e9b",
    "vllm.v1.executor.uniproc_executor:UniProcExecutor": "3a7ad399784fc6a4",
}


def digest(name: str) -> str:
    module, _, path = name.partition(":")
    found = importlib.import_module(module)
    for part in path.split("."):
        found = inspect.getattr_static(found, part)
    while hasattr(found, "__wrapped__") or isinstance(found, staticmethod):
        found = found.__func__ if isinstance(found, staticmethod) else found.__wrapped__
    return hashlib.sha256(inspect.getsource(found).encode()).hexdigest()[:16]


def test_the_supported_release_is_installed() -> None:
    require_supported()
    assert (installed_version() or "").partition("+")[0] == SUPPORTED


@pytest.mark.parametrize("name", RELIED_ON)
def test_the_source_is_the_one_that_was_proven(name: str) -> None:
    assert digest(name) == RELIED_ON[name], f"{name} has changed: read it, then note its digest"
