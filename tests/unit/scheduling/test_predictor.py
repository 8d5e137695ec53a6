"""Predictions: fitted, monotone, nothing for nothing, corrected by what happened."""

from __future__ import annotations

import math
import random
from datetime import date

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy.optimize import nnls

from flowprefill.scheduling.predictor import Predictor, fit, remaining_s
from flowprefill.scheduling.profile import Profile, ProfileSample, Provenance

TRUE = (0.0202, 52.4e-6, 3.02e-9, 6.04e-9)
LENGTHS = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384)


def profile(samples: list[tuple[int, int, float]]) -> Profile:
    return Profile(
        provenance=Provenance(
            model="m", engine="torch", device="cpu", dtype="float32", taken_on=date(2026, 1, 2)
        ),
        samples=tuple(ProfileSample(num_new=n, num_cached=p, seconds=s) for n, p, s in samples),
    )


def cost(n: int, p: int) -> float:
    a, b, c, d = TRUE
    return a + b * n + c * n * n + d * n * p


def test_a_profile_that_follows_the_formula_gives_its_coefficients() -> None:
    samples = [(n, p, cost(n, p)) for n in LENGTHS for p in (0, 1024, 8192)]
    assert fit(profile(samples)).coefficients == pytest.approx(TRUE, rel=1e-6)


def test_without_cached_samples_attention_to_the_past_costs_twice_the_square_term() -> None:
    a, b, c, d = fit(profile([(n, 0, cost(n, 0)) for n in LENGTHS])).coefficients
    assert (a, b, c) == pytest.approx(TRUE[:3], rel=1e-6)
    assert d == 2 * c


def test_one_stalled_measurement_hardly_moves_the_fit() -> None:
    samples = [(n, 0, cost(n, 0) * (5.0 if n == 1024 else 1.0)) for n in LENGTHS]
    predictor = fit(profile(samples))
    for n in LENGTHS:
        assert predictor.predict_s(n) == pytest.approx(cost(n, 0), rel=0.05)


def test_a_noisy_fit_stays_within_the_noise_at_every_length() -> None:
    rng = random.Random(3)
    samples = [(n, p, cost(n, p) * rng.lognormvariate(0, 0.1)) for n in LENGTHS for p in (0, 2048)] * 2
    predictor = fit(profile(samples))
    for n in LENGTHS:
        assert predictor.predict_s(n) == pytest.approx(cost(n, 0), rel=0.15)


def test_the_fit_is_the_nonnegative_least_squares_solution_of_the_relative_errors() -> None:
    """Samples that bend downwards want a negative square term; scipy's solver says what is best without one."""
    import numpy as np

    samples = [(n, 0, 0.01 + 1e-4 * n**0.8) for n in LENGTHS]
    n = np.array([s[0] for s in samples], dtype=float)
    t = np.array([s[2] for s in samples])
    reference, _ = nnls(np.stack([np.ones_like(n), n, n * n], axis=1) / t[:, None], np.ones_like(t))
    a, b, c, _ = fit(profile(samples)).coefficients
    # The fit weighs outliers down on top, so the two agree closely, not exactly.
    assert c == 0.0 == reference[2]
    for length in LENGTHS:
        assert a + b * length == pytest.approx(reference[0] + reference[1] * length, rel=0.15)


@given(
    st.lists(
        st.tuples(st.integers(1, 20_000), st.integers(0, 20_000), st.floats(1e-4, 10.0)),
        min_size=1,
        max_size=12,
    )
)
def test_any_profile_gives_predictions_that_never_fall_with_tokens(
    samples: list[tuple[int, int, float]],
) -> None:
    predictor = fit(profile(samples))
    assert all(value >= 0 for value in predictor.coefficients)
    previous = 0.0
    for n in (0, 1, 10, 100, 1000, 10_000):
        assert predictor.predict_s(n, 100) >= previous
        assert predictor.predict_s(n, 200) >= predictor.predict_s(n, 100)
        previous = predictor.predict_s(n, 100)


def test_nothing_to_compute_takes_no_time() -> None:
    predictor = Predictor(TRUE)
    assert predictor.predict_s(0) == 0.0
    assert predictor.predict_s(0, 5000) == 0.0
    assert predictor.predict_batch_s([]) == 0.0
    assert predictor.predict_batch_s([(0, 10), (0, 0)]) == 0.0


def test_a_batch_costs_one_pass_and_attention_within_each_request() -> None:
    predictor = Predictor((0.02, 1e-4, 1e-8, 2e-8))
    # By hand: 0.02 + (100e-4 + 1e4 * 1e-8 + 100 * 1000 * 2e-8) + (200e-4 + 4e4 * 1e-8)
    assert predictor.predict_batch_s([(100, 1000), (200, 0)]) == pytest.approx(0.02 + 0.0121 + 0.0204)
    assert predictor.predict_batch_s([(4000, 0)] * 2) < predictor.predict_s(8000), "not one long prompt"


def test_correction_approaches_the_true_ratio_and_moves_all_predictions_alike() -> None:
    predictor = Predictor(TRUE)
    before = predictor.predict_s(5000) / predictor.predict_s(100)
    for _ in range(100):
        predictor.observe([(1000, 0)], 1.5 * cost(1000, 0))
    assert predictor.scale == pytest.approx(1.5, rel=0.01)
    assert predictor.predict_s(5000) / predictor.predict_s(100) == pytest.approx(before)
    assert predictor.coefficients == TRUE
    assert predictor.scaled_coefficients == pytest.approx([1.5 * value for value in TRUE], rel=0.01)


def test_the_first_observation_moves_the_scale_by_a_fifth_of_what_it_says() -> None:
    predictor = Predictor(TRUE)
    predictor.observe([(1000, 0)], 1.5 * cost(1000, 0))
    assert math.log(predictor.scale) == pytest.approx(math.log(1.5) / 5)


def test_one_stalled_pass_among_many_moves_the_scale_little() -> None:
    predictor = Predictor(TRUE)
    for _ in range(50):
        predictor.observe([(1000, 0)], cost(1000, 0))
    predictor.observe([(1000, 0)], 1000 * cost(1000, 0))
    assert predictor.scale < 1.08


def test_observations_of_nothing_change_nothing() -> None:
    predictor = Predictor(TRUE)
    predictor.observe([], 1.0)
    predictor.observe([(0, 10)], 1.0)
    predictor.observe([(10, 0)], 0.0)
    assert predictor.scale == 1.0
    assert not predictor.recent


def test_pairs_of_prediction_and_outcome_are_kept_for_metrics() -> None:
    predictor = Predictor(TRUE)
    predictor.observe([(1000, 0)], 0.1, predicted_s=0.08, correct=False)
    (pair,) = predictor.recent
    assert (pair.predicted_s, pair.actual_s) == (0.08, 0.1)
    assert pair.relative_error == pytest.approx(0.2)
    assert predictor.scale == 1.0


def test_decode_steps_have_a_correction_of_their_own() -> None:
    predictor = Predictor(TRUE)
    for _ in range(100):
        predictor.observe_decode(8, 3 * predictor.base_s(8))
    assert predictor.scale == 1.0
    assert predictor.predict_decode_s(8) == pytest.approx(3 * predictor.base_s(8), rel=0.01)


@pytest.mark.parametrize(
    ("work_done", "executed_s", "expected"),
    [
        (0.0, 0.0, 10.0),
        (0.0, 3.0, 10.0),  # nothing is behind it, whatever the clock says
        (0.5, 5.0, 5.0),  # as predicted
        (0.5, 10.0, 7.5),  # half as fast as predicted: between 5 (prediction) and 10 (its own pace)
        (0.9, 18.0, 1.9),  # twice as slow, nearly done: its own pace says 2, the prediction 1
        (1.0, 20.0, 0.0),
    ],
)
def test_remaining_time_follows_the_work_done(work_done: float, executed_s: float, expected: float) -> None:
    assert remaining_s(10.0, work_done, executed_s) == pytest.approx(expected)


def test_a_profile_survives_its_json() -> None:
    original = profile([(16, 0, 0.1), (32, 16, 0.2)])
    assert Profile.from_json(original.to_json()) == original


@pytest.mark.parametrize("bad", ['{"samples": []}', '{"provenance": {}, "samples": [{"num_new": 0}]}', "[]"])
def test_a_document_that_is_no_profile_is_refused(bad: str) -> None:
    with pytest.raises(ValidationError):
        Profile.from_json(bad)


@pytest.mark.parametrize("bad", [(-1.0, 0, 0, 0), (0.0, 0.0, 0.0, 0.0), (math.nan, 1.0, 0.0, 0.0)])
def test_impossible_coefficients_are_refused(bad: tuple[float, float, float, float]) -> None:
    with pytest.raises(ValueError, match="coefficients are"):
        Predictor(bad)
