"""`python -m flowprefill.engines.gguf_unpack FILE.gguf DIRECTORY`: a GGUF file as a bfloat16 model directory.

Runs once, in a process of its own. transformers reads the file and unpacks its blocks; what it then remembers of the
quantisation must go before saving, or loading would look for packed weights again.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def unpack(gguf: Path, directory: Path) -> None:
    """Write safetensors, tokenizer, chat template and configurations into `directory`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    where: dict[str, Any] = {
        "pretrained_model_name_or_path": str(gguf.parent),
        "gguf_file": gguf.name,
        "local_files_only": True,
    }
    # Any: transformers' loaded models and tokenizers have no common typed base.
    model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    model = model.to(torch.bfloat16)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.config.dtype = torch.bfloat16
    model.config._name_or_path = ""
    model.save_pretrained(directory)
    tokenizer: Any = AutoTokenizer.from_pretrained(**where)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
