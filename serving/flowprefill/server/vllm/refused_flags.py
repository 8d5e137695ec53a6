"""Flags of `vllm serve` that a user may not give, with the reason. Pure.

vLLM takes underscores for dashes, `--name=value`, `--name.key value` for a part of a JSON value, and unambiguous beginnings of
names. Names here are the whole ones, with dashes; `Flag` brings what a user wrote into that form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowprefill.errors import InvalidConfiguration

SHORT_NAMES = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-asc": "--api-server-count",
    "-sc": "--speculative-config",
    "-cc": "--compilation-config",
    "-O": "--optimization-level",
}

_ONE_ENGINE = "run more pods instead"
_SCHEDULER = "the preemptive engine has a scheduler of its own"
_WHOLE_PROMPTS = (
    "prompts run whole, and scheduling.chunkTokens and scheduling.batchTokenBudget bound what a step takes"
)

REFUSED = {
    "--additional-config": "it carries our own settings",
    "--async-scheduling": "steps that are paused and overtaken end out of order",
    "--api-key": "set security.apiKeysSecretRef, or VLLM_API_KEY by hand",
    "--api-server-count": "the pod's parent process watches one API server",
    "--config": "give its options as flags, so that they can be checked",
    "--data-parallel-size": _ONE_ENGINE,
    "--decode-context-parallel-size": "not supported by the preemptive engine",
    "--disable-log-stats": "the pod drains, scales and tells its load by vLLM's metrics",
    "--distributed-executor-backend": "the engine has executors of its own",
    "--enable-chunked-prefill": _WHOLE_PROMPTS,
    "--enable-lora": "merge the adapter into the model",
    "--enable-prompt-embeds": "prompts are tokens",
    "--grpc": "the proxy speaks HTTP",
    "--headless": "the pod's API port is the API server's",
    "--limit-mm-per-prompt": "prompts are text; give --language-model-only for a model that also takes images",
    "--long-prefill-token-threshold": _WHOLE_PROMPTS,
    "--lora-modules": "merge the adapter into the model",
    "--max-num-batched-tokens": _WHOLE_PROMPTS,
    "--max-num-scheduled-tokens": _WHOLE_PROMPTS,
    "--nnodes": "a pod is one machine",
    "--node-rank": "a pod is one machine",
    "--pipeline-parallel-size": "use tensor parallelism",
    "--pooler-config": "pooling models have no first token",
    "--prefill-context-parallel-size": "not supported by the preemptive engine",
    "--runner": "pooling models have no first token",
    "--convert": "pooling models have no first token",
    "--scheduler-cls": _SCHEDULER,
    "--scheduling-policy": f"{_SCHEDULER}: set scheduling.policy",
    "--shutdown-timeout": "it follows termination.drainSeconds",
    "--speculative-config": "not supported by the preemptive engine",
    "--spec-method": "not supported by the preemptive engine",
    "--spec-model": "not supported by the preemptive engine",
    "--spec-tokens": "not supported by the preemptive engine",
    "--ssl-certfile": "the proxy speaks plain HTTP to its pods",
    "--ssl-keyfile": "the proxy speaks plain HTTP to its pods",
    "--uds": "the proxy speaks TCP to its pods",
    "--worker-cls": "the preemptive engine has a worker of its own",
}
"""Each with its reason. What begins with `--data-parallel-` is refused too."""

OF_THE_SERVICE = {
    "--block-size": "engine.blockSize",
    "--dtype": "engine.dtype",
    "--host": "--host of flowprefill serve",
    "--max-model-len": "model.maxModelLen",
    "--model": "model.uri",
    "--port": "--port of flowprefill serve",
    "--revision": "model.revision",
    "--served-model-name": "model.servedName",
    "--tensor-parallel-size": "the role's tensorParallelSize",
}
"""Flags whose values have a place of their own, and where."""

_PREFIXES = ("--data-parallel-",)
_ONE_LETTER = ("-O", "-n", "-r")
"""Short names whose value may follow at once, as in `-O3`."""

_COMPLETE = frozenset({"--no-async-scheduling"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag as a user gave it. `value` is None when none came with it; `words` is what the user wrote."""

    name: str
    key: str | None
    value: str | None
    words: tuple[str, ...]


def parsed(args: Sequence[str]) -> tuple[Flag, ...]:
    """The flags in `args`. Raises `InvalidConfiguration` for a word that belongs to none."""
    flags: list[Flag] = []
    for word in args:
        if _is_name(word):
            flags.append(_flag(word))
        elif not flags:
            raise InvalidConfiguration(
                f"vLLM arguments begin with {word[:100]!r}; accepted are flags: the model is the service's own"
            )
        else:
            last = flags[-1]
            value = word if last.value is None else last.value
            flags[-1] = Flag(name=last.name, key=last.key, value=value, words=(*last.words, word))
    return tuple(flags)


def check(flags: Sequence[Flag]) -> None:
    """Raise `InvalidConfiguration` that names every flag which is not accepted, and why."""
    found = [f"{flag.words[0][:100]}: {reason}" for flag in flags if (reason := _refusal(flag)) is not None]
    if found:
        raise InvalidConfiguration("vLLM arguments that are not accepted: " + "; ".join(found))


def _refusal(flag: Flag) -> str | None:
    name = flag.name
    if name in _COMPLETE:
        return None
    if reason := REFUSED.get(name) or REFUSED.get("--" + name.removeprefix("--no-")):
        return reason
    if name.startswith(_PREFIXES):
        return REFUSED["--data-parallel-size"]
    if place := OF_THE_SERVICE.get(name):
        return f"set {place}"
    # The beginning of a name would get past the table.
    whole = [known for known in (*REFUSED, *OF_THE_SERVICE) if known.startswith(name)]
    if name.startswith("--") and whole:
        return f"write the whole name ({whole[0]} is not accepted here)"
    return None


def _is_name(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and (word[1] == "-" or word[1].isalpha())


def _flag(word: str) -> Flag:
    name, equals, value = word.partition("=")
    name, dot, key = name.partition(".")
    if not name.startswith("--"):
        if name not in SHORT_NAMES and name[:2] in _ONE_LETTER:
            name, dot, equals, value = word[:2], "", "=", word[2:].removeprefix("=")
        elif name not in SHORT_NAMES and name.startswith("-dp"):
            name = "-dp"
        name = SHORT_NAMES.get(name, name)
    else:
        name = name.replace("_", "-")
    return Flag(
        name=name,
        key=key if dot else None,
        value=(value or None) if equals else None,
        words=(word,),
    )
