"""How long a prefill takes: a polynomial fitted to a profile, corrected by what really happened.

One pass over a packed batch costs `a + sum(b n + c n^2 + d n p)` seconds, summed over its requests with `n` new and
`p` cached tokens: `a` is paid once a pass, attention only within each request. All coefficients are at
least zero, so a prediction never falls when tokens are added, and nothing to compute costs nothing.

Online correction is one factor over all predictions. Requests that wait keep their order when it moves.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from flowprefill.scheduling.profile import Profile

Coefficients = tuple[float, float, float, float]

_HUBER_ROUNDS = 8
_SCALE_GAIN = 0.1  # weight of one observation once many were seen
_PRIOR_OBSERVATIONS = 4  # how many observations the profile itself counts for
_MAX_STEP = math.log(2.0)  # one observation pulls no harder than a factor of two
_MAX_LOG_SCALE = math.log(8.0)
_KEPT_PAIRS = 1024
_LEAST_CACHED_SHARE = 0.1  # of the largest attention term, for cached tokens to be told from noise


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionPair:
    """What was predicted when a task was submitted, and what it took with the baton."""

    predicted_s: float
    actual_s: float

    @property
    def relative_error(self) -> float:
        """|predicted - actual| over actual."""
        return abs(self.predicted_s - self.actual_s) / self.actual_s


class _Correction:
    """A robust running estimate of log(actual / predicted).

    An exponential average whose gain starts small (few observations say little, the profile says something),
    whose steps are clipped (one stalled pass must not move it far) and whose range is bounded.
    """

    def __init__(self) -> None:
        self._log_scale = 0.0
        self._observations = 0
        self.scale = 1.0

    def observe(self, predicted_s: float, actual_s: float) -> None:
        self._observations += 1
        gain = max(_SCALE_GAIN, 1.0 / (self._observations + _PRIOR_OBSERVATIONS))
        step = math.log(actual_s / predicted_s) - self._log_scale
        self._log_scale += gain * min(max(step, -_MAX_STEP), _MAX_STEP)
        self._log_scale = min(max(self._log_scale, -_MAX_LOG_SCALE), _MAX_LOG_SCALE)
        self.scale = math.exp(self._log_scale)


class Predictor:
    """Predicted seconds of prefill passes, and of decode steps in colocated mode.

    `base_*` are the profile's numbers; `predict_*` are the same times `scale`. `recent` keeps the last pairs of
    prediction and outcome for metrics.
    """

    def __init__(self, coefficients: Coefficients) -> None:
        if len(coefficients) != 4 or not all(math.isfinite(value) and value >= 0 for value in coefficients):
            raise ValueError(f"coefficients are {coefficients}; accepted are four finite numbers from 0")
        if not any(coefficients):
            raise ValueError("all coefficients are 0; a pass takes some time, profile the engine first")
        self._coefficients = coefficients
        self._prefill = _Correction()
        self._decode = _Correction()
        self.recent: deque[PredictionPair] = deque(maxlen=_KEPT_PAIRS)

    @property
    def coefficients(self) -> Coefficients:
        """(a, b, c, d) of the profile, before correction."""
        return self._coefficients

    @property
    def scaled_coefficients(self) -> Coefficients:
        """(a, b, c, d) times `scale`: what a prediction uses now."""
        a, b, c, d = self._coefficients
        scale = self.scale
        return (a * scale, b * scale, c * scale, d * scale)

    @property
    def scale(self) -> float:
        """The online correction: actual over profiled time."""
        return self._prefill.scale

    @property
    def pass_s(self) -> float:
        """Profiled seconds that every pass pays once (`a`)."""
        return self._coefficients[0]

    def share_s(self, num_new: int, num_cached: int) -> float:
        """Profiled seconds that one request adds to a pass."""
        _, b, c, d = self._coefficients
        return num_new * (b + c * num_new + d * num_cached)

    def base_s(self, num_new: int, num_cached: int = 0) -> float:
        """Profiled seconds of one request alone; 0 when there is nothing to compute."""
        return self.pass_s + self.share_s(num_new, num_cached) if num_new > 0 else 0.0

    def base_batch_s(self, items: Iterable[tuple[int, int]]) -> float:
        """Profiled seconds of (new, cached) requests packed in one pass."""
        shares = [self.share_s(num_new, num_cached) for num_new, num_cached in items if num_new > 0]
        return self.pass_s + sum(shares) if shares else 0.0

    def predict_s(self, num_new: int, num_cached: int = 0) -> float:
        return self.scale * self.base_s(num_new, num_cached)

    def predict_batch_s(self, items: Iterable[tuple[int, int]]) -> float:
        return self.scale * self.base_batch_s(items)

    def predict_decode_s(self, num_sequences: int) -> float:
        """One decode step: a pass over one token a sequence, corrected from decode steps alone."""
        return self._decode.scale * self.base_s(num_sequences)

    def observe(
        self,
        items: Iterable[tuple[int, int]],
        executed_s: float,
        *,
        predicted_s: float | None = None,
        correct: bool = True,
    ) -> None:
        """A pass over these (new, cached) requests took `executed_s` with the baton.

        `predicted_s` is what was said beforehand, now's prediction when absent. `correct=False` only records.
        """
        base_s = self.base_batch_s(items)
        if base_s <= 0.0 or executed_s <= 0.0:
            return
        said_s = self.scale * base_s if predicted_s is None else predicted_s
        self.recent.append(PredictionPair(predicted_s=said_s, actual_s=executed_s))
        if correct:
            self._prefill.observe(base_s, executed_s)

    def observe_decode(self, num_sequences: int, executed_s: float, *, correct: bool = True) -> None:
        base_s = self.base_s(num_sequences)
        if correct and base_s > 0.0 and executed_s > 0.0:
            self._decode.observe(base_s, executed_s)


def remaining_s(predicted_s: float, work_done: float, executed_s: float) -> float:
    """Seconds a started task still needs with the baton.

    `work_done` is the fraction of its predicted work behind it and `executed_s` the time that took. What is left
    is priced at a blend of the predicted pace and the task's own, the latter trusted in proportion to the work it
    is measured on: (1 - w) * ((1 - w) * predicted + w * executed / w). No wall time enters.
    """
    left = 1.0 - min(max(work_done, 0.0), 1.0)
    return left * (left * predicted_s + executed_s) if work_done > 0.0 else predicted_s


def fit(profile: Profile) -> Predictor:
    """The predictor that fits a profile best in relative error, outliers weighed down.

    Without samples whose cached tokens weigh, `d` follows from `c`: attention over n new tokens covers
    n^2/2 pairs among themselves and n p pairs with the past, so d = 2 c.
    """
    new = np.array([sample.num_new for sample in profile.samples], dtype=np.float64)
    cached = np.array([sample.num_cached for sample in profile.samples], dtype=np.float64)
    seconds = np.array([sample.seconds for sample in profile.samples], dtype=np.float64)
    columns = [np.ones_like(new), new, new * new]
    knows_cached = bool(np.max(new * cached) > _LEAST_CACHED_SHARE * np.max(new * new))
    if knows_cached:
        columns.append(new * cached)
    relative = np.stack(columns, axis=1) / seconds[:, None]  # [samples, terms], target 1 for each
    weights = np.ones_like(seconds)
    for _ in range(_HUBER_ROUNDS):
        root = np.sqrt(weights)
        solution = _nonnegative_least_squares(relative * root[:, None], root)
        residuals = np.abs(relative @ solution - 1.0)
        bound = 1.345 * max(1.4826 * float(np.median(residuals)), 1e-6)
        weights = np.minimum(1.0, bound / np.maximum(residuals, 1e-12))
    a, b, c = (float(value) for value in solution[:3])
    d = float(solution[3]) if knows_cached else 2.0 * c
    return Predictor((a, b, c, d))


def _nonnegative_least_squares(
    matrix: NDArray[np.float64], target: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Least squares with every coefficient at least zero, exactly: with four terms all supports are tried."""
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    terms = matrix.shape[1]
    best, best_error = np.zeros(terms), math.inf
    for size in range(1, terms + 1):
        for support in combinations(range(terms), size):
            chosen = list(support)
            values, _, rank, _ = np.linalg.lstsq(matrix[:, chosen] / scale[chosen], target, rcond=1e-12)
            if rank < size or np.any(values < 0):
                continue
            error = float(np.sum((matrix[:, chosen] / scale[chosen] @ values - target) ** 2))
            if error < best_error * (1 - 1e-9):
                best = np.zeros(terms)
                best[chosen] = values / scale[chosen]
                best_error = error
    return best
