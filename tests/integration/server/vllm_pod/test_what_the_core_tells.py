"""What an engine core tells reaches metrics, state stream and history; the live document reaches the core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowprefill.request import Request
from flowprefill.scheduling.actions import Action, Finish, Preempt, Submit, Task, TaskItem
from flowprefill.scheduling.events import Arrival, Completed, Event, Parked
from flowprefill.scheduling.snapshot import TaskSnapshot
from flowprefill.server.vllm.channel import Decided, Seen, Started
from support.pods import until, until_async
from support.vllm_core import SPEC, profile, snapshot
from support.vllm_pods import fake_pod

STARTED = Started(spec=SPEC, profile=profile())


def request(request_id: str, num_tokens: int, slo_class: str) -> Request:
    return Request(
        request_id=request_id,
        num_prompt_tokens=num_tokens,
        arrival_s=10.0,
        deadline_s=11.0,
        ttft_slo_s=1.0,
        slo_class=slo_class,
    )


def task(task_id: int, request_id: str, num_tokens: int, start: int = 0) -> Task:
    item = TaskItem(request_id=request_id, start=start, num_tokens=num_tokens, block_ids=(), completes=True)
    return Task(task_id=task_id, items=(item,), predicted_s=0.5)


def decided(event: Event, *actions: Action, now_s: float) -> Decided:
    return Decided(event=event, actions=actions, now_s=now_s, round_s=0.001)


LONG, SHORT = task(1, "long", 1000), task(2, "short", 48, start=16)

PREEMPTED = (
    decided(Arrival(requests=(request("long", 1000, "document"),)), Submit(task=LONG), now_s=10.0),
    decided(Arrival(requests=(request("short", 64, "chat"),)), Preempt(task_id=1, ticket=1), now_s=10.1),
    decided(Parked(task_id=1, ticket=1), Submit(task=SHORT), now_s=10.125),
    decided(
        Completed(task_id=2, executed_s=0.25), Finish(request_id="short", outcome="completed"), now_s=10.4
    ),
)
"""A long prompt that a short one interrupts, 25 ms after it was asked for; 16 of the short one's tokens are cached."""


async def test_a_preemption_is_in_metrics_and_history_as_of_any_other_pod(tmp_path: Path) -> None:
    async with fake_pod(tmp_path, "prefill") as fake:
        fake.tell(STARTED, *PREEMPTED)
        await fake.until_metric("flowprefill_prefill_preemptions_total", 1)
        await fake.until_metric("flowprefill_scheduler_rounds_total", 1, event="completion")
        assert await fake.metric("flowprefill_scheduler_rounds_total", event="arrival") == 2
        assert await fake.metric("flowprefill_scheduler_round_seconds_count") == 4
        blocking_s = await fake.metric("flowprefill_preemption_blocking_seconds_sum")
        assert abs(blocking_s - 0.025) < 1e-9
        assert await fake.metric("flowprefill_prefill_seconds_sum") == 0.25
        assert await fake.metric("flowprefill_prompt_tokens_total") == 64
        assert await fake.metric("flowprefill_kv_cached_tokens_total") == 16
        assert await fake.metric("flowprefill_predictor_info", model="model@0", gpu="cpu") == 1
        assert await fake.metric("flowprefill_queue_requests") == 0
        history = (await fake.admin.get("/v1/history")).json()
        assert [done["items"] for done in history["tasks"]] == [[["short", 48, 16]]]
        (preemption,) = history["preemptions"]
        assert preemption["task_id"] == 1


async def test_requests_that_wait_are_in_the_queue_by_their_class(tmp_path: Path) -> None:
    async with fake_pod(tmp_path, "prefill") as fake:
        fake.tell(
            STARTED,
            decided(Arrival(requests=(request("a", 10, "chat"), request("b", 10, "nobody's"))), now_s=10.0),
        )
        await fake.until_metric("flowprefill_queue_requests", 1, slo_class="chat")
        assert await fake.metric("flowprefill_queue_requests", slo_class="other") == 1


async def test_the_state_stream_tells_what_the_scheduler_sees(tmp_path: Path) -> None:
    def described(task_id: int, deadline_s: float) -> TaskSnapshot:
        return TaskSnapshot(
            task_id=task_id,
            kind="prefill",
            num_requests=1,
            num_tokens=100 * task_id,
            remaining_s=0.5,
            deadline_s=deadline_s,
            feasible=True,
        )

    seen = snapshot(
        now_s=100.0,
        running=described(2, 100.25),
        suspended=(described(1, 107.0),),
        waiting=3,
        waiting_s=1.5,
        waiting_tokens=700,
        kv_blocks_free=400,
    )
    async with fake_pod(tmp_path, "prefill") as fake:
        fake.tell(STARTED, Seen(snapshot=seen, cached_prefixes=(11, 12)))
        await fake.until_ready()

        async def told() -> bool:
            return bool((await fake.state())["waiting"] == 3)

        await until_async(told, what="the state")
        state = await fake.state()
        assert state["running"] == {
            "num_tokens": 200,
            "remaining_s": 0.5,
            "deadline_in_s": 0.25,
            "feasible": True,
        }
        assert [task["deadline_in_s"] for task in state["suspended"]] == [7.0]
        assert (state["waiting_s"], state["waiting_tokens"]) == (1.5, 700)
        assert (state["kv_blocks"], state["kv_blocks_free"]) == (512, 400)
        assert state["cached_prefixes"] == [11, 12]
        assert state["prediction"] == list(seen.prediction)
        assert await fake.metric("flowprefill_kv_blocks_free") == 400


async def test_a_decode_pod_tells_of_stock_vllms_load(tmp_path: Path) -> None:
    async with fake_pod(tmp_path, "decode") as fake:
        await fake.until_ready()
        for name, value in (("in_flight", "3"), ("generated", "40"), ("received", "96")):
            fake.switch(name, value)
        await fake.until_metric("flowprefill_decode_sequences", 3, state="active")
        fake.switch("generated", "42")
        await fake.until_metric("flowprefill_generated_tokens_total", 42)
        assert await fake.metric("flowprefill_kv_transfer_received_tokens_total") == 96


async def test_a_live_document_reaches_the_core_and_a_bad_one_changes_nothing(tmp_path: Path) -> None:
    async with fake_pod(tmp_path, "prefill") as fake:
        fake.tell(STARTED)
        await fake.until_ready()

        def heard() -> list[str]:
            path = fake.switches / "heard"
            return path.read_text().split() if path.exists() else []

        assert heard() == [], "it started with the document of its start"
        fake.set_live(generation=2, policy="edf")
        await until(lambda: heard() == ["2"], what="the core heard generation 2")
        assert (await fake.admin.get("/v1/config")).json()["generation"] == 2
        fake.set_live(generation=3, preemption="chunk", chunkTokens=256)
        await until(lambda: heard() == ["2", "3"], what="the core heard generation 3")
        fake.live_path.write_text("{}")
        await fake.until_metric("flowprefill_live_document_errors_total", 1)
        assert heard() == ["2", "3"]


async def test_a_core_that_comes_anew_has_nothing_waiting(tmp_path: Path) -> None:
    async with fake_pod(tmp_path, "prefill") as fake:
        fake.tell(STARTED, decided(Arrival(requests=(request("a", 10, "chat"),)), now_s=10.0))
        await fake.until_metric("flowprefill_queue_requests", 1, slo_class="chat")
        fake.switch("restart")
        await fake.until_metric("flowprefill_queue_requests", 0, slo_class="chat")


def _is_flag(argv: list[Any], start: str) -> bool:
    return any(str(word).startswith(start) for word in argv)


def _exists(path: str) -> bool:
    return Path(path).exists()


async def test_the_child_has_the_flags_and_the_environment_of_the_service(tmp_path: Path) -> None:
    async with fake_pod(tmp_path, "prefill", args=("--seed", "7")) as fake:
        fake.tell(STARTED)
        await fake.until_ready()
        argv, environment = fake.started["argv"], fake.started["environment"]
        assert argv[:2] == ["serve", "/models/m"]
        assert argv[-2:] == ["--seed", "7"]
        assert f"--port={fake.pod.api_port}" in argv
        assert _is_flag(argv, "--scheduler-cls=flowprefill.")
        assert environment["HF_HUB_OFFLINE"] == "1"
        assert not [word for word in argv if environment["FLOWPREFILL_CHANNEL_KEY"] in word]
        assert _exists(environment["VLLM_LOGGING_CONFIG_PATH"])
    assert not _exists(environment["VLLM_LOGGING_CONFIG_PATH"])
