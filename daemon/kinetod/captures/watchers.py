"""Watching a capture: each watcher has one flag per target, so that a slow watcher costs nothing."""

import asyncio
from collections.abc import AsyncIterator, Callable

from kineto_protos.v1 import profiler_pb2 as pb


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
