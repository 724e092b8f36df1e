"""Detects ranks with a slower host: the same operators take longer there than on the other ranks.

Theory of operation
    Operators that launch work cost the host about the same time whatever the size of the tensors, so the same program
    has the same medians on equal cores. Self time counts: that of an operator without nested operators and calls to
    CUDA, and that of calls that launch kernels or fills. Calls that wait for a GPU, another rank or data are left out,
    and so are names with few calls, or with medians that the clock of the trace does not resolve.

    A rank is compared with the median of the others, name by name, in the thread that trains and in those that run
    backward: these may be on different cores, so that only one of them is slow. The pace of a rank is the median of the
    ratios. It is reported only if most names agree (a single slow operator has a reason of its own), if it explains a
    good part of the rank's delay (else the rank sleeps or waits for something, and its operators are slow because
    caches and clocks are cold), and more of it than operators that the rank calls more often than the others do. The
    kernel's counters show ranks whose threads wait for a CPU. Recorded calls of Python make operators slower, so ranks
    are only compared if all or none of them have them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np

from kineto_trace.analysis.host_time.cpu_shortage import share_without_cpu
from kineto_trace.analysis.idle_gaps import blocking_calls, blocking_copies
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.row_groups import group
from kineto_trace.base.array_types import NOTHING, Flags, Floats, Ints, UInts32
from kineto_trace.kernel_traits.kernel_types import matches
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import EVALUATE_FUNCTION, MEMCPY, calls, gpu, ops, training_thread
from kineto_trace.structure.step_pace import paced_steps

LEAST_CALLS = 50  # of a name on each rank
LEAST_NAMES = 8
AGREE = 0.75  # share of the names that must take longer
SLOWER = 1.1  # times as long
EXPLAINED = 0.25  # share of the rank's delay: Python between operators is as slow, but has no times of its own
_LEAST_NS = 300  # shorter medians are overhead of the recording itself
_TICKS = 10  # of the clock, minimum for a median
_MICROSECOND_NS = 1_000
_SIGNIFICANT_BITS = 40  # of a time in ns: 18 minutes
TRAINING, BACKWARD = "training", "backward"
_THREADS = (TRAINING, BACKWARD)
_WAITS = re.compile(
    r"DataLoader|^record_param_comms$|^(?:c10d|_c10d_functional|nccl|gloo|mpi|ucc)::?|[Ss]ynchronize|_pin_memory$"
    r"|^aten::(?:item|_local_scalar_dense|is_nonzero|nonzero|copy_|_to_copy|to|equal)$"
)
REMEDY = "pin each rank to cores of its GPU's NUMA node, look for other programs there, and compare clock speeds"


class OpPace(NamedTuple):
    """The calls of one name.

    in_step: calls in a mean step.
    ns: the median of their self time, in ns.
    """

    calls: int
    in_step: float
    ns: float


@dataclass(frozen=True, slots=True)
class RankPace:
    """How long the operators of one rank take on its host, by thread (`TRAINING`, `BACKWARD`) and name.

    steps: number of steps counted.
    python: whether calls of Python were recorded.
    without_cpu: whether the threads that launch work waited long for a CPU.
    """

    of: Mapping[tuple[str, str], OpPace]
    host: str = ""
    steps: int = 1
    python: bool = False
    without_cpu: bool = False


@dataclass(frozen=True, slots=True)
class SlowerHost:
    """A rank whose operators take `ratio` times as long as those of the others, by the median over the names.

    thread: the only slow thread; "" for all.
    host: its name, if the ranks have several.
    more_ns: extra time of the operators in a mean step, in ns.
    """

    ratio: float
    names: int
    thread: str
    host: str
    more_ns: float

    @property
    def cause(self) -> str:
        """Returns the cause in a few words."""
        where = f"in its {self.thread} thread" if self.thread else "on its host"
        host = f" ({self.host})" if self.host else ""
        return f"the same operators take {self.ratio:.2f} times as long {where}{host}"

    @property
    def about(self) -> str:
        """Returns the cause, how it was measured, and what to do about it."""
        others = f"as on the other ranks (median over {self.names} operators)"
        return f"{self.cause} {others}: probably a slower or shared core; {REMEDY}"


def rank_pace(context: Context) -> RankPace:
    """Returns what one rank contributes; without names if it has no operators."""
    trace, steps = context.trace, context.get(paced_steps)
    name, thread, start, own = _own_times(context)
    rows = np.flatnonzero(thread != NOTHING)
    if len(steps):
        rows = rows[steps.number_at(start[rows]) != NOTHING]
    name, thread, own = name[rows], thread[rows], own[rows]
    groups = group([name * len(_THREADS) + thread])
    count, middle = groups.sizes(), _medians(groups.number, own)
    number = max(len(steps), 1)
    return RankPace(
        {
            (_THREADS[thread[first]], trace.strings[name[first]]): OpPace(int(calls_), calls_ / number, float(ns))
            for first, calls_, ns in zip(groups.first.tolist(), count.tolist(), middle.tolist(), strict=True)
        },
        host=trace.target.host,
        steps=number,
        python=len(trace.table("python_function")) > 0,
        without_cpu=context.get(share_without_cpu) > 0,
    )


def _own_times(context: Context) -> tuple[Ints, Ints, Ints, Ints]:
    """Returns name (string number), thread (number into `_THREADS`, or NOTHING), start and self time of each call."""
    trace, tree, called, activity = context.trace, context.get(ops), context.get(calls), context.get(gpu)
    table = trace.table("cpu_op")
    in_calls = np.bincount(called.op[called.op >= 0], (called.end - called.start)[called.op >= 0], len(table))
    own = tree.nested.tree.self_time[tree.place].astype(np.int64) - in_calls.astype(np.int64)
    launching = unique_values(activity.call[(activity.call >= 0) & (activity.kind != MEMCPY)])
    waits = _waiting_names(context)
    kept = np.flatnonzero(~waits[table["name"]])
    kept_calls = launching[~waits[called.name[launching]]]
    threads = np.concatenate([table["thread"][kept], called.thread[kept_calls]])
    return (
        np.concatenate([table["name"][kept], called.name[kept_calls]]).astype(np.int64),
        _thread_numbers(context, threads),
        np.concatenate([table["start"][kept], called.start[kept_calls]]),
        np.maximum(np.concatenate([own[kept], (called.end - called.start)[kept_calls]]), 0),
    )


def _waiting_names(context: Context) -> Flags:
    """Returns for each string whether calls of that name wait, by the name or because one waited in this trace."""
    called, names = context.get(calls), context.trace.table("cpu_op")["name"]
    found = matches(context.trace.strings, _WAITS)
    waited = np.concatenate([np.flatnonzero(context.get(blocking_calls)), context.get(blocking_copies)])
    inside = called.op[waited]
    found[called.name[waited]] = True
    found[names[inside[inside >= 0]]] = True
    return found


def _thread_numbers(context: Context, threads: UInts32) -> Ints:
    table, strings = context.trace.table("cpu_op"), context.trace.strings
    evaluates = np.fromiter((text.startswith(EVALUATE_FUNCTION) for text in strings), np.bool_, len(strings))
    backward = unique_values(table["thread"][evaluates[table["name"]]])
    found = np.where(np.isin(threads, backward), _THREADS.index(BACKWARD), NOTHING)
    return np.where(threads == context.get(training_thread), _THREADS.index(TRAINING), found)


def _medians(number: Ints, own: Ints) -> Floats:
    """Returns the median of each group in ns; NaN where the clock of the trace does not resolve it."""
    if not len(number):
        return np.empty(0)
    times = np.sort(number << _SIGNIFICANT_BITS | np.minimum(own, (1 << _SIGNIFICANT_BITS) - 1))
    count = np.bincount(number)
    middle = times[np.cumsum(count) - count + count // 2] & ((1 << _SIGNIFICANT_BITS) - 1)
    tick = 1 if (own % _MICROSECOND_NS).any() else _MICROSECOND_NS
    return np.where(middle >= max(_LEAST_NS, _TICKS * tick), middle, np.nan)


def slower_host(own: RankPace, others: Sequence[RankPace], late_ns: float) -> SlowerHost | None:
    """Returns by how much the host of a rank is slower than those of the others; None if that does not explain its
    delay.

    late_ns: extra work of the rank in a mean step, or how long the others wait for it, in ns.
    """
    if own.without_cpu or not others or any(other.python != own.python or not other.of for other in others):
        return None
    found = _slow_threads(own, others)
    more_ns = sum(each.more_ns for each in found.values())
    if not found or more_ns < EXPLAINED * late_ns or more_ns <= _more_calls(own, others):
        return None
    ratios = [ratio for each in found.values() for ratio in each.ratios]
    thread = next(iter(found)) if len(found) == 1 else ""
    host = own.host if len({own.host, *(other.host for other in others)}) > 1 else ""
    return SlowerHost(median(ratios), len(ratios), thread, host, more_ns)


class _Compared(NamedTuple):
    """The names of one thread: each one's ratio to the others, and the extra time of all of them in ns."""

    ratios: list[float]
    more_ns: float

    @property
    def enough(self) -> bool:
        return len(self.ratios) >= LEAST_NAMES

    @property
    def slower(self) -> bool:
        longer = sum(ratio > 1 for ratio in self.ratios)
        return self.enough and longer >= AGREE * len(self.ratios) and median(self.ratios) >= SLOWER


def _slow_threads(own: RankPace, others: Sequence[RankPace]) -> dict[str, _Compared]:
    """Returns the slower threads; "" for all together, where a thread has too few names to be judged alone."""
    threads = {thread: _compared(own, others, (thread,)) for thread in _THREADS}
    if not all(each.enough for each in threads.values()):
        threads = {"": _compared(own, others, _THREADS)}
    return {thread: each for thread, each in threads.items() if each.slower}


def _compared(own: RankPace, others: Sequence[RankPace], threads: Sequence[str]) -> _Compared:
    ratios, more = [], 0.0
    for key, mine in own.of.items():
        theirs = [other.of[key] for other in others if key in other.of]
        if key[0] not in threads or len(theirs) < len(others):
            continue
        ns = median(each.ns for each in theirs)
        if min(mine.calls, *(each.calls for each in theirs)) >= LEAST_CALLS and mine.ns > 0 and ns > 0:
            ratios.append(mine.ns / ns)
            more += (mine.ns - ns) * min(mine.in_step, median(each.in_step for each in theirs))
    return _Compared(ratios, more)


def _more_calls(own: RankPace, others: Sequence[RankPace]) -> float:
    """Returns the time in a mean step (ns) of operator calls that the rank makes in excess of the others."""
    none = OpPace(0, 0.0, 0.0)
    more = 0.0
    for key, mine in own.of.items():
        if mine.ns > 0:
            more += mine.ns * max(mine.in_step - median(other.of.get(key, none).in_step for other in others), 0.0)
    return more
