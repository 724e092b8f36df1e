"""What a trace has and what it lacks, and which analyses that concerns."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kineto_trace.analysis.kernels.counter_views import CATEGORY
from kineto_trace.model.context import Context
from kineto_trace.model.source_coverage import coverage_note
from kineto_trace.model.trace import API_TABLES, NO_SEQUENCE, NO_STRING
from kineto_trace.structure.activity_links import gpu, steps, whole_steps
from kineto_trace.structure.event_arguments import argument_objects, arguments
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

_ENOUGH = 98.0  # % of rows: those at the edges of a recording always miss something
# Types that HTA expects of arguments (its level "standard"): whole numbers, numbers, texts.
_TYPES: dict[str, type[int] | type[float] | type[str]] = {
    "stream": int,
    "correlation": int,
    "bytes": int,
    "memory bandwidth (GB/s)": float,
    "wait_on_stream": int,
    "wait_on_cuda_event_record_corr_id": int,
    "External id": int,
    "Python id": int,
    "Python parent id": int,
    "Collective name": str,
    "In msg nelems": int,
    "Out msg nelems": int,
    "dtype": str,
    "Group size": int,
    "Rank": int,
}
_LONGER = "request a larger buffer limit, a shorter capture or fewer activity types"
_SHARES_OF = defaultdict(
    lambda: "figures of what it records",
    kernel="utilization, idle time, shares of the GPU's time",
    cpu_op="shares of the host's time by role",
    python_function="time by line of Python, CPU time of threads",
)  # by the first table that a source fills
_TYPE_NAMES: dict[Any, str] = {int: "a whole number", float: "a number", str: "a text"}


class _Found(NamedTuple):
    """How many rows there are, and how many of them have what is wanted."""

    rows: int
    complete: int


class _Part(NamedTuple):
    """Something that a trace may have.

    missing: what to do if it does not, in a program that uses torch.profiler; with_kinetod: for traces of kinetod.
    """

    name: str
    needed_for: str
    missing: str
    with_kinetod: str
    find: Callable[[Context], _Found]
    of_some: bool = False  # it may well be that no row should have it


@view(
    "validate",
    columns(
        ("part", "text", "", "what the trace should contain"),
        (
            "ok",
            "bool",
            "",
            f"it is there, for at least {_ENOUGH:.0f} % of the rows that should have it; missing: no row should",
        ),
        ("rows", "int", "", "number of rows that are of this kind or should have it"),
        ("complete_pct", "float", "%", "share of these rows that have it; missing without rows"),
        ("needed_for", "text", "", "analyses that are empty or less exact without it"),
        ("advice", "text", "", "how to record it; missing if there is nothing to do"),
    ),
)
def validate(context: Context) -> Answer:
    """What analyses need from a trace, whether this trace has it, and how to record it if not.

    Arguments whose value has a different type than readers of Kineto traces expect (HTA's validate_trace_format) have a
    row of their own. The notes say what was lost when the trace was recorded or read. Advice names options of kinetoctl
    for traces that kinetod recorded, otherwise those of torch.profiler.
    """
    ours = bool(context.trace.target.capture_id)
    rows: list[tuple[str, bool | None, int, float | None, str, str | None]] = []
    for part in _PARTS:
        found = part.find(context)
        share = 100 * found.complete / found.rows if found.rows else None
        good = None if part.of_some and share is None else share is not None and share >= _ENOUGH
        advice = (part.with_kinetod if ours else part.missing) if good is False else None
        rows.append((part.name, good, found.rows, share, part.needed_for, advice))
    rows += [*_coverage(context), *_wrong_types(context)]
    names = [column.name for column in validate.columns]
    return Answer({name: [row[place] for row in rows] for place, name in enumerate(names)}, _losses(context))


def _coverage(context: Context) -> list[tuple[str, bool, int, float | None, str, str | None]]:
    """One row for each source that states when it recorded: its share of the window."""
    trace = context.trace
    found: list[tuple[str, bool, int, float | None, str, str | None]] = []
    length = max(trace.window_end_ns - trace.window_start_ns, 1)
    for each in trace.coverage:
        count = sum(len(trace.table(kind)) for kind in each.kinds)
        share = 100 * max(1 - each.missing_ns / length, 0.0)
        advice = None if share >= _ENOUGH else _LONGER
        found.append((f"coverage by {each.source}", share >= _ENOUGH, count, share, _SHARES_OF[each.kinds[0]], advice))
    return found


def _losses(context: Context) -> list[str]:
    trace, losses, notes = context.trace, context.trace.losses, list(context.trace.notes)
    found = [coverage_note(each, trace.window_start_ns, trace.window_end_ns) for each in trace.coverage]
    notes += [note for note in found if note]
    for count, what in (
        (losses.dropped, "were dropped while it was recorded: buffers were full"),
        (losses.undecoded, "could not be read"),
        (losses.torn, "chunks were cut off: the daemon ended while it was recorded"),
    ):
        if count:
            notes.append(f"{count:,} records {what}" if "chunks" not in what else f"{count:,} {what}")
    return notes


def _table(kind: str) -> Callable[[Context], _Found]:
    def find(context: Context) -> _Found:
        count = len(context.trace.table(kind))
        return _Found(count, count)

    return find


def _activities(context: Context) -> _Found:
    count = len(context.get(gpu))
    return _Found(count, count)


def _calls(context: Context) -> _Found:
    count = sum(len(context.trace.table(kind)) for kind in API_TABLES)
    return _Found(count, count)


def _launched(context: Context) -> _Found:
    return _Found(len(context.get(gpu)), int(np.count_nonzero(context.get(gpu).call >= 0)))


def _attributed(context: Context) -> _Found:
    """Of the launched activities."""
    work = context.get(gpu)
    return _Found(int(np.count_nonzero(work.call >= 0)), int(np.count_nonzero((work.call >= 0) & (work.op >= 0))))


def _steps(context: Context) -> _Found:
    """Of those that were recorded; the first and the last one are incomplete in most recordings by time."""
    count = len(context.get(whole_steps))
    return _Found(count or len(context.get(steps)), count)


def _shapes(context: Context) -> _Found:
    inputs = context.trace.table("cpu_op")["inputs"]
    return _Found(len(inputs), len(inputs) if (inputs != NO_STRING).any() else 0)


def _sequences(context: Context) -> _Found:
    sequence = context.trace.table("cpu_op")["sequence"]
    return _Found(len(sequence), len(sequence) if (sequence != NO_SEQUENCE).any() else 0)


def _collectives(context: Context) -> _Found:
    work = context.get(gpu)
    rows = work.row[work.communication]
    if not len(context.trace.table("kernel").origin):
        return _Found(len(rows), 0)
    places, _ = argument_objects(context, "kernel", "Collective name")
    return _Found(len(rows), int(np.count_nonzero(places[rows] >= 0)))


def _ranges(context: Context) -> _Found:
    other, names = context.trace.table("other"), context.trace.strings
    wanted = np.array([*(text == CATEGORY for text in names), False], np.bool_)
    count = int(np.count_nonzero(wanted[other["category"]]))
    return _Found(count, count)


def _rank(context: Context) -> _Found:
    return _Found(1, int(context.trace.target.rank is not None))


def _wrong_types(context: Context) -> list[tuple[str, bool, int, float | None, str, str | None]]:
    rows: list[tuple[str, bool, int, float | None, str, str | None]] = []
    for kind, table in context.trace.tables.items():
        if not table.origin and "inputs" not in table.columns:
            continue
        found = arguments(context, kind)
        for key, wanted in _TYPES.items():
            accepted = (int, float) if wanted is float else wanted
            wrong = [value is not None and not isinstance(value, accepted) for value in found.values(key)]
            if not any(wrong):
                continue
            count = int(np.count_nonzero(np.array([*wrong, False])[found.text]))
            value = next(value for value, bad in zip(found.values(key), wrong, strict=True) if bad)
            share = 100 * (1 - count / len(table))
            advice = f"{str(value)[:40]!r} is not {_TYPE_NAMES[wanted]}: it counts as missing"
            rows.append((f"{kind}: argument {key}", False, len(table), share, "what reads this argument", advice))
    return rows


_PROFILER = "torch.profiler.profile"
_TRACE = "kinetoctl trace"
_CALLS = "record cuda_runtime and cuda_driver activities"
_OUR_CALLS = f"{_TRACE} without --activities, or with cuda_runtime and cuda_driver among them, without another profiler"
_QUEUED = "work that was queued before the trace began has no launch in it"
_OUR_OPS = f"{_TRACE} without --activities, or with cpu_op among them"
_PARTS = (
    _Part(
        "GPU activities",
        "all views of the GPU's time",
        "record CUDA activities",
        f"{_TRACE} without --activities, or with kernel,gpu_memcpy,gpu_memset, while the process uses its GPU",
        _activities,
    ),
    _Part(
        "calls of the runtime and driver",
        "launches, queue lengths, idle time by cause, operators' GPU time",
        _CALLS,
        _OUR_CALLS,
        _calls,
    ),
    _Part(
        "launches of GPU activities",
        "launches, queue lengths, host_wait in idle time, operators' GPU time",
        f"{_CALLS}; {_QUEUED}",
        f"{_OUR_CALLS}; {_QUEUED}",
        _launched,
    ),
    _Part(
        "operators", "operator views, delays, sequences, modules", "record CPU activities", _OUR_OPS, _table("cpu_op")
    ),
    _Part(
        "operators around launches",
        "operators' GPU time",
        "launches outside operators are those of other libraries",
        "launches outside operators are those of other libraries",
        _attributed,
        of_some=True,
    ),
    _Part(
        "training steps",
        "all views by step",
        "call step() of the profiler after each step, and record at least one step from beginning to end",
        "trace for longer than a step; programs without torch's optimizers call kineto_agent.step() after each step",
        _steps,
    ),
    _Part(
        "input shapes",
        "operators by shape, matrix sizes",
        f"use {_PROFILER}(record_shapes=True)",
        f"{_TRACE} --record-shapes",
        _shapes,
    ),
    _Part(
        "links from backward to forward operators",
        "backward modules, recomputation",
        "record CPU activities",
        _OUR_OPS,
        _sequences,
    ),
    _Part(
        "Python calls",
        "call stacks, modules, flame graphs",
        f"use {_PROFILER}(with_stack=True)",
        f"{_TRACE} --with-stack, or --with-stack=trace for every call",
        _table("python_function"),
    ),
    _Part(
        "annotations",
        "time by annotation",
        "use torch.profiler.record_function",
        "mark ranges of the program with torch.profiler.record_function, which costs little",
        _table("user_annotation"),
    ),
    _Part(
        "synchronisations",
        "critical path",
        "record cuda_sync activities: _ExperimentalConfig(enable_cuda_sync_events=True)",
        f"{_TRACE} --activities …,cuda_sync, which slows every CUDA call",
        _table("cuda_sync"),
    ),
    _Part(
        "allocations",
        "memory views",
        f"use {_PROFILER}(profile_memory=True)",
        f"{_TRACE} --memory",
        _table("cpu_instant_event"),
    ),
    _Part(
        "arguments of collectives",
        "bandwidth and skew of collectives",
        "record_shapes=True, and a PyTorch that names collectives (2.2 or later)",
        f"{_OUR_OPS}, and a PyTorch that names collectives (2.2 or later)",
        _collectives,
        of_some=True,
    ),
    _Part(
        "profiled ranges",
        "hardware counters with operators",
        "use CUPTI's range profiler",
        "kinetod does not record hardware counters",
        _ranges,
        of_some=True,
    ),
    _Part(
        "rank",
        "views over several ranks",
        "start the job with torch.distributed; or name the rank",
        "start the job with torchrun or Slurm, whose variables state the rank",
        _rank,
    ),
)
