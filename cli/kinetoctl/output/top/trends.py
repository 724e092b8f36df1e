"""The step rates of processes over the last minutes, made of the counts in samples. Pure."""

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kinetoctl.output.cell_values import NOTHING

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

SPAN_S = 300.0
MAX_POINTS = 601  # of the shortest interval, 500 ms
CELLS = 7  # with which a terminal of 60 columns has room for the longest pid
LEAST_STEPS = 8  # of the mean pace in each cell, so that one iteration more or less does not show
LEAST_SAMPLES = 3  # in each cell: a busy host takes them at uneven times
LEVELS = " ▁▂▃▄▅▆▇█"
TURN = 0.15  # a change of the rate by less is none
Point = tuple[float, float]  # seconds, iterations until then
ProcessKey = tuple[int, int]  # pid, start time (ns)


def key_of(sample: "pb.ProcessSample") -> ProcessKey:
    """Which process it is, even if its pid is used again."""
    return sample.process.pid, sample.process.start_time_ns


class Trends:
    """The counts of all processes that the last sample has."""

    def __init__(self) -> None:
        self._points: dict[ProcessKey, deque[Point]] = {}
        self._texts: dict[ProcessKey, str] = {}  # until the next sample

    def see(self, sample: "pb.HostSample") -> None:
        """Adds the counts of a sample. Those of processes that it lacks are forgotten."""
        now_s = sample.time_ns / 1e9
        kept = {}
        for each in sample.processes:
            points = self._points.get(key_of(each), deque(maxlen=MAX_POINTS))
            count = each.process.iterations
            if points and (count < points[-1][1] or now_s <= points[-1][0]):  # counted anew, or the clock was set
                points.clear()
            if count >= 0:
                points.append((now_s, count))
            while points and points[0][0] < now_s - SPAN_S:
                points.popleft()
            kept[key_of(each)] = points
        self._points = kept
        self._texts.clear()

    def text(self, sample: "pb.ProcessSample") -> str:
        """A bar for the rate of each part of the time, from 0 to the fastest, and where it goes: `▇▇▇▇▅▃▃▃ ↘`."""
        key = key_of(sample)
        if key not in self._texts:
            self._texts[key] = _drawn(rates_of(self._points.get(key, ())))
        return self._texts[key]


def _drawn(rates: Sequence[float]) -> str:
    if len(rates) < 2 or max(rates) <= 0:
        return NOTHING
    bars = "".join(LEVELS[max(1, round(rate / max(rates) * (len(LEVELS) - 1)))] for rate in rates)
    return f"{bars} {_direction(rates)}".rstrip()


def rates_of(points: Sequence[Point]) -> list[float]:
    """Iterations per second in up to CELLS equal parts of the time, each of LEAST_STEPS and LEAST_SAMPLES at least."""
    if len(points) < 2:
        return []
    (begin, first), (end, last) = points[0], points[-1]
    if last <= first:
        return []
    cells = min(CELLS, (len(points) - 1) // LEAST_SAMPLES, int((last - first) / LEAST_STEPS))
    if cells < 1:
        return []
    length = (end - begin) / cells
    counts = [_count_at(points, begin + length * place) for place in range(cells + 1)]
    return [(after - before) / length for before, after in zip(counts, counts[1:], strict=False)]


def _count_at(points: Sequence[Point], at_s: float) -> float:
    """Between two samples a process is taken to step evenly."""
    before = points[0]
    for point in points:
        if point[0] >= at_s:
            share = (at_s - before[0]) / (point[0] - before[0]) if point[0] > before[0] else 0.0
            return before[1] + share * (point[1] - before[1])
        before = point
    return points[-1][1]


def _direction(rates: Sequence[float]) -> str:
    """The last third beside what was before; nothing if there is too little of it."""
    if len(rates) < 3:
        return ""
    part = max(1, len(rates) // 3)
    earlier, now = (sum(each) / len(each) for each in (rates[:-part], rates[-part:]))
    if abs(now - earlier) <= TURN * earlier:
        return "→"
    return "↗" if now > earlier else "↘"
