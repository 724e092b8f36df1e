"""How much of a capture is done: for how long it has recorded and of how long, records, bytes and losses."""

import time
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

from kineto_protos.units import format_duration

from kinetoctl.client import enum_names
from kinetoctl.output import units

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb


class StateTimes:
    """For how long each target has been in its state: since this program saw the change, or, if it was in this state
    when it was first seen, since the time that the daemon gives.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, wall_ns: Callable[[], int] = time.time_ns) -> None:
        self._clock, self._wall_ns = clock, wall_ns
        self._since: dict[Hashable, tuple[int, float]] = {}

    def see(self, key: Hashable, target: "pb.Target") -> None:
        """The target as it is now."""
        known = self._since.get(key)
        if known is not None and known[0] == target.state:
            return
        earlier_ns = self._wall_ns() - target.state_since_ns if known is None and target.state_since_ns else 0
        self._since[key] = target.state, self._clock() - max(earlier_ns, 0) / 1e9

    def seconds(self, key: Hashable) -> float:
        """Seconds since its state was first seen."""
        return self._clock() - self._since[key][1] if key in self._since else 0.0


def extent(spec: "pb.CaptureSpec") -> str:
    """How long it is to record: `5 s`, `20 iterations`; empty if that is unknown."""
    if spec.HasField("iterations"):
        counted = f"{units.count(spec.iterations.count)} iterations" if spec.iterations.count != 1 else "1 iteration"
        return f"{counted} or {format_duration(spec.or_duration_ns)}" if spec.HasField("or_duration_ns") else counted
    return format_duration(spec.duration_ns) if spec.duration_ns else ""


def time_text(target: "pb.Target", spec: "pb.CaptureSpec", state_s: float) -> str:
    """`3.2 s of 5 s` while it records and afterwards, else only for how long its state has lasted (state_s)."""
    state = enum_names.target_state(target.state)
    if state == "COLLECT":
        return _of(_seconds(state_s), target, spec)
    if state == "ENDED":
        recorded_ns = target.collected_ns - target.collecting_ns
        return _of(_seconds(recorded_ns / 1e9), target, spec) if target.collected_ns else ""
    return _seconds(state_s)


def _seconds(seconds: float) -> str:
    """To a tenth of a second, so that one sees it move; above a minute to the second."""
    return f"{seconds:.1f} s" if seconds < 60 else format_duration(round(seconds) * 10**9)


def _of(elapsed: str, target: "pb.Target", spec: "pb.CaptureSpec") -> str:
    if not spec.HasField("iterations"):
        return " of ".join(filter(None, (elapsed, extent(spec))))
    seen = f"{units.count(target.summary.iterations)} of " if target.summary.iterations > 0 else ""
    return f"{elapsed}, {seen}{extent(spec)}"


def figures(*targets: "pb.Target") -> tuple[str, str, str]:
    """Records, bytes and dropped records so far, of all targets together."""
    counts = [count for target in targets for count in target.counts]
    return (
        units.count(sum(count.records for count in counts)),
        units.size(sum(count.bytes for count in counts)),
        units.count(sum(count.dropped for count in counts)),
    )


def summed(targets: "Sequence[pb.Target]") -> list[str]:
    """The figures with their names, for one line; none if nothing is known."""
    if not any(target.counts for target in targets):
        return []
    records, size, dropped = figures(*targets)
    return [f"{records} records", size, f"{dropped} dropped"]


def recorded(target: "pb.Target", spec: "pb.CaptureSpec") -> list[str]:
    """What an ended target has recorded, for one line: its time and figures, as far as they are known."""
    return [*([time_text(target, spec, 0.0)] if target.collected_ns else []), *summed([target])]
