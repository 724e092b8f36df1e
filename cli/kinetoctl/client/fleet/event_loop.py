"""Runs calls to many hosts on an event loop, with the same Ctrl-C handling as the rest of kinetoctl."""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kinetoctl.client.fleet.fleet_run import FleetRun

T = TypeVar("T")


def run(work: Callable[[], Awaitable[T]]) -> T:
    """Runs the work to its end, in a new thread if this thread has a running event loop."""

    async def awaited() -> T:
        return await work()

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(awaited())
    with ThreadPoolExecutor(1, thread_name_prefix="fleet") as pool:
        return pool.submit(asyncio.run, awaited()).result()


async def in_thread(work: Callable[[], T]) -> T:
    """Runs work that blocks, in a thread of its own, ended on return; being cancelled does not wait for it."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="fleet")
    future = asyncio.get_running_loop().run_in_executor(pool, work)
    try:
        return await future
    finally:
        pool.shutdown(wait=not future.cancelled())


def run_fleet(fleet_run: FleetRun, *steps: Callable[[], Awaitable[None]]) -> None:
    """Runs the steps of a capture, one after the other. Raises KeyboardInterrupt on the second Ctrl-C.

    The first one cancels the capture. If Ctrl-C is ignored, or handled by the program, that is not changed.
    """
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    is_ours = is_ours and threading.current_thread() is threading.main_thread()

    async def work() -> None:
        with _interrupts(fleet_run) if is_ours else contextlib.nullcontext():
            async with fleet_run:
                for step in steps:
                    await step()

    run(work)


@contextlib.contextmanager
def _interrupts(fleet_run: FleetRun) -> Iterator[None]:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    left = False

    def interrupted() -> None:
        nonlocal left
        left = fleet_run.fleet.interrupted
        if left:
            task.cancel()
        else:
            fleet_run.interrupt()

    loop.add_signal_handler(signal.SIGINT, interrupted)
    try:
        yield
    except asyncio.CancelledError:
        if left:
            raise KeyboardInterrupt from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.default_int_handler)
