"""Tasks in the background: failures are logged, and a stop ends all of them."""

import asyncio
import logging

import pytest
from kinetod.base.background_tasks import BackgroundTasks

log = logging.getLogger(__name__)


async def fails() -> None:
    raise ValueError("not today")


def test_a_failure_is_logged_with_its_exception(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        tasks = BackgroundTasks(log, "the work failed")
        tasks.begin(fails())
        await tasks.stop(grace_s=5)

    asyncio.run(run())
    (record,) = caplog.records
    assert record.message == "the work failed"
    assert record.exc_info is not None and isinstance(record.exc_info[1], ValueError)


def test_a_stop_gives_time_first_and_ends_what_still_runs(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> list[str]:
        ended: list[str] = []

        async def waits_for(event: asyncio.Event, name: str) -> None:
            try:
                await event.wait()
            except asyncio.CancelledError:
                ended.append(f"{name} was cancelled")
                raise
            ended.append(f"{name} is done")

        tasks, happened = BackgroundTasks(log, "the work failed"), asyncio.Event()
        tasks.begin(waits_for(happened, "first"))
        tasks.begin(waits_for(asyncio.Event(), "second"))
        asyncio.get_running_loop().call_soon(happened.set)
        await tasks.stop(grace_s=0.2)
        return ended

    assert asyncio.run(run()) == ["first is done", "second was cancelled"]
    assert not caplog.records
