"""One GPU's sampling in a thread of its own, and other blocking work of kinetod-counters.

Threads are daemon threads: one that hangs in the driver keeps the process neither from serving others nor from ending.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from kinetod.counters.interface import CounterBackend, CounterPlan, WantedCounters
from kinetod.counters.sample_rings import RingWriter

log = logging.getLogger(__name__)

T = TypeVar("T")


async def in_own_thread(function: Callable[[], T]) -> T:
    """Awaits what the function returns or raises; a caller that gives up leaves the thread behind."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]  # it is a T where there is no error

    def work() -> None:
        result, error = None, None
        try:
            result = function()
        except Exception as exc:  # noqa: BLE001  # whoever awaits gets it
            error = exc
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name="counters work", daemon=True).start()
    return await done


class SamplingJob:
    """Starts a GPU's sampling and decodes it. One thread does all of it; the ring and the counters are its own."""

    def __init__(
        self, backend: CounterBackend, uuid: str, wanted: WantedCounters, interval_ns: int, most_ns: int
    ) -> None:
        self._backend = backend
        self._uuid = uuid
        self._wanted = wanted
        self._interval_ns = interval_ns
        self._most_ns = most_ns
        self._ring: RingWriter | None = None
        self._given_up = False
        self._lock = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[CounterPlan] = self._loop.create_future()
        self.ended = asyncio.Event()

    async def start(self) -> CounterPlan:
        """Returns what is sampled. Raises CounterError and what the backend raises; may be cancelled."""
        threading.Thread(target=self._work, name=f"counters {self._uuid[:12]}", daemon=True).start()
        return await self._started

    def descriptor(self) -> int:
        """The memfd of the ring, until `release`."""
        assert self._ring is not None
        return self._ring.descriptor

    def stop(self) -> None:
        """Ends the sampling, also one that has not begun yet; `ended` says when. Does not block."""
        with self._lock:
            self._given_up = True
            if self._ring is not None:
                self._ring.stop()

    def release(self) -> None:
        """Lets go of the ring of a job that has ended."""
        with self._lock:
            ring, self._ring = self._ring, None
        if ring is not None:
            ring.close()

    def _make_ring(self, metrics: int) -> RingWriter:
        ring = RingWriter(metrics, most_ns=self._most_ns)
        with self._lock:
            if self._ring is not None:  # of an attempt that failed
                self._ring.close()
            self._ring = ring
            if self._given_up:
                ring.stop()
        return ring

    def _work(self) -> None:
        try:
            sampling = self._backend.start(self._uuid, self._wanted, self._interval_ns, self._make_ring)
            try:
                self._tell(lambda: self._settle(sampling.plan))
                sampling.run()
            finally:
                sampling.close()
        except Exception as exc:  # noqa: BLE001  # whoever awaits gets it
            error = exc
            if not self._tell(lambda: self._settle(error)):
                log.warning("the sampling of %s ended after its client: %s", self._uuid, exc)
        finally:
            self._tell(self.ended.set)

    def _settle(self, outcome: CounterPlan | Exception) -> None:
        """The beginning is over, unless it was given up."""
        if self._started.done():
            return
        if isinstance(outcome, Exception):
            self._started.set_exception(outcome)
        else:
            self._started.set_result(outcome)

    def _tell(self, action: Callable[[], object]) -> bool:
        try:
            self._loop.call_soon_threadsafe(action)
        except RuntimeError:  # the loop is closed: the process ends
            return False
        return True
