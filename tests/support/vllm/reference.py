"""What transformers alone answers: the greedy tokens that every server's answers are compared with.

It runs in vLLM's environment, so that both have the same torch. Several models in one process: importing takes longest.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from support.vllm.environment import environment

SCRIPT = Path(__file__).with_name("transformers_greedy.py")
TIMEOUT_S = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Greedy:
    """One greedy continuation. `logprobs` are the chosen tokens'; `margins` their logits' distances to the next best."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    margins: tuple[float, ...]


def greedy(
    python: Path, prompts: Mapping[Path, Sequence[Sequence[int]]], num_tokens: int
) -> dict[Path, list[Greedy]]:
    """The first `num_tokens` greedy tokens after each prompt, by model directory, in float32, end-of-sequence ignored."""
    question = {
        "num_tokens": num_tokens,
        "prompts": {str(model): list(map(list, texts)) for model, texts in prompts.items()},
    }
    done = subprocess.run(
        [python, SCRIPT],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=environment(python),
    )
    assert done.returncode == 0, f"transformers failed: {done.stderr[-4000:]}"
    answers = json.loads(done.stdout)
    return {
        model: [
            Greedy(**{name: tuple(values) for name, values in one.items()}) for one in answers[str(model)]
        ]
        for model in prompts
    }
