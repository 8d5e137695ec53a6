"""Run as a script in vLLM's environment: greedy tokens by transformers. The question comes on stdin, the answer goes to stdout."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def load(path: str) -> Any:
    """The model in float32, after a look at whether the weights are all there and all used."""
    model, told = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="sdpa", output_loading_info=True
    )
    wrong = {name: sorted(map(str, keys)) for name, keys in told.items() if keys}
    if wrong:
        sys.exit(f"{path} does not fit transformers' model: {wrong}")
    return model.eval()


def continuation(model: Any, prompt: list[int], num_tokens: int) -> dict[str, list[Any]]:
    """Greedy tokens with the logprob of each and the distance of its logit to the next best."""
    answer: dict[str, list[Any]] = {"token_ids": [], "logprobs": [], "margins": []}
    cache, fresh = None, torch.tensor([prompt])
    for _ in range(num_tokens):
        done = model(fresh, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, logits = done.past_key_values, done.logits[0, -1]
        best = logits.topk(2)
        answer["token_ids"].append(int(best.indices[0]))
        answer["logprobs"].append(float(logits.log_softmax(-1)[best.indices[0]]))
        answer["margins"].append(float(best.values[0] - best.values[1]))
        fresh = best.indices[:1][None]
    return answer


def main() -> None:
    torch.set_num_threads(1)
    question = json.load(sys.stdin)
    answers = {}
    with torch.inference_mode():
        for path, prompts in question["prompts"].items():
            model = load(path)
            answers[path] = [continuation(model, prompt, question["num_tokens"]) for prompt in prompts]
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
