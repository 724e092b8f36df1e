"""Writes the start of each iteration into an arena of its own, while a capture records.

Theory of operation
    The training thread only notes the time of an iteration in the counter's ring (counting.py). The agent's thread
    copies new entries from there into the arena: whenever it is awake, when the training thread wakes it, and at the
    end. It asks to be woken about once a second, but before a quarter of the ring is new. So the trace has the
    iterations of any period, and those of a process that died, up to about a second before its death.

    The first record is the iteration that is running when the recording starts, or the program's first if that comes
    later. Entries overwritten before they could be copied count as dropped.
"""

from typing import Any, Callable, Dict

from kineto_agent.protocol.records import STEP_MARK, STEP_MARKS_FORMAT
from kineto_agent.sources.arena_writer import ArenaWriter
from kineto_agent.sources.interface import SourceCounts, SourceOutcome
from kineto_agent.steps.counting import MARKS_AT_ONCE, StepCounter

NAME = "steps"
_PERIOD_NS = 1_000_000_000
_PUBLISH_NS = _PERIOD_NS // 2
_BUFFERS_BYTES = 256 * 1024  # 10,922 marks until the daemon copies them, ten times a second
_BUFFER_BYTES = 16 * 1024


class StepMarkSession:
    """One recording: a SourceSession that is not selected by activity type.

    `first` is the iteration to begin with, and `wake` wakes the agent's thread.
    """

    format = STEP_MARKS_FORMAT
    yields = False

    def __init__(self, counter: StepCounter, first: int, wake: Callable[[], None], buffer_limit_bytes: int) -> None:
        self.metadata: Dict[str, Any] = {}
        self._counter = counter
        self._wake = wake
        self._writer = ArenaWriter(NAME, min(buffer_limit_bytes, _BUFFERS_BYTES), 0, _BUFFER_BYTES)
        self.arena_fd = self._writer.fd
        self._next = first
        self._pace = 1  # iterations per second, at the last copy
        self._last_ns = 0  # start of the last written iteration
        self._published_ns = 0  # likewise, of the last one visible to the daemon

    def start(self) -> None:
        """Write the iterations that have begun, and ask to be woken."""
        self.copy()

    def copy(self) -> None:
        """Write the iterations that have begun since the last call. Cheap if there are none."""
        if self._counter.count < self._next and self._counter.will_ask_to_copy:
            return
        before_ns, begun = self._last_ns, self._write()
        if before_ns and begun:
            self._pace = begun * _PERIOD_NS // max(self._last_ns - before_ns, 1)
        self._counter.copy_after(min(max(self._pace, 1), MARKS_AT_ONCE), self._wake)

    def _write(self, *, rest: bool = False) -> int:
        """Write iterations and return how many were written or dropped. rest: nothing is left for a later call."""
        first = self._next
        marks, forgotten = self._counter.begun_since(first)
        for number, time_ns in marks:
            if not (rest or self._writer.has_room(STEP_MARK.size)):
                return self._next - first  # the others stay in the ring until the daemon has copied this buffer
            self._drop_until(number)
            self._writer.append(STEP_MARK, time_ns, number, self._counter.thread, 0)
            self._next, self._last_ns = number + 1, time_ns
        self._drop_until(first + len(marks) + forgotten)
        # publishing uses up a buffer, however little is in it
        if rest or self._last_ns - self._published_ns >= _PUBLISH_NS:
            self._writer.publish()
            self._published_ns = self._last_ns
        return self._next - first

    def _drop_until(self, number: int) -> None:
        while self._next < number:
            self._writer.drop()
            self._next += 1

    def counts(self) -> SourceCounts:
        """Marks so far."""
        return self._writer.counts()

    def stop(self) -> SourceOutcome:
        """Write the rest."""
        self._counter.copy_after(None)
        self._write(rest=True)
        self._writer.finish()
        return SourceOutcome(self.counts(), {}, [], detach_ns=0, cpu_ns=0)

    def give_way(self) -> None:
        """Do nothing: it uses no library."""

    def close(self) -> None:
        """Free the arena."""
        self._counter.copy_after(None)
        self._writer.close()
