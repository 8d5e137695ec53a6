"""`flowprefill profile`: a profile that fits a termination message and still predicts, or the reason why there is none."""

from __future__ import annotations

import datetime
import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowprefill.errors import InvalidConfiguration
from flowprefill.scheduling.predictor import fit
from flowprefill.scheduling.profile import Profile, ProfileSample, Provenance
from flowprefill.server.loading import assemble
from flowprefill.server.profile_job import LIMIT_BYTES, compact_json, run
from flowprefill.server.profiling import simulated_profile
from support.pods import WordTokenizer, pod_config, simulated_engine

TAKEN = Provenance(
    model="org/name@" + "0" * 40,
    engine="torch",
    device="cuda:0",
    dtype="bfloat16",
    tensor_parallel_size=8,
    taken_on=datetime.date(2026, 11, 30),
)


def of(num_samples: int) -> Profile:
    samples = [ProfileSample(num_new=i + 1, seconds=(i + 1) / 7000) for i in range(num_samples)]
    return Profile(provenance=TAKEN, samples=tuple(samples))


@given(st.integers(1, 2000))
def test_it_is_a_profile_within_the_limit_that_holds_as_many_samples_as_fit(num_samples: int) -> None:
    profile = of(num_samples)
    text = compact_json(profile)
    assert len(text.encode()) <= LIMIT_BYTES
    read = Profile.from_json(text)
    assert read.provenance == profile.provenance
    kept = [sample.num_new for sample in read.samples]
    assert kept == sorted(set(kept)), "in order, none twice"
    if len(kept) < num_samples:
        assert (kept[0], kept[-1]) == (1, num_samples), "the shortest and the longest stay"
        gaps = {later - earlier for earlier, later in pairwise(kept)}
        assert max(gaps) - min(gaps) <= 1, "thinned evenly"
        # Evenly chosen samples have texts of other lengths for each number of them, so the last few bytes may stay free.
        assert len(text.encode()) > 0.95 * LIMIT_BYTES, "the room is used"


def test_seconds_keep_five_digits() -> None:
    profile = Profile(provenance=TAKEN, samples=(ProfileSample(num_new=16, seconds=0.000123456789),))
    assert Profile.from_json(compact_json(profile)).samples[0].seconds == 0.00012346


def test_a_profile_that_does_not_fit_at_all_is_refused() -> None:
    endless = TAKEN.model_copy(update={"model": "m" * 5000})
    with pytest.raises(InvalidConfiguration, match="more than 4096 bytes"):
        compact_json(of(3).model_copy(update={"provenance": endless}))


def test_what_the_command_writes_is_what_a_prefill_pod_starts_from(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(pod_config(engine={"type": "simulated", "args": ["--cost", "tiny"]}).to_json())
    output = tmp_path / "termination-log"
    output.touch()
    assert run(config, output) == 0
    assert output.stat().st_size <= LIMIT_BYTES
    started = pod_config(predictor={"profileFile": str(output)})
    loaded = assemble(started, "prefill", simulated_engine(), WordTokenizer(), began_s=0.0)
    expected = fit(simulated_profile(simulated_engine()))
    for num_new in (30, 700, 3000):
        assert loaded.needed_predictor.predict_s(num_new, 0) == pytest.approx(
            expected.predict_s(num_new, 0), rel=0.01
        )


def test_without_a_file_the_profile_goes_to_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text(pod_config().to_json())
    assert run(config, None) == 0
    assert json.loads(capsys.readouterr().out)["provenance"]["engine"] == "simulated"


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ("{", "config.json"),
        (None, "config.json cannot be read"),
        (pod_config(engine={"type": "simulated", "args": ["--cost", "none"]}).to_json(), "engine.args"),
        (pod_config(engine={"type": "simulated", "args": ["--" + "x" * 9000]}).to_json(), "engine.args"),
    ],
)
def test_a_failure_leaves_its_reason_and_status_1(tmp_path: Path, document: str | None, told: str) -> None:
    config, output = tmp_path / "config.json", tmp_path / "termination-log"
    if document is not None:
        config.write_text(document)
    assert run(config, output) == 1
    reason = output.read_text()
    assert told in reason
    assert len(reason.encode()) <= LIMIT_BYTES
    assert not reason.startswith("{")


def test_an_error_that_nobody_expected_leaves_its_kind_and_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, output = tmp_path / "config.json", tmp_path / "termination-log"
    config.write_text(pod_config().to_json())

    def broken(config: object) -> None:
        raise MemoryError("no room for 16 GiB")

    monkeypatch.setattr("flowprefill.server.profile_job.load_engine", broken)
    assert run(config, output) == 1
    assert output.read_text() == "MemoryError: no room for 16 GiB"
