"""The values of kernels from samples once more, in plain loops over every nanosecond and small dense systems.

It follows the rules that the module docstrings of kineto_trace.analysis.counters state, and shares no code with them.
Only the limits that these rules name are imported. Times are ns of any origin, and short: time and memory grow with
the length of the window.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from kineto_trace.analysis.counters import attribution as limits
from kineto_trace.analysis.counters.attribution import MAX_SETS

IDLE, OTHERS = ("idle",), ("others",)
_RIDGE = 1e-7  # makes one of many solutions the only one; values that samples tell do not feel it
_CLOSE = 1e-3  # of a limit: a decision so close to it may go either way

Column = tuple[object, ...]
Vector = list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class BruteKernel:
    """A kernel that ran in [start, end) on one GPU."""

    name: str
    start: int
    end: int
    device: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BruteSample:
    """A sample of a counter, as it is in the table."""

    start: int
    end: int
    value: float


@dataclass(slots=True, kw_only=True)
class Expected:
    """What is to be said of a kernel's name. method: direct, fit or "not stated"; close: it may as well be another."""

    total_ns: int
    shared_pct: float
    method: str = "not stated"
    value: float = math.nan
    error: float = math.nan
    residual: float = math.nan
    close: bool = False

    def below(self, found: float, limit: float) -> bool:
        """Tells whether a figure is below a limit, and remembers if it is close to it."""
        self.close |= abs(found - limit) <= _CLOSE * limit
        return found < limit


def samples_that_count(samples: Sequence[BruteSample], *, percent: bool) -> list[BruteSample]:
    """The samples that have a value which can be, and that begin when all those before them have ended."""
    found, ended = [], -math.inf
    for each in sorted(samples, key=lambda sample: sample.start):
        possible = math.isfinite(each.value) and each.value >= 0 and not (percent and each.value > 105)
        if possible and each.end > each.start and each.start >= ended:
            value = min(each.value, 100.0) if percent else each.value
            found.append(BruteSample(start=each.start, end=each.end, value=value))
        ended = max(ended, each.end)
    return found


def mean_between(samples: Sequence[BruteSample], spans: Sequence[tuple[int, int]]) -> tuple[float, int]:
    """The mean over every nanosecond of these spans that lies in a sample, and the number of these."""
    values = [
        each.value
        for low, high in spans
        for moment in range(low, high)
        for each in samples
        if each.start <= moment < each.end
    ]
    return (math.fsum(values) / len(values) if values else math.nan), len(values)


def attributed(
    kernels: Sequence[BruteKernel],
    samples: Sequence[BruteSample],
    window: tuple[int, int],
    *,
    percent: bool,
    missing: Sequence[tuple[int, int]] = (),
) -> dict[str, Expected]:
    """What is to be said of each name of the kernels of one GPU by one counter. missing: time that was not recorded."""
    running = _running(kernels, window)
    found = dict(_times(running, window))
    counted = [
        each
        for each in samples_that_count(samples, percent=percent)
        if window[0] <= each.start
        and each.end <= window[1]
        and not any(low < each.end and each.start < high for low, high in missing)
    ]
    if not counted:
        return found
    length = median(each.end - each.start for each in counted)
    scale = 100.0 if percent else max(each.value for each in counted)
    shared, tied = _shared_columns(running)
    for said in found.values():
        said.close = tied
    shares = [_shares(running, each, window[0], shared) for each in counted]
    columns = sorted({column for share in shares for column in share}, key=repr)
    system = _System(counted, shares, columns, length, 100.0 if percent else math.inf)
    for name, said in found.items():
        system.judge(said, [column for column in columns if len(column) == 1 and _name(column) == name], scale)
    return found


def _name(column: Column) -> str:
    kind = column[0]
    return str(kind[0]) if isinstance(kind, tuple) else ""


def _running(kernels: Sequence[BruteKernel], window: tuple[int, int]) -> list[list[tuple[str, int]]]:
    """What runs in each nanosecond of the window: names with the kind of their length, as often as they run."""
    took: dict[str, dict[int, int]] = {}
    for each in kernels:
        kinds = took.setdefault(each.name, {})
        kind = max(each.end - each.start, 1).bit_length() - 1
        kinds[kind] = kinds.get(kind, 0) + each.end - each.start
    running: list[list[tuple[str, int]]] = [[] for _ in range(*window)]
    for each in kernels:
        kinds, kind = took[each.name], max(each.end - each.start, 1).bit_length() - 1
        if kinds[kind] < 0.05 * sum(kinds.values()):
            kind = max(kinds, key=lambda other: kinds[other])
        for moment in range(max(each.start, window[0]), min(each.end, window[1])):
            running[moment - window[0]].append((each.name, kind))
    return running


def _times(running: Sequence[Sequence[tuple[str, int]]], window: tuple[int, int]) -> Iterator[tuple[str, Expected]]:
    total: dict[str, int] = {}
    alone: dict[str, int] = {}
    for moment in running:
        for name, _ in moment:
            total[name] = total.get(name, 0) + 1
            alone[name] = alone.get(name, 0) + (len(set(moment)) == 1)
    for name, time in total.items():
        yield name, Expected(total_ns=time, shared_pct=100 * (time - alone[name]) / time)


def _column(moment: Sequence[tuple[str, int]]) -> Column:
    return tuple(sorted(set(moment))) or IDLE


def _shared_columns(running: Sequence[Sequence[tuple[str, int]]]) -> tuple[set[Column], bool]:
    """The sets of kinds at once that share one column, and whether others take as much time as one of them."""
    took = Counter(column for column in map(_column, running) if len(column) > 1)
    sets = took.most_common()
    shared = sets[MAX_SETS:]
    return {column for column, _ in shared}, bool(shared) and sets[MAX_SETS - 1][1] == shared[0][1]


def _shares(
    running: Sequence[Sequence[tuple[str, int]]], sample: BruteSample, low: int, shared: set[Column]
) -> dict[Column, float]:
    found: dict[Column, float] = {}
    for moment in range(sample.start - low, sample.end - low):
        column = _column(running[moment])
        column = OTHERS if column in shared else column
        found[column] = found.get(column, 0) + 1
    return {column: count / (sample.end - sample.start) for column, count in found.items()}


class _System:
    """Least squares over samples: a row for each sample, a column for each kind of time."""

    def __init__(
        self,
        samples: Sequence[BruteSample],
        shares: Sequence[Mapping[Column, float]],
        columns: Sequence[Column],
        length: float,
        upper: float,
    ) -> None:
        self.samples, self.columns, self.length = samples, columns, length
        self.rows = [[share.get(column, 0.0) for column in columns] for share in shares]
        self.weight = [(each.end - each.start) / length for each in samples]
        places = range(len(columns))
        self.normal = [
            [
                math.fsum(weight * row[one] * row[other] for weight, row in zip(self.weight, self.rows, strict=True))
                + (_RIDGE if one == other else 0)
                for other in places
            ]
            for one in places
        ]
        self.solution = self._bounded(upper)
        self.rest = [each.value - _dot(row, self.solution) for each, row in zip(samples, self.rows, strict=True)]

    def _bounded(self, upper: float) -> Vector:
        """Murty's rule of the least index: which values are free, and which at a bound."""
        right = [
            math.fsum(
                weight * row[place] * each.value
                for weight, row, each in zip(self.weight, self.rows, self.samples, strict=True)
            )
            for place in range(len(self.columns))
        ]
        largest = max(each.value for each in self.samples) or 1.0
        fixed: dict[int, float] = {}
        for _ in range(10_000):
            free = [place for place in range(len(right)) if place not in fixed]
            known = [right[at] - sum(self.normal[at][place] * value for place, value in fixed.items()) for at in free]
            solved = solve([[self.normal[at][other] for other in free] for at in free], known)
            found = dict(fixed) | dict(zip(free, solved, strict=True))
            values = [found[place] for place in range(len(right))]
            tiny = 1e-9 * largest
            for place, value in enumerate(values):
                pull = right[place] - _dot(self.normal[place], values)
                if place not in fixed and (value < -tiny or value > upper + tiny):
                    fixed[place] = 0.0 if value < 0 else upper
                    break
                if place in fixed and (pull > tiny if fixed[place] == 0 else pull < -tiny):
                    del fixed[place]
                    break
            else:
                return values
        raise AssertionError("the bounded system has no solution")

    def judge(self, said: Expected, own: Sequence[Column], scale: float) -> None:
        """Says what is known of the group that consists of these columns."""
        places = [self.columns.index(column) for column in own]
        seen = [
            math.fsum(row[place] * (each.end - each.start) for row, each in zip(self.rows, self.samples, strict=True))
            for place in places
        ]
        alone = math.fsum(seen)
        if said.below(100 - said.shared_pct, 100 * limits.ALONE):
            return
        whole = [
            each
            for each, row in zip(self.samples, self.rows, strict=True)
            if sum(row[place] for place in places) > 1 - 1e-9
        ]
        inside = sum(each.end - each.start for each in whole)
        said.close |= abs(inside - limits.WHOLE_SHARE * alone) <= _CLOSE * self.length
        direct = len(whole) >= limits.WHOLE_SAMPLES and inside >= limits.WHOLE_SHARE * alone
        if not alone:
            return
        combination = [0.0] * len(self.columns)
        for place, time in zip(places, seen, strict=True):
            combination[place] = time / alone
        told = solve(self.normal, combination)
        informed = _dot(combination, told)
        residual = math.sqrt(math.fsum(part * self._left(place) for place, part in enumerate(combination) if part))
        if direct:
            part = [(each.end - each.start) / inside for each in whole]
            value = math.fsum(each.value * own for each, own in zip(whole, part, strict=True))
            spread = math.fsum((each.value - value) ** 2 * own for each, own in zip(whole, part, strict=True))
            spread *= math.fsum(own**2 for own in part) * len(whole) / (len(whole) - 1)
            error = limits.NORMAL_95 * math.sqrt(spread)
            said.method, said.value, said.error, said.residual = "direct", value, error, residual
            return
        if said.below(alone / self.length, limits.LEAST_SAMPLES):
            return
        if said.below(1 / informed, limits.EVIDENCE):
            return
        error = limits.NORMAL_95 * math.sqrt(self._variance(told, informed))
        if not said.below(error, limits.ERROR * scale):
            return
        if not said.below(residual, limits.RESIDUAL * scale):
            return
        said.method, said.value, said.error, said.residual = "fit", _dot(combination, self.solution), error, residual

    def _left(self, place: int) -> float:
        """The mean square of what the fit leaves of samples, by the share of one column."""
        share = [row[place] for row in self.rows]
        return math.fsum(part * rest**2 for part, rest in zip(share, self.rest, strict=True)) / math.fsum(share)

    def _variance(self, told: Vector, informed: float) -> float:
        rank = _rank([list(row) for row in self.normal])
        freedom = max(len(self.samples) - rank, 1)
        left = math.fsum(weight * rest**2 for weight, rest in zip(self.weight, self.rest, strict=True))
        sandwich = 0.0
        for row, weight, rest in zip(self.rows, self.weight, self.rest, strict=True):
            leverage = weight * _dot(row, solve(self.normal, row))
            sandwich += (weight * _dot(row, told) * rest / max(1 - leverage, 1e-3)) ** 2
        return max(informed * left / freedom, sandwich)


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))


def solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> Vector:
    """The solution of a positive definite system, by elimination."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for place, row in enumerate(rows):
        for below in rows[place + 1 :]:
            factor = below[place] / row[place]
            for at in range(place, len(row)):
                below[at] -= factor * row[at]
    found = [0.0] * len(rows)
    for place in reversed(range(len(rows))):
        row = rows[place]
        known = math.fsum(row[at] * found[at] for at in range(place + 1, len(rows)))
        found[place] = (row[-1] - known) / row[place]
    return found


def _rank(rows: list[Vector]) -> int:
    """Of a positive semidefinite matrix: how many pivots are more than the ridge."""
    rank, left = 0, list(range(len(rows)))
    while left:
        pivot = max(left, key=lambda at: rows[at][at])
        if rows[pivot][pivot] < 100 * _RIDGE:
            break
        rank += 1
        left.remove(pivot)
        for below in left:
            factor = rows[below][pivot] / rows[pivot][pivot]
            for at in left:
                rows[below][at] -= factor * rows[pivot][at]
    return rank
