"""The predictor's profile: measured, computed, or read from a file that must fit."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from flowprefill.engines.simulated.presets import preset
from flowprefill.errors import InvalidConfiguration
from flowprefill.scheduling.predictor import fit
from flowprefill.scheduling.profile import Profile
from flowprefill.server.loading import assemble
from flowprefill.server.profiling import SIZES, measure_profile, simulated_profile
from support.pods import WordTokenizer, pod_config, simulated_engine


def test_a_simulated_engines_profile_is_its_cost_model() -> None:
    engine = simulated_engine()
    predictor = fit(simulated_profile(engine))
    for num_new, num_cached in ((30, 0), (700, 0), (3000, 0), (100, 900)):
        expected_s = engine.cost.prefill_s([(num_new, num_cached)])
        assert predictor.predict_s(num_new, num_cached) == pytest.approx(expected_s, rel=0.01)


def test_measuring_covers_what_fits_the_engine_and_leaves_nothing_cached() -> None:
    engine = simulated_engine(cost=preset("tiny").scaled(0.01), num_kv_blocks=64, max_model_len=1000)
    profile = measure_profile(engine)
    plain = {s.num_new for s in profile.samples if s.num_cached == 0}
    assert plain == {size for size in SIZES if size <= 1000}
    assert {(s.num_new, s.num_cached) for s in profile.samples if s.num_cached} == {(16, 512)}
    assert profile.provenance.engine == "simulated"


def test_measuring_stops_at_its_budget_with_at_least_one_sample() -> None:
    engine = simulated_engine(cost=preset("tiny").scaled(0.01))
    profile = measure_profile(engine, budget_s=0.0)
    assert {s.num_new for s in profile.samples} == {SIZES[0]}


def test_an_engine_smaller_than_every_size_is_measured_at_its_own() -> None:
    engine = simulated_engine(cost=preset("tiny").scaled(0.01), num_kv_blocks=1, max_model_len=16)
    assert {s.num_new for s in measure_profile(engine).samples} == {16}


def with_profile(tmp_path: Path, text: str | None) -> Profile | None:
    file = tmp_path / "profile.json"
    if text is not None:
        file.write_text(text)
    config = pod_config(predictor={"profileFile": str(file)})
    return assemble(config, "prefill", simulated_engine(), WordTokenizer(), began_s=0.0).profile


def test_a_profile_file_is_used_instead_of_measuring(tmp_path: Path) -> None:
    profile = simulated_profile(simulated_engine(cost=preset("tiny").scaled(7.0)))
    assert with_profile(tmp_path, profile.to_json()) == profile


def test_a_profile_of_another_model_is_used_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = simulated_profile(simulated_engine(revision="other")).to_json()
    with caplog.at_level(logging.WARNING):
        with_profile(tmp_path, text)
    assert "the profile was taken elsewhere" in caplog.messages


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        ("{", "not valid"),
        ("{}", "provenance"),
        (simulated_profile(simulated_engine()).to_json().replace('"simulated"', '"torch"'), "'torch'"),
    ],
)
def test_a_profile_that_does_not_fit_is_a_start_up_error(
    tmp_path: Path, text: str | None, words: str
) -> None:
    with pytest.raises(InvalidConfiguration, match=words):
        with_profile(tmp_path, text)


def test_a_decode_pod_needs_no_profile_and_is_warm() -> None:
    engine = simulated_engine()
    loaded = assemble(pod_config(), "decode", engine, WordTokenizer(), began_s=0.0)
    assert loaded.profile is None
    assert loaded.predictor is None


def test_a_colocated_pod_takes_requests_up_to_half_its_kv() -> None:
    engine = simulated_engine(num_kv_blocks=100, max_model_len=1600)
    assert (
        assemble(pod_config(), "colocated", engine, WordTokenizer(), began_s=0.0).texts.max_model_len == 800
    )
    assert assemble(pod_config(), "prefill", engine, WordTokenizer(), began_s=0.0).texts.max_model_len == 1600
