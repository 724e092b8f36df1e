import asyncio
import errno
import logging
import os
import threading
from pathlib import Path
from typing import Any, cast

import pytest
from kinetod.agents.link import LinkServer
from kinetod.captures.result.decode_pool import WorkerPool
from kinetod.store.capture_store import Store
from kinetod.telemetry.health import Health, HealthReport

HEALTHY = HealthReport()


class Parts:
    """Stands for the link, the store and the workers."""

    def __init__(self, state_dir: Path) -> None:
        self.link_problems = list[str]()
        self.state_dir = state_dir
        self.captures_dir = state_dir
        self.workers_start = True
        self.write_error: int | None = None
        self.writes = 0
        self.go_on = threading.Event()
        self.go_on.set()

    def mend(self) -> list[str]:
        return self.link_problems

    async def tend(self) -> bool:
        return self.workers_start

    def check_writable(self) -> None:
        self.writes += 1
        self.go_on.wait(20)
        if self.write_error is not None:
            raise OSError(self.write_error, os.strerror(self.write_error))

    def health(self, **options: Any) -> Health:
        return Health(cast(LinkServer, self), cast(Store, self), cast(WorkerPool, self), **options)


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    return Parts(tmp_path)


def test_what_works_is_healthy(parts: Parts) -> None:
    assert asyncio.run(parts.health().look()) == HEALTHY
    assert str(HEALTHY) == ""


def test_every_problem_is_named(parts: Parts) -> None:
    parts.link_problems = ["agents cannot connect: the socket /run/agent.sock is gone"]
    parts.workers_start, parts.write_error = False, errno.EROFS
    report = asyncio.run(parts.health().look())
    assert str(report) == (
        "unhealthy: agents cannot connect: the socket /run/agent.sock is gone; decode workers do not start; "
        f"the store {parts.state_dir} cannot be written: Read-only file system"
    )


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_no_reason_for_a_restart(parts: Parts, number: int) -> None:
    parts.write_error = number
    report = asyncio.run(parts.health().look())
    assert (report.problems, str(report)) == ((), f"the disk of {parts.state_dir} is full")


def test_the_store_is_written_to_seldom_unless_something_is_wrong(parts: Parts) -> None:
    async def looks() -> list[int]:
        health, writes = parts.health(probe_period_s=3600), []
        for error in (None, None, None):
            parts.write_error = error
            await health.look()
            writes.append(parts.writes)
        return writes

    assert asyncio.run(looks()) == [1, 1, 1]
    parts.write_error, parts.writes = errno.EIO, 0

    async def until_mended() -> list[bool]:
        health = parts.health(probe_period_s=3600)
        seen = [await health.look() == HEALTHY, await health.look() == HEALTHY]
        parts.write_error = None
        return [*seen, await health.look() == HEALTHY]

    assert asyncio.run(until_mended()) == [False, False, True]
    assert parts.writes == 3


def test_a_disk_that_hangs_is_a_problem_and_holds_one_thread(parts: Parts, caplog: pytest.LogCaptureFixture) -> None:
    async def looks() -> list[HealthReport]:
        health = parts.health(probe_deadline_s=0.01)
        parts.go_on.clear()
        hanging = [await health.look(), await health.look()]
        parts.go_on.set()
        while (report := await health.look()).problems:
            await asyncio.sleep(0)
        return [*hanging, report]

    with caplog.at_level(logging.INFO, "kinetod.telemetry.health"):
        first, second, last = asyncio.run(looks())
    problem = f"the disk of {parts.state_dir} is not responding"
    assert first.problems == second.problems == (problem,)
    assert (last, parts.writes) == (HEALTHY, 1)
    assert caplog.messages == [problem, "everything works again"]  # not at every look
