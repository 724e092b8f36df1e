"""A capture that has not ended."""

import asyncio
from pathlib import Path

from kineto_protos.v1 import profiler_pb2 as pb

from kinetod.captures.arming import Arming
from kinetod.captures.counters.capture_counters import AGREED_S, BEGIN_S, CaptureCounters
from kinetod.captures.target_interface import TracedTarget
from kinetod.captures.watchers import Watchers


class Running:
    """Internal state of a capture that has not ended."""

    def __init__(self, capture: pb.Capture, *, unlimited: bool = False) -> None:
        self.capture = capture
        self.live_bytes = 0  # of records, written so far
        self.unlimited = unlimited  # an administrator's: held to no share of the store
        self.watchers = Watchers(capture)
        self.runs: list[TracedTarget] = []
        self.counters: CaptureCounters | None = None  # None: hardware counters were not asked for
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
        """Begins to sample hardware counters, if they were asked for, as far as the start of the capture can wait."""
        if self.counters is None:
            return
        asked, spec = self.started_by, self.capture.spec
        start_ns = asked.start_time_ns if asked is not None else spec.start_time_ns
        agreed = asked is not None and bool(asked.iterations)  # with other hosts, which go on meanwhile
        await self.counters.begin(
            max(1, start_ns - spec.warmup_ns) if start_ns else 0,
            patience_s=AGREED_S if agreed else BEGIN_S,
            asked_anew=asked is not None,  # kinetod-counters may answer by now
        )
