"""NVIDIA AIPerf, a public load generator, in a virtual environment of its own.

It shares no pin with this project, so it is installed once into the user's cache and reused.
"""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from pathlib import Path

import pytest

from flowprefill.engines.models import cache_directory

VERSION = "0.13.0"
INSTALL_TIMEOUT_S = 540


def executable() -> Path:
    """The `aiperf` command, installed now if need be. Skips the test when the index cannot be reached."""
    home = cache_directory() / "tools" / f"aiperf-{VERSION}"
    done = home / "installed"
    home.parent.mkdir(parents=True, exist_ok=True)
    with home.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs at once install one after the other
        if not done.is_file():
            try:
                subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True, timeout=120)
                pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet"]
                subprocess.run([*pip, f"aiperf=={VERSION}"], check=True, timeout=INSTALL_TIMEOUT_S)
            except (subprocess.SubprocessError, OSError) as error:
                pytest.skip(f"aiperf {VERSION} cannot be installed: {error}")
            done.write_text(VERSION)
    return home / "bin" / "aiperf"


def write_tokenizer(directory: Path) -> None:
    """A tokenizer that AIPerf can load without a network: one token a word, as the stand-in pods count."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = {"[UNK]": 0, "[EOS]": 1} | {f"w{i}": i + 2 for i in range(2000)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "[UNK]",
        "eos_token": "[EOS]",
        "model_max_length": 4096,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
