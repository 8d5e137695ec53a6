"""The live document: followed, and the last good one kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from flowprefill.errors import InvalidConfiguration
from flowprefill.metrics.engine import engine_metrics
from flowprefill.scheduling.settings import Ageing, SchedulerSettings
from flowprefill.server.live import LiveDocument, read_live_config, read_pod_config, scheduler_settings
from flowprefill_crd import LiveConfig
from support.pods import live_config


class Followed:
    """A live document in a mounted directory, as a ConfigMap is: files are symlinks through `..data`."""

    def __init__(self, tmp_path: Path, text: str) -> None:
        self.registry = CollectorRegistry()
        self.metrics = engine_metrics(
            self.registry, service="s", model_name="m", role="prefill", classes=["chat"]
        )
        self.path = tmp_path / "live"
        self.path.mkdir()
        self.version = 0
        self.seen: list[LiveConfig] = []
        self.replace(text)
        (self.path / "live.json").symlink_to("..data/live.json")
        self.document = LiveDocument(self.path, self.metrics.pod, on_change=self.seen.append)

    def replace(self, text: str) -> None:
        self.version += 1
        folder = self.path / f"..v{self.version}"
        folder.mkdir()
        (folder / "live.json").write_text(text)
        (self.path / "..next").symlink_to(folder.name)
        os.replace(self.path / "..next", self.path / "..data")

    def value(self, name: str) -> float | None:
        return self.registry.get_sample_value(name, {"service": "s", "model_name": "m", "role": "prefill"})


def test_a_new_document_is_taken_over(tmp_path: Path) -> None:
    followed = Followed(tmp_path, live_config().to_json())
    followed.document.look()
    assert followed.seen == []
    followed.replace(live_config(generation=2, policy="fcfs").to_json())
    followed.document.look()
    assert [live.generation for live in followed.seen] == [2]
    assert followed.document.current.policy == "fcfs"
    assert followed.value("flowprefill_live_generation") == 2


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"generation": 5, "sloClasses": []}',
        # Chunks as preemption points without a chunk size: each field is fine, together they are not.
        live_config(generation=5).to_json().replace('"operator"', '"chunk"'),
    ],
)
def test_a_bad_document_keeps_the_last_good_one_and_is_counted(tmp_path: Path, bad: str) -> None:
    followed = Followed(tmp_path, live_config().to_json())
    followed.replace(bad)
    followed.document.look()
    assert followed.document.current.generation == 1
    assert followed.seen == []
    assert followed.value("flowprefill_live_document_errors_total") == 1
    followed.document.look()  # the same bad document is not counted twice
    assert followed.value("flowprefill_live_document_errors_total") == 1
    followed.replace(live_config(generation=6).to_json())
    followed.document.look()
    assert followed.document.current.generation == 6


def test_a_document_that_disappears_keeps_the_last_good_one(tmp_path: Path) -> None:
    followed = Followed(tmp_path, live_config().to_json())
    (followed.path / "..data").unlink()
    followed.document.look()
    assert followed.document.current.generation == 1
    assert followed.value("flowprefill_live_document_errors_total") == 1


def test_a_bad_document_at_the_start_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "live.json").write_text("{}")
    with pytest.raises(InvalidConfiguration, match=r"live\.json"):
        read_live_config(tmp_path)
    with pytest.raises(InvalidConfiguration, match="cannot be read"):
        read_pod_config(tmp_path / "nothing.json")


def test_settings_follow_the_document() -> None:
    live = live_config(
        policy="moore-hodgson",
        batchTokenBudget=99,
        preemption="layer",
        chunkTokens=33,
        maxSuspended=3,
        recomputeSuspendedUnderPressure=False,
        queueLimit=77,
        ageing={"enabled": True, "factor": 6, "sharePercent": 10},
        onlineCorrection=False,
    )
    assert scheduler_settings(live) == SchedulerSettings(
        policy="moore-hodgson",
        preemption="layer",
        batch_token_budget=99,
        chunk_tokens=33,
        max_suspended=3,
        recompute_suspended=False,
        ageing=Ageing(factor=6.0, share=0.1),
        queue_limit=77,
        online_correction=False,
    )
    assert scheduler_settings(live_config(ageing={"enabled": False})).ageing is None
