"""One streamed completion, as any OpenAI client asks for it: `python -m support.completion URL MODEL PROMPT TOKENS`.

Prints a line of JSON: `{"text", "num_chunks", "finish_reason", "completion_tokens"}`.
"""

from __future__ import annotations

import json
import sys

import openai


def main() -> None:
    """The command."""
    url, model, prompt, tokens = sys.argv[1:]
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=100.0)
    texts: list[str] = []
    finish_reason, completion_tokens = None, None
    for chunk in client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=int(tokens),
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    ):
        if chunk.usage is not None:
            completion_tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            texts.append(choice.text)
            finish_reason = choice.finish_reason or finish_reason
    found = {
        "text": "".join(texts),
        "num_chunks": sum(bool(text) for text in texts),
        "finish_reason": finish_reason,
        "completion_tokens": completion_tokens,
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
