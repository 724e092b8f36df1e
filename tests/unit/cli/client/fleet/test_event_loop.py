import asyncio
import threading

import pytest
from kinetoctl.client.fleet.host_client import in_thread
from support.waiting import scaled

TIMES = 100


def test_a_thread_that_ran_blocking_work_has_ended_when_its_result_is_there() -> None:
    async def left() -> set[threading.Thread]:
        before = set(threading.enumerate())
        found: set[threading.Thread] = set()
        for _ in range(TIMES):
            await in_thread(int)
            found |= set(threading.enumerate()) - before
        return found

    assert asyncio.run(left()) == set()


def test_a_thread_whose_work_failed_has_ended_too() -> None:
    async def failed() -> set[threading.Thread]:
        before = set(threading.enumerate())
        with pytest.raises(ZeroDivisionError):
            await in_thread(lambda: 1 // 0)
        return set(threading.enumerate()) - before

    assert asyncio.run(failed()) == set()


def test_who_is_cancelled_does_not_wait_for_the_blocking_work() -> None:
    async def cancelled() -> None:
        started, done = threading.Event(), threading.Event()

        def work() -> None:
            started.set()
            done.wait(scaled(30))

        task = asyncio.create_task(in_thread(work))
        while not started.is_set():
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not done.is_set()
        done.set()

    asyncio.run(cancelled())
