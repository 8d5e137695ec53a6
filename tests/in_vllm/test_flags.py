"""Our command lines, read by the parser of the vLLM that is installed here."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from flowprefill.server.vllm.core_settings import core_settings
from flowprefill.server.vllm.flags import command_line
from flowprefill.server.vllm.refused_flags import OF_THE_SERVICE, REFUSED, SHORT_NAMES
from support.pods import live_config
from support.vllm_launch import launch


@cache
def parser() -> tuple[Any, Any]:
    """The parser of `vllm`, and that of its command `serve`."""
    whole = FlexibleArgumentParser()
    return whole, make_arg_parser(whole.add_subparsers().add_parser("serve"))


def test_every_flag_that_is_refused_is_one_of_vllms() -> None:
    known = {name for action in parser()[1]._actions for name in action.option_strings}
    ours = {*REFUSED, *OF_THE_SERVICE, *SHORT_NAMES.values(), *SHORT_NAMES}
    assert ours - known == {"-O"}, "vLLM reads -O before its parser does"


@pytest.mark.parametrize("role", ["prefill", "decode", "colocated"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_vllm_reads_our_command_line_as_it_is_meant(tmp_path: Path, role: str, device: str) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(json.dumps({"api-key": ["one", "two"]}))
    live = live_config(maxSuspended=2)
    of = launch(role, device=device, kv_cache_tokens=1000, live=live, keys_file=keys)
    read = parser()[0].parse_args(list(command_line(of, ("--seed", "3"))))
    assert (read.host, read.port, read.served_model_name) == ("10.0.0.1", 8000, ["test-model"])
    assert (read.max_model_len, read.seed, read.api_key) == (1000, 3, ["one", "two"])
    assert read.enforce_eager is (device == "cpu")
    if role == "decode":
        assert (read.scheduler_cls, read.additional_config) == (None, {})
    else:
        assert (read.async_scheduling, read.max_num_batched_tokens) == (False, 2048)
        section = core_settings(read.additional_config["flowprefill"])
        assert (section.live, section.slots) == (live, 3)
    if role == "colocated":
        assert read.kv_transfer_config is None
    else:
        kv = read.kv_transfer_config
        assert kv.kv_role == {"prefill": "kv_producer", "decode": "kv_consumer"}[role]
        assert kv.get_from_extra_config("kv_lease_duration", None) == 60
