"""The measured steps that findings are about, and findings that several ranks share, and those about collectives.

Theory of operation
    A loss of one rank is not the loss of the job. Waiting in collectives is caused by the rank that the others wait
    for, and whatever makes one rank slower costs the job no more than that rank's delay. The view rank_what_if has
    both, from a critical path over all ranks:

    * the excess of a kind of finding on a rank over the median of the others counts up to the job's gain if that rank
      were as fast as the others, and up to the rank's excess work: the others have the rest too, hidden behind their
      waiting. Findings that all ranks have count as they are;
    * waiting in collectives is no finding of its own: the ranks that are waited for are;
    * transfers that nothing hides count up to what the job would gain if they took no time.

    A rank that costs the job more than its findings explain is a finding itself, unless another one costs about as
    much: ranks that take turns being late are not slow. Where the same operators take longer on its host, the findings
    about the host's work say so, since the rank has more of it than the others. Without a critical path (no row of a
    rank in rank_what_if), the findings stay as they are. The same holds if there are several captures of a rank:
    captures do not wait for each other, and several captures of one process are not several ranks.

Also finds many small collectives where a few large ones would do.
    A collective costs the host about the same whatever its size: the operator, the events between streams and the
    launch. If a step has many small ones while the GPU waits for the host, fewer, larger ones would save most of
    that time: as many as their bytes need at BUCKET_BYTES each, which is what DistributedDataParallel does by default.
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from kineto_trace.analysis.cause_views import CAUSES, time_causes
from kineto_trace.analysis.distributed.rank_pace import REMEDY
from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.host_findings.standing import STANDS_STILL
from kineto_trace.analysis.host_findings.user_code import IN_COLLECTIVES
from kineto_trace.analysis.idle_gaps import measured_steps
from kineto_trace.analysis.idle_pieces import IDLE_CAUSES
from kineto_trace.analysis.step_replay import ReplayChange, step_replay
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.intervals import Union, containing, union
from kineto_trace.arrays.row_groups import sums
from kineto_trace.base.array_types import AnyArray, Flags, Ints
from kineto_trace.base.quantities import format_duration
from kineto_trace.collectives.rank_matching import rank_collectives
from kineto_trace.kernel_traits.kernel_types import matches
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import calls, gpu, ops
from kineto_trace.structure.library_calls import code_place
from kineto_trace.structure.python_frames import python_frames
from kineto_trace.view_api.result import Result

LEAST_PCT = 2.0  # of the job's time, gained if a rank is as fast as the others: less is no finding
ABOVE_OTHERS = 2.0  # times the median gain by the other ranks: less is chance
EXPLAINED = 0.5  # of that
WAITING = "waiting_in_collectives"
TRANSFERS = frozenset({"exposed_communication"})
TRANSFERS_ON_HOST = frozenset({"communication_on_the_host", IN_COLLECTIVES})
SLOW_RANK = "slow_rank"
_FIGURES = ("saving_us", "saving_pct", "saving_per_step_us", "uncertainty_pct")
_ADVICE = (
    "Give all ranks equal work on equal machines. Compare this rank with another one (kinetoctl diff): its batches, "
    "its data, its host and its GPU clocks."
)
_SLOW_HOST = REMEDY[:1].upper() + REMEDY[1:]
_ALONE = "The other ranks wait for this: give all ranks equal shares of it, or do it where no collective waits."
Row = dict[str, Any]
SMALL_COLLECTIVES = "small_collectives"
HOST_WORK = frozenset({"host_bound", "host_python", "host_annotation", "small_operators", SMALL_COLLECTIVES})
BUCKET_BYTES = 25 << 20  # bytes that DistributedDataParallel puts into one all_reduce by default
SMALL_BYTES = 4 << 20
MANY = 16  # small ones in a step
_OPERATORS = re.compile(r"^(?:c10d|_c10d_functional)::|^record_param_comms$")
_CAUSES = ("operators", "launch_latency", "host_communication")
TOP_KERNELS = 3
NOTED = 1.02  # times the duration without recording: from here on, a note says so


class _Middle:
    """The median of the values of all ranks but one; the lower of two; 0 if there is no other rank."""

    def __init__(self, values: Iterable[float]) -> None:
        self._ascending = sorted(values)

    def without(self, own: float) -> float:
        """Returns the median of all values but this one, which is among them."""
        place = (len(self._ascending) - 2) // 2
        if place < 0:
            return 0.0
        return self._ascending[place if place < bisect_left(self._ascending, own) else place + 1]


@dataclass(frozen=True, slots=True)
class _Gains:
    """What the job would gain, in % of its time.

    ranks: if this rank were as fast as the others.
    transfers: if they took no time.
    """

    ranks: dict[int, Row]
    transfers: float

    @property
    def on_host(self) -> bool:
        """Whether these are bounds for collectives of the host: the work of the ranks is unknown then."""
        return all(row["more_work_us"] is None for row in self.ranks.values())

    def slow(self) -> set[int]:
        """Returns the ranks that are slower than the others."""
        gains = {rank: self.of(rank) for rank in self.ranks}
        middle = _Middle(gains.values())
        return {rank for rank, own in gains.items() if own >= max(LEAST_PCT, ABOVE_OTHERS * middle.without(own))}

    def more_work(self, rank: int) -> float:
        """Returns the rank's work in excess of the others; unbounded if that is unknown."""
        row = self.ranks.get(rank)
        if row is None or row["more_work_us"] is None or not row["saving_us"]:
            return 100.0
        return float(row["more_work_us"] * row["saving_pct"] / row["saving_us"])

    def of(self, rank: int) -> float:
        """Returns what the job would gain if this rank were as fast as the others; unbounded if that is unknown."""
        row = self.ranks.get(rank)
        return max(row["saving_pct"], 0.0) if row else 100.0


def common_findings(result: Result, ranks: int, what_if: Result | None = None, *, traces: int | None = None) -> Result:
    """Merges the view findings of the ranks of a job: a finding that several have appears once, as on the worst rank.

    The largest saving comes first.

    ranks: number of ranks of the job.
    what_if: the view rank_what_if of the same ranks; the savings are then those of the job.
    traces: number of traces, if there are several captures of some ranks.
    """
    rows = result.rows()
    traces = ranks if traces is None else traces
    gains = _gains(what_if) if traces == ranks else None
    if gains:
        rows = _of_the_job(rows, gains, sorted({row["rank"] for row in rows} | set(gains.ranks)))
    same: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        same.setdefault((row["finding"], row["title"]), []).append(row)
    worst = []
    for each in same.values():
        row = max(each, key=lambda entry: entry["saving_us"] or 0.0)
        worst.append({**row, "title": f"{row['title']} ({_where(each, ranks, traces)})"} if len(each) > 1 else row)
    worst.sort(key=lambda entry: (entry["finding"] != STANDS_STILL, bool(entry["guess"]), -(entry["saving_us"] or 0.0)))
    return replace(result, table=pa.Table.from_pylist(worst, schema=result.table.schema))


def _where(rows: Sequence[Row], ranks: int, traces: int) -> str:
    """Returns on how many ranks, or in how many captures, a finding is. rows: one of each trace that has it."""
    on_ranks = f"on {len({row['rank'] for row in rows})} of {ranks} ranks"
    if traces == ranks:
        return on_ranks
    return f"in {len(rows)} of {traces} captures" + (f", {on_ranks}" if ranks > 1 else "")


def _gains(what_if: Result | None) -> _Gains | None:
    rows = what_if.rows() if what_if else []
    ranks = {row["rank"]: row for row in rows if row["rank"] is not None}
    return _Gains(ranks, sum(max(row["saving_pct"], 0.0) for row in rows if row["collective"])) if ranks else None


def _of_the_job(rows: Sequence[Row], gains: _Gains, ranks: Sequence[int]) -> list[Row]:
    """Returns the findings with what the job would gain, and the ranks that it waits for."""
    took: dict[tuple[str, int], float] = {}
    for row in rows:
        key = row["finding"], row["rank"]
        took[key] = took.get(key, 0.0) + (row["saving_pct"] or 0.0)
    middle = {kind: _Middle(took.get((kind, rank), 0.0) for rank in ranks) for kind in {kind for kind, _ in took}}
    explained, slow, found = dict.fromkeys(ranks, 0.0), gains.slow(), list[Row]()
    for row in rows:
        kind, rank, own = row["finding"], row["rank"], took[row["finding"], row["rank"]]
        if kind == WAITING or not own:
            continue
        more = min(max(own - middle[kind].without(own), 0.0), gains.more_work(rank)) if len(ranks) > 1 else 0.0
        late = min(more, gains.of(rank))
        counted = own - more + late
        if kind in (TRANSFERS_ON_HOST if gains.on_host else TRANSFERS):
            counted = min(counted, gains.transfers)
        part = row["saving_pct"] / own
        if not row["guess"]:
            explained[rank] += part * late
        slows = not row["guess"] and rank in slow and part * late >= LEAST_PCT
        if counted > 0:
            told = _scaled(row, counted / own)
            told = _waited_for(told, gains.ranks[rank], alone=late > counted / 2) if slows else told
            found.append(told)
    unexplained = sorted(rank for rank in slow if explained[rank] < EXPLAINED * gains.of(rank))
    return [*found, *(_slow_rank(gains.ranks[rank], explained[rank]) for rank in unexplained)]


def _waited_for(row: Row, gain: Row, *, alone: bool) -> Row:
    """Returns the finding of a rank that the others wait for because of it. gain: its row of rank_what_if.

    alone: the other ranks do not have most of it.
    """
    title = f"{row['title']}; the others wait for rank {row['rank']}"
    if gain.get("host_pace") and row["finding"] in HOST_WORK:
        told = {**row, "advice": f"{_slow_host(gain)} {row['advice']}".rstrip()}
        return {**told, "title": f"{title}, since {gain['cause']}"} if alone else told
    return {**row, "title": title, "advice": f"{row['advice']} {_ALONE}".lstrip()} if alone else row


def _slow_host(gain: Row) -> str:
    """Returns the advice for a rank on whose host the same operators take longer."""
    return f"{_SLOW_HOST}: rank {gain['rank']} probably runs on a slower or shared core ({gain['cause']})."


def _scaled(row: Row, share: float) -> Row:
    return {**row, **{name: row[name] * share for name in _FIGURES if row[name] is not None}}


def _slow_rank(gain: Row, explained: float) -> Row:
    """Returns a finding on a rank that the others wait for, by its row of rank_what_if.

    explained: its share in other findings, in %.
    """
    left = {**gain, "uncertainty_pct": None}
    return {
        **_scaled(left, 1 - explained / gain["saving_pct"]),
        "finding": SLOW_RANK,
        "guess": False,
        "title": f"The other ranks wait for rank {gain['rank']}" + (f": {gain['cause']}" if gain["cause"] else ""),
        "advice": _slow_host(gain) if gain.get("host_pace") else _ADVICE,
        "evidence": f"with {gain['change']}, the job would gain {gain['saving_pct']:.1f} %: {gain['about']}",
    }


def small_collectives(context: Context) -> Iterator[Finding]:
    """Yields a finding if the GPU waits while the host calls many small collectives."""
    times, found = context.get(time_causes), context.get(rank_collectives)
    steps, idle = times.steps, times.total(*_CAUSES)
    if not steps.steps or not idle or not len(found):
        return
    measured = union(steps.start[~steps.left_out], steps.end[~steps.left_out])
    size = np.array([description.bytes or 0 for description in found.descriptions])[found.description]
    rows = np.flatnonzero((containing(*measured, found.launch) >= 0) & (size > 0) & (size < SMALL_BYTES))
    each = len(rows) / steps.steps
    if each < MANY:
        return
    table = context.trace.table("cpu_op")
    ops = np.flatnonzero(matches(context.trace.strings, _OPERATORS)[table["name"]])
    ops = ops[containing(*measured, table["start"][ops].astype(np.int64)) >= 0]
    inside = np.sort(found.launch[rows])
    start, end = table["start"][ops].astype(np.int64), table.end()[ops].astype(np.int64)
    own = np.searchsorted(inside, end) > np.searchsorted(inside, start)  # calls a small one
    took = union(start[own], end[own]).length()
    needed = np.ceil(size[rows].sum() / steps.steps / BUCKET_BYTES)
    saving = min(int(took * (1 - needed / each)), idle)
    kind = Counter(found.descriptions[number].collective for number in found.description[rows].tolist()).most_common(1)
    frame = _caller(context, inside)
    yield Finding(
        name=SMALL_COLLECTIVES,
        title=f"The GPU is idle while the host calls many small collectives, mostly {kind[0][0]}"
        f"{location_suffix(context, frame)}",
        saving_ns=saving,
        advice="Combine small tensors: use larger buckets (DistributedDataParallel(bucket_cap_mb=…)), reduce gradients "
        "in buckets during the backward pass, run one collective on a flattened tensor or on several at once "
        "(torch.distributed._coalescing_manager), and reduce metrics together every N steps.",
        evidence=f"each step has {each:.0f} collectives smaller than {SMALL_BYTES >> 20} MiB "
        f"({size[rows].mean() / 1024:.4g} KiB on average); the host spent {format_duration(took)} in their operators; "
        f"{needed:.0f} per step would be enough",
        causes=_CAUSES,
        op=heaviest_op(context, ops[own], end[own] - start[own]),
        frame=frame,
    )


def _caller(context: Context, launch: np.ndarray) -> int:
    """Returns a row of python_function: the user's function that calls most of the collectives; -1 if unknown."""
    activity, called = context.get(gpu), context.get(calls)
    call = activity.call[activity.communication & (activity.call >= 0)]
    call = call[np.isin(called.start[call], launch)]
    return function_at(context, called.thread[call], called.start[call], np.ones(len(call)))


# The measured steps that findings are about, and replays of them with a change.


def measured_times(context: Context) -> Ints:
    """Returns for each GPU activity how long (ns) it ran in measured steps."""
    activity, steps = context.get(gpu), context.get(measured_steps)
    chosen = ~steps.left_out
    return union(steps.start[chosen], steps.end[chosen]).within(activity.start, activity.end)


def longest_names(context: Context, chosen: Flags) -> tuple[str, ...]:
    """Returns the names of the chosen GPU activities with the most time."""
    activity, took = context.get(gpu), context.get(measured_times)
    total = sums(activity.name[chosen].astype(np.int64), took[chosen], len(context.trace.strings))
    best = np.argsort(-total, kind="stable")[:TOP_KERNELS]
    return tuple(context.trace.strings[number] for number in best.tolist() if total[number] > 0)


def op_name(context: Context, row: int) -> str:
    """Returns the name of a row of cpu_op; "" for -1."""
    return context.trace.strings[int(context.trace.table("cpu_op")["name"][row])] if row >= 0 else ""


def heaviest_op(context: Context, rows: Ints, weights: AnyArray) -> int:
    """Returns the row of cpu_op with the most weight, of the operator name with the most weight; -1 if there
    is none.
    """
    return _heaviest(context, rows, weights, context.trace.table("cpu_op")["name"])


def function_at(context: Context, thread: AnyArray, moment: Ints, weights: AnyArray) -> int:
    """Returns a row of python_function: the user's function with the most weight at these moments; -1 if none."""
    frames = context.get(python_frames)
    place = frames.innermost(thread.astype(np.uint32), moment)
    user = np.where(place >= 0, frames.user[place], -1) if len(frames.row) else place
    best = _heaviest(context, user, weights, frames.name)
    return int(frames.row[best]) if best >= 0 else -1


def _heaviest(context: Context, rows: Ints, weights: AnyArray, name: AnyArray) -> int:
    """Returns the row with the most weight, of the name with the most weight; -1 if there is none.

    name: of every row, a number into Trace.strings.
    """
    known = rows >= 0
    if not known.any():
        return -1
    rows, weights = rows[known], weights[known]
    names = name[rows]
    mine = names == int(np.argmax(sums(names, weights, len(context.trace.strings))))
    return int(rows[mine][np.argmax(weights[mine])])


def location_suffix(context: Context, frame: int) -> str:
    """Returns a suffix that names where in the user's code a row of python_function is; "" for -1."""
    if frame < 0:
        return ""
    table = context.trace.table("python_function")
    return f", called in {code_place(context.trace.strings[int(table['name'][frame])], int(table['line'][frame]))}"


def with_replay(context: Context, finding: Finding, change: ReplayChange, causes: tuple[str, ...] = CAUSES) -> Finding:
    """Returns the finding with the saving by a replay with the change; unchanged if the steps cannot be replayed.

    causes: whose time it may reduce.
    """
    replay = context.get(step_replay)
    if replay is None:
        return finding
    saving = int(replay.share(change) * context.get(time_causes).steps.measured_ns)
    return replace(finding, saving_ns=saving, causes=causes, replayed=True)


def operators_and_launches(context: Context) -> Union:
    """Returns when the host was in operators or launching calls, on any thread that launches work."""
    called, activity, table, tree = (
        context.get(calls),
        context.get(gpu),
        context.trace.table("cpu_op"),
        context.get(ops),
    )
    launching = unique_values(activity.call[activity.call >= 0])
    outermost = np.zeros(len(table["start"]), np.bool_)
    outermost[tree.row[tree.nested.tree.parent < 0]] = True
    outermost &= np.isin(table["thread"], unique_values(called.thread[launching]))
    return union(
        np.concatenate([table["start"][outermost], called.start[launching]]),
        np.concatenate([table.end()[outermost], called.end[launching]]),
    )


def without_recording(context: Context, finding: Finding) -> Finding:
    """Returns the finding with its saving as a share of the steps' time without the cost of recording.

    Recording costs host time and so causes part of the GPU's idle time; the remaining times are larger shares of the
    rest.
    """
    replay = context.get(step_replay)
    if replay is None or finding.replayed or replay.slowdown <= 1:
        return finding
    factor = replay.slowdown
    if finding.causes and set(finding.causes) <= set(IDLE_CAUSES):
        idle = max(replay.recorded_ns - replay.busy_ns, 1)
        factor *= max(replay.base_ns - replay.busy_ns, 0) / idle
    window = context.get(time_causes).steps.measured_ns
    return replace(finding, saving_ns=min(int(finding.saving_ns * factor), window))


def recording_note(context: Context) -> str | None:
    """Returns a note on the cost of recording, if it is known and large enough."""
    replay = context.get(step_replay)
    if replay is None or replay.slowdown < NOTED:
        return None
    target = context.trace.target
    at_least = "" if target.step_ratio else "at least "
    return (
        f"iterations took {at_least}{target.known_step_ratio:.2f} times as long while recorded; savings are shares of "
        "the time without recording"
    )
