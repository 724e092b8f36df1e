"""A capture that has not ended, and its watchers.

Each watcher has one flag per target, so that a slow watcher costs nothing.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from kineto_protos.v1 import profiler_pb2 as pb

from kinetod.captures.arming import Arming
from kinetod.captures.counters.capture_counters import AGREED_S, BEGIN_S, CaptureCounters
from kinetod.captures.target_interface import TracedTarget


class Watchers:
    """The watchers of one capture."""

    def __init__(self, capture: pb.Capture) -> None:
        self._capture = capture
        self._watching: set[_Watch] = set()

    def changed(self, number: int) -> None:
        """One target has changed."""
        for watch in self._watching:
            watch.dirty.add(number)
            watch.wake.set()

    def renewed(self) -> None:
        """More than one target has changed, so watchers get a whole snapshot."""
        for watch in self._watching:
            watch.whole = True
            watch.wake.set()

    def ended(self) -> None:
        """The capture has ended."""
        for watch in self._watching:
            watch.wake.set()

    async def events(self, is_over: Callable[[], bool]) -> AsyncIterator[pb.CaptureEvent]:
        """Yields a snapshot, the latest state of changed targets, and a snapshot at an armed start and at the end.

        Intermediate states may be skipped.
        """
        watch = _Watch()
        self._watching.add(watch)
        try:
            yield pb.CaptureEvent(snapshot=self._capture)
            while self._capture.status == pb.CAPTURE_STATUS_RUNNING:
                await watch.wake.wait()
                watch.wake.clear()
                if watch.whole:
                    watch.whole = False
                    watch.dirty.clear()
                    yield pb.CaptureEvent(snapshot=self._capture)
                while watch.dirty:
                    number = min(watch.dirty)
                    watch.dirty.discard(number)
                    yield pb.CaptureEvent(target=self._capture.targets[number])
                if is_over():
                    return
            yield pb.CaptureEvent(snapshot=self._capture)
        finally:
            self._watching.discard(watch)


class _Watch:
    def __init__(self) -> None:
        self.dirty: set[int] = set()
        self.whole = False
        self.wake = asyncio.Event()


class Running:
    """Internal state of a capture that has not ended."""

    def __init__(self, capture: pb.Capture, *, unlimited: bool = False) -> None:
        self.capture = capture
        self.live_bytes = 0  # of records, written so far
        self.unlimited = unlimited  # of an administrator: not limited to a share of the store
        self.watchers = Watchers(capture)
        self.runs: list[TracedTarget] = []
        self.counters: CaptureCounters | None = None  # None: hardware counters were not requested
        self.arming: Arming | None = None  # None: it began at once
        self.task: asyncio.Task[None] | None = None
        self.unsaved: dict[int, Path | None] = {}  # numbers of targets whose verdict is not stored, and their garbage

    @property
    def waits(self) -> bool:
        """Whether it is armed and not started."""
        return self.arming is not None and self.arming.waits

    @property
    def started_by(self) -> pb.StartCaptureRequest | None:
        """The request that started it, if it was armed and has been started."""
        return self.arming.request if self.arming is not None else None

    async def begin_counters(self) -> None:
        """Starts sampling hardware counters, if requested, as long as the start of the capture can wait."""
        if self.counters is None:
            return
        asked, spec = self.started_by, self.capture.spec
        start_ns = asked.start_time_ns if asked is not None else spec.start_time_ns
        agreed = asked is not None and bool(asked.iterations)  # with other hosts, which do not wait
        await self.counters.begin(
            max(1, start_ns - spec.warmup_ns) if start_ns else 0,
            patience_s=AGREED_S if agreed else BEGIN_S,
            asked_anew=asked is not None,  # kinetod-counters may answer by now
        )
