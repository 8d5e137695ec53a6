"""vLLM's ExampleConnector, for prefills that stop in the middle. Named by `--kv-transfer-config`'s `kv_connector_module_path`.

The stock connector writes a file per layer into a prompt's folder while the forward runs, and takes a folder that exists for a
whole prompt. A prefill that is suspended, or given up half-way, so leaves a folder that lacks layers: whoever finds it, a decode server
above all, dies of the missing file. And the first chunk of a prompt is stored as if it were all of it. Here

1. files are written beside the prompt's folder, which comes to be in one piece when the forward has ended;
2. what a forward leaves that did not end is removed;
3. a prompt that does not run in one step is not stored: decode then computes it itself.

A consumer is stock: the folders are the same.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import (
    ExampleConnector,
    ExampleConnectorMetadata,
    ReqMeta,
)


class WholeFolders(ExampleConnector):
    """See the module. Any: vLLM's own objects."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_layers = 0
        self._written: ReqMeta | None = None
        """The prompt that is being written."""

    # Of the scheduler's side.

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """The stock one, without prompts that this step computes in part."""

        def is_whole(request: Any) -> bool:
            end = request.num_computed_tokens + scheduler_output.num_scheduled_tokens[request.req_id]
            return request.req_id in self._requests_need_load or end >= len(request.prompt_token_ids or ())

        new = [request for request in scheduler_output.scheduled_new_reqs if is_whole(request)]
        return super().build_connector_meta(replace(scheduler_output, scheduled_new_reqs=new))

    # Of the worker's side.

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Learn how many files make a prompt."""
        self._num_layers = len(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load what is wanted. The stock one warns of each step without tokens, of which there are many."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ExampleConnectorMetadata)
        if any(not request.is_store for request in metadata.requests):
            super().start_load_kv(forward_context, **kwargs)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Write a layer of each prompt that is to be stored."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ExampleConnectorMetadata)
        stored = [request for request in metadata.requests if request.is_store]
        for request in stored:
            self._written = request
            self.bind_connector_metadata(ExampleConnectorMetadata(requests=[request]))
            try:
                super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)
            finally:
                self._written = None
                self.bind_connector_metadata(metadata)

    def wait_for_save(self) -> None:
        """The forward has ended, or was unwound: show the folders of whole prompts, remove others."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ExampleConnectorMetadata)
        for request in metadata.requests:
            if request.is_store:
                self._show(request)

    def _generate_foldername_debug(
        self, token_ids: Any, mm_hashes: list[str], create_folder: bool = False
    ) -> str:
        folder = str(super()._generate_foldername_debug(token_ids, mm_hashes, create_folder=False))
        if self._written is not None:
            folder = self._beside(folder, self._written)
        if create_folder:
            os.makedirs(folder, exist_ok=True)
        return folder

    def _show(self, request: ReqMeta) -> None:
        folder = self._generate_foldername_debug(request.token_ids, request.mm_hashes)
        written = Path(self._beside(folder, request))
        if not written.is_dir():
            return
        if len(list(written.iterdir())) == self._num_layers and not os.path.exists(folder):
            os.rename(written, folder)
        else:
            shutil.rmtree(written)

    @staticmethod
    def _beside(folder: str, request: ReqMeta) -> str:
        """Where a prompt is written: no two steps in flight share it."""
        return f"{folder}.{os.getpid()}-{id(request):x}"
