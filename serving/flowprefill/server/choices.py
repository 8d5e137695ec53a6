"""What to generate for one prompt, and each choice's text on its way out."""

from __future__ import annotations

from dataclasses import dataclass

from flowprefill.engines.protocol import SamplingParams
from flowprefill.execution.decode import DecodeJob
from flowprefill.openai.requests import GenerationRequest
from flowprefill.openai.responses import FinishReason
from flowprefill.openai.stops import StopMatcher
from flowprefill.server.text import TextStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """A piece of one choice. `num_tokens` counts the choice's tokens so far."""

    index: int
    text: str
    finish_reason: FinishReason | None
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan:
    """What to generate for one prompt. `stop_token_ids` end a choice and have no text.

    `first_token_id` is what the prefill chose; it serves a single choice that may end at any token.
    """

    answer_id: str
    num_prompt_tokens: int
    last_token_id: int
    first_token_id: int | None = None
    prefix_hashes: tuple[int, ...]
    n: int
    max_tokens: int
    min_tokens: int
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    stops: tuple[str, ...]
    tbt_slo_s: float
    first_index: int = 0

    def job(self, choice: int) -> DecodeJob:
        """The job of one choice. A given seed is offset by the choice, so that choices differ."""
        seed = self.sampling.seed
        return DecodeJob(
            request_id=f"{self.answer_id}-{choice}",
            num_prompt_tokens=self.num_prompt_tokens,
            last_token_id=self.last_token_id,
            first_token_id=self.first_token_id if self.n == 1 and self.min_tokens == 0 else None,
            max_tokens=self.max_tokens,
            min_tokens=min(self.min_tokens, self.max_tokens),
            sampling=SamplingParams(
                temperature=self.sampling.temperature,
                top_p=self.sampling.top_p,
                seed=None if seed is None else seed + choice,
            ),
            stop_token_ids=self.stop_token_ids,
            prefix_hashes=self.prefix_hashes,
            tbt_slo_s=self.tbt_slo_s,
        )


def sampling_of(request: GenerationRequest) -> SamplingParams:
    """How the request wants its tokens chosen."""
    return SamplingParams(temperature=request.temperature, top_p=request.top_p, seed=request.seed)


class Choice:
    """One choice's text on its way out."""

    def __init__(self, plan: AnswerPlan, index: int, texts: TextStream) -> None:
        self.index = index
        self.num_tokens = 0
        self.open = True
        self._plan = plan
        self._texts = texts
        self._stops = StopMatcher(plan.stops)

    def token(self, token_id: int) -> Delta | None:
        """What may be sent now. A stop string closes the choice; stop tokens have no text."""
        self.num_tokens += 1
        if token_id in self._plan.stop_token_ids:
            return None
        text = self._texts.feed(token_id)
        if self.num_tokens <= self._plan.min_tokens:
            return self._delta(text) if text else None
        text, stopped = self._stops.feed(text)
        if stopped:
            self.open = False
            return self._delta(text, "stop")
        return self._delta(text) if text else None

    def end(self, reason: FinishReason) -> Delta:
        """The last piece of a choice that ended by itself."""
        self.open = False
        text, stopped = self._stops.feed(self._texts.flush())
        if not stopped:
            text += self._stops.flush()
        return self._delta(text, "stop" if stopped else reason)

    def _delta(self, text: str, finish_reason: FinishReason | None = None) -> Delta:
        return Delta(index=self.index, text=text, finish_reason=finish_reason, num_tokens=self.num_tokens)
