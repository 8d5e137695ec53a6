"""Figures of the engine on real vLLM: `make figures SET=vllm`, from a checkout, in vLLM's environment."""

from support.vllm.in_process import prepare

prepare()
