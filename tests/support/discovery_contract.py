"""What a proxy may rely on, wherever its pods are told. Modules that import these tests give the fixture `source`."""

from __future__ import annotations

from support.discovery import Source, watching
from support.slices import pod

P0, P1, D0 = pod("p0"), pod("p1"), pod("d0", "decode")


async def test_the_first_report_comes_without_any_pod(source: Source) -> None:
    async with watching(source.discovery) as seen:
        await seen.until(lambda: seen.reports == [()], "an empty report")


async def test_the_first_report_is_what_is_known_already(source: Source) -> None:
    await source.publish([P0, D0])
    async with watching(source.discovery) as seen:
        await seen.until(lambda: seen.reports, "a report")
        assert set(seen.reports[0]) == {P0, D0}


async def test_pods_that_come_change_and_go_are_reported(source: Source) -> None:
    async with watching(source.discovery) as seen:
        await seen.until(lambda: seen.reports, "the first report")
        await source.publish([P0, D0])
        await seen.until(lambda: set(seen.reports[-1]) == {P0, D0}, "two pods")
        leaving = P0.model_copy(update={"terminating": True})
        await source.publish([leaving, P1, D0])
        await seen.until(lambda: set(seen.reports[-1]) == {leaving, P1, D0}, "a third pod")
        await source.publish([P1.model_copy(update={"ready": False})])
        await seen.until_names({"p1"})
        assert not seen.endpoint("p1").ready
        await source.publish([])
        await seen.until_names(())


async def test_a_source_that_is_away_leaves_the_last_endpoints_and_tells_later_changes(
    source: Source,
) -> None:
    await source.publish([P0, D0])
    async with watching(source.discovery) as seen:
        await seen.until_names({"p0", "d0"})
        await source.break_off()
        await source.mend()
        await source.publish([P1, D0])
        await seen.until_names({"p1", "d0"})
        assert () not in seen.reports, "the pods were never gone"


async def test_a_watch_begins_while_the_source_is_away(source: Source) -> None:
    await source.publish([P0])
    await source.break_off()
    async with watching(source.discovery) as seen:
        await seen.until(lambda: seen.reports == [()], "an empty report")
        await source.mend()
        await seen.until_names({"p0"})
