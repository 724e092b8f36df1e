"""What analyses need from a trace, what this one lacks, why, and how to record it."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from kineto_trace.analysis.counters.sampled_counters import sampled_counters
from kineto_trace.analysis.host_time.operator_views import SHAPES
from kineto_trace.analysis.kernels.precision_views import CATEGORY
from kineto_trace.analysis.overview.counter_series_views import counter_series
from kineto_trace.arrays.id_sets import distinct
from kineto_trace.base.quantities import format_duration, format_ranges
from kineto_trace.model.activity_tables import table_of
from kineto_trace.model.context import Context
from kineto_trace.model.source_coverage import SourceCoverage, coverage_note
from kineto_trace.model.target_info import TargetInfo
from kineto_trace.model.trace import API_TABLES, GPU_TABLES, NO_SEQUENCE, NO_STRING, Trace
from kineto_trace.structure.activity_links import gpu, steps, whole_steps
from kineto_trace.structure.call_forests import ARGUMENT as CALL_STACK
from kineto_trace.structure.event_arguments import argument_objects, arguments
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

NEGLIGIBLE = 0.01  # of the window
_FILLED_BY = {  # the first table that a source fills -> what it records
    "kernel": "GPU activities and calls",
    "cpu_op": "operators",
    "python_function": "Python stacks",
    "cpu_instant_event": "allocations",
}
_WARM_UP = "kinetoctl trace --warmup or --warmup-iterations"
_NO_STEPS = "the trace has no step marks"
_NO_MARKS = f"{_NO_STEPS}; without torch's optimizers, call kineto_agent.step() after each step"
_NO_GPU_USED = "this process used no GPU while it was recorded"
_BUFFERS = "kinetoctl trace with a larger --buffer-limit"
ENOUGH = 98.0  # % of rows: those at the edges of a recording always lack something
STEPS = "training steps"
_PROFILER = "torch.profiler.profile"
_TRACE = "kinetoctl trace"
_DEFAULT = f"{_TRACE} with its defaults"
_CALLS = "record cuda_runtime and cuda_driver activities"
_OUR_CALLS = f"{_DEFAULT}, or cuda_runtime and cuda_driver named in --activities, while no other profiler is active"
_QUEUED = "work that was queued before the trace began has no launch in the trace"
_OUR_OPS = f"{_DEFAULT}, or cpu_op named in --activities"
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
    lambda: "figures based on its records",
    kernel="utilization, idle time, shares of GPU time",
    cpu_op="shares of host time by role",
    python_function="time by Python line, CPU time of threads",
)  # by the first table that a source fills
_TYPE_NAMES: dict[Any, str] = {int: "a whole number", float: "a number", str: "a string"}


class MissingPart(NamedTuple):
    """Something that one trace lacks. why: with {time} or {count} for the amount, in ns or a number."""

    what: str
    why: str
    option: str | None
    torch_profiler: str | None = None
    hides: str | None = None
    amount: int = 0

    def together(self, other: "MissingPart") -> "MissingPart":
        """Merges what two ranks lack: the longest of times, the sum of counts."""
        longest, both = max(self.amount, other.amount), self.amount + other.amount
        return self._replace(amount=longest if "{time}" in self.why else both)

    def reason(self) -> str:
        """Returns the reason, with the amount."""
        return self.why.replace("{time}", format_duration(self.amount)).replace("{count}", f"{self.amount:,}")


class PartRows(NamedTuple):
    """How many rows there are, and how many of them have the wanted part."""

    rows: int
    complete: int

    @property
    def share(self) -> float | None:
        """Returns the share of the rows that have it, in %; None without rows."""
        return 100 * self.complete / self.rows if self.rows else None


class TracePart(NamedTuple):
    """Something that a trace may have.

    missing: how to record it in a program that uses torch.profiler.
    with_kinetod: how to record it with kinetoctl trace.
    option: with_kinetod in short, for reports that list it as missing; "" if it is not listed.
    of: the tables that it describes, if it has none of its own.
    kinds: its own tables.
    request: option of a capture, named as in the public `Options`, that records it; "" if none does.
    by_default: recorded without options too, where the process offers it.
    """

    name: str
    needed_for: str
    missing: str
    with_kinetod: str
    find: Callable[[Context], PartRows]
    of_some: bool = False  # possibly no row should have it
    option: str = ""
    of: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    request: str = ""
    by_default: bool = False

    def is_present(self, found: PartRows) -> bool | None:
        """Returns whether a trace with these rows has it; None if no row should have it."""
        if self.of_some and found.share is None:
            return None
        return found.share is not None and found.share >= ENOUGH


def _together(partials: Sequence[tuple[int, Sequence[MissingPart]]]) -> Answer:
    """Combines what several ranks lack: each thing once."""
    found: dict[tuple[object, ...], tuple[MissingPart, list[int]]] = {}
    for rank, lacks in partials:
        for lack in lacks:
            known = found.get(lack[:-1])
            found[lack[:-1]] = (known[0].together(lack), [*known[1], rank]) if known else (lack, [rank])
    rows = [lack for lack, _ in found.values()]
    return Answer(
        {
            "what": [lack.what for lack in rows],
            "option": [lack.option for lack in rows],
            "why": [lack.reason() for lack in rows],
            "hides": [lack.hides for lack in rows],
            "torch_profiler": [lack.torch_profiler for lack in rows],
            "ranks": [format_ranges(ranks) if len(partials) > 1 else None for _, ranks in found.values()],
        }
    )


@view(
    "not_recorded",
    columns(
        ("what", "text", "", "what the trace lacks, entirely or in part"),
        ("option", "text", "", "option of kinetoctl trace that records it; missing if no option does"),
        ("why", "text", "", "why the trace lacks it, as far as is known"),
        ("hides", "text", "", "analyses that are empty or less exact without it"),
        ("torch_profiler", "text", "", "how to record it with torch.profiler; missing for traces from kinetod"),
        ("ranks", "text", "", "ranks that lack it; missing for a single trace"),
    ),
    reduce=_together,
    nothing="the trace has everything that the report uses",
)
def not_recorded(context: Context) -> list[MissingPart]:
    """What a trace lacks, why, and which option of `kinetoctl trace` records it.

    Losses come first: sources that began late or ended early, and records that were dropped or cannot be read. Parts
    that are missing altogether follow. A trace from kinetod states which activity types and options were requested,
    which sources recorded, and why others could not. Traces from other tools state few of their options, so some
    reasons stay unknown. With several ranks, each item appears once, with the longest time or the total number of
    records. The view validate lists everything that a trace may contain.
    """
    return [*_losses(context.trace), *_missing(context)]


def _losses(trace: Trace) -> Iterator[MissingPart]:
    losses = trace.losses
    if trace.is_truncated:
        yield MissingPart("the end of the file", "the file is truncated, and what it lacks may have been there", None)
    for each in trace.coverage:
        yield from _uncovered(each, trace.window_start_ns, trace.window_end_ns)
    dropped = losses.dropped - sum(each.dropped for each in trace.coverage)
    if dropped > 0:
        yield MissingPart("records", "{count} were dropped: buffers were full", _BUFFERS, amount=dropped)
    if losses.undecoded:
        yield MissingPart("records", "{count} could not be decoded", None, amount=losses.undecoded)
    if losses.torn:
        yield MissingPart("the last records", "the daemon ended while they were being recorded", None)


def _uncovered(each: SourceCoverage, start_ns: int, end_ns: int) -> Iterator[MissingPart]:
    what = _FILLED_BY.get(each.kinds[0], each.source)
    least = NEGLIGIBLE * (end_ns - start_ns)
    late = sum(end - start for start, end in each.missing if start <= start_ns)
    early = sum(end - start for start, end in each.missing if end >= end_ns and start > start_ns)
    if late > least:
        yield MissingPart(what, "not recorded in the first {time}", _WARM_UP, amount=late)
    if early > least and not each.dropped:
        yield MissingPart(
            what, "not recorded in the last {time}; kinetoctl captures show has the reason", None, amount=early
        )
    if each.dropped:
        yield MissingPart(what, "{count} records were dropped: buffers were full", _BUFFERS, amount=each.dropped)


def _missing(context: Context) -> Iterator[MissingPart]:
    target = context.trace.target
    by_torch = not target.capture_id and not target.framework.startswith("jax")
    for part in PARTS:
        if not part.option:
            continue
        found = part.find(context)
        # without operators, missing shapes are no loss of their own
        concerns = not part.of or any(len(context.trace.table(kind)) for kind in part.of)
        unsure = context.trace.is_truncated and _is_requested(part, context.trace.target) is not False
        if part.is_present(found) is False and concerns and not unsure:
            why = _why(part, found, context.trace)
            no_steps, no_gpu = part.name == STEPS and not found.rows, why == _NO_GPU_USED
            useless = _refusal(part, context.trace.target) or no_steps or no_gpu
            option = None if useless else part.option
            yield MissingPart(part.name, why, option, part.missing if by_torch else None, part.needed_for)


def _refusal(part: TracePart, target: TargetInfo) -> str:
    """Returns why the process could not record it; "" if it could, or if the trace has no reason."""
    return next((why for kind, why in target.not_recorded.items() if table_of(kind) in part.kinds), "")


def _is_requested(part: TracePart, target: TargetInfo) -> bool | None:
    """Returns whether it was requested by name, as an option or by default; None if the trace does not contain that."""
    if part.request and target.options.get(part.request):
        return True
    if target.activity_types is None or not (part.kinds or part.request):
        return None
    if target.activity_types:
        return not set(part.kinds).isdisjoint(map(table_of, target.activity_types))
    return part.by_default or not part.request


def _why(part: TracePart, found: PartRows, trace: Trace) -> str:
    ours = bool(trace.target.capture_id)
    requested = _is_requested(part, trace.target)
    if found.complete:
        return f"{found.complete:,} of {found.rows:,} have it"
    if part.name == STEPS:
        return "no step was recorded from beginning to end" if found.rows else _NO_MARKS if ours else _NO_STEPS
    if refusal := _refusal(part, trace.target):
        return f"could not be recorded: {refusal}"
    if requested is False:
        named = ", ".join(trace.target.activity_types or ()) if part.by_default or not part.request else ""
        return f"not requested: --activities named only {named}" if named else "not requested"
    if any(not set(part.kinds).isdisjoint(each.kinds) for each in trace.coverage):
        return "its source recorded, but delivered no data"
    if requested and (trace.target.activity_types or trace.target.options.get(part.request)):
        return "requested, but no data was delivered"
    if part.request and not requested and not (ours and part.by_default):
        return "not requested" if ours else "unknown: the trace does not state whether it was requested"
    if ours and trace.coverage and part.kinds:
        return _NO_GPU_USED if part.kinds == GPU_TABLES else "no source recorded it"
    return "unknown: the trace does not state why it is missing"


def _table(kind: str) -> Callable[[Context], PartRows]:
    def find(context: Context) -> PartRows:
        count = len(context.trace.table(kind))
        return PartRows(count, count)

    return find


def _activities(context: Context) -> PartRows:
    count = len(context.get(gpu))
    return PartRows(count, count)


def _calls(context: Context) -> PartRows:
    count = sum(len(context.trace.table(kind)) for kind in API_TABLES)
    return PartRows(count, count)


def _launched(context: Context) -> PartRows:
    return PartRows(len(context.get(gpu)), int(np.count_nonzero(context.get(gpu).call >= 0)))


def _attributed(context: Context) -> PartRows:
    """Counts launched activities."""
    work = context.get(gpu)
    return PartRows(int(np.count_nonzero(work.call >= 0)), int(np.count_nonzero((work.call >= 0) & (work.op >= 0))))


def _steps(context: Context) -> PartRows:
    """Counts recorded steps; the first and the last one are incomplete in most recordings by time."""
    count = len(context.get(whole_steps))
    return PartRows(count or len(context.get(steps)), count)


def _shapes(context: Context) -> PartRows:
    count = len(context.trace.table("cpu_op"))
    return PartRows(count, count if _some_operator_has(context, *SHAPES) else 0)


def _python(context: Context) -> PartRows:
    """Counts the Python stacks; in older files, those of operators."""
    count = len(context.trace.table("python_function"))
    if not count and _some_operator_has(context, CALL_STACK):
        count = len(context.trace.table("cpu_op"))
    return PartRows(count, count)


def _some_operator_has(context: Context, *arguments: str) -> bool:
    """Returns whether any operator has one of these arguments, which have no column of their own."""
    strings, wanted = context.trace.strings, [f'"{name}":' for name in arguments]
    inputs = context.trace.table("cpu_op")["inputs"]
    texts = distinct(inputs[inputs != NO_STRING]).tolist()
    return any(name in strings[number] for number in texts for name in wanted)


def _sequences(context: Context) -> PartRows:
    sequence = context.trace.table("cpu_op")["sequence"]
    return PartRows(len(sequence), len(sequence) if (sequence != NO_SEQUENCE).any() else 0)


def _collectives(context: Context) -> PartRows:
    work = context.get(gpu)
    rows = work.row[work.communication]
    if not len(context.trace.table("kernel").origin):
        return PartRows(len(rows), 0)
    places, _ = argument_objects(context, "kernel", "Collective name")
    return PartRows(len(rows), int(np.count_nonzero(places[rows] >= 0)))


def _ranges(context: Context) -> PartRows:
    other, names = context.trace.table("other"), context.trace.strings
    wanted = np.array([*(text == CATEGORY for text in names), False], np.bool_)
    count = int(np.count_nonzero(wanted[other["category"]]))
    return PartRows(count, count)


def _counters(context: Context) -> PartRows:
    count = sum(len(series.time) for series in counter_series(context))
    return PartRows(count, count)


def _hardware_counters(context: Context) -> PartRows:
    count = sum(map(len, context.get(sampled_counters)))
    return PartRows(count, count)


def _events(context: Context) -> PartRows:
    other = context.trace.table("other")
    named = int(np.count_nonzero(other["phase"] == ord("M"))) if len(other) else 0  # processes and threads
    count = sum(map(len, context.trace.tables.values())) - named
    return PartRows(count, count)


def _rank(context: Context) -> PartRows:
    return PartRows(1, int(context.trace.target.rank is not None))


@view(
    "validate",
    columns(
        ("part", "text", "", "what the trace should contain"),
        (
            "ok",
            "bool",
            "",
            f"whether at least {ENOUGH:.0f} % of the rows that should have it do; missing if no row should have it",
        ),
        ("rows", "int", "", "number of rows of this kind, or of rows that should have it"),
        ("complete_pct", "float", "%", "share of these rows that have it; missing without rows"),
        ("needed_for", "text", "", "analyses that are empty or less exact without it"),
        ("advice", "text", "", "how to record it; missing if there is nothing to do"),
    ),
)
def validate(context: Context) -> Answer:
    """What analyses need from a trace, whether this trace has it, and how to record it if not.

    An argument of a type that readers of Kineto traces do not expect (see HTA's validate_trace_format) has a row of its
    own. The notes list what was lost when the trace was recorded or read. Advice names options of kinetoctl for traces
    that kinetod recorded, and options of torch.profiler for all others.
    """
    ours = bool(context.trace.target.capture_id)
    rows: list[tuple[str, bool | None, int, float | None, str, str | None]] = []
    for part in PARTS:
        found = part.find(context)
        good = part.is_present(found)
        advice = (part.with_kinetod if ours else part.missing) if good is False else None
        rows.append((part.name, good, found.rows, found.share, part.needed_for, advice))
    rows += [*_coverage(context), *_wrong_types(context)]
    return validate.answer(rows, _loss_notes(context))


def _coverage(context: Context) -> list[tuple[str, bool, int, float | None, str, str | None]]:
    """Returns one row for each source that states when it recorded: its share of the window."""
    trace = context.trace
    found: list[tuple[str, bool, int, float | None, str, str | None]] = []
    length = max(trace.window_end_ns - trace.window_start_ns, 1)
    for each in trace.coverage:
        count = sum(len(trace.table(kind)) for kind in each.kinds)
        share = 100 * max(1 - each.missing_ns / length, 0.0)
        advice = None if share >= ENOUGH else _LONGER
        found.append((f"coverage by {each.source}", share >= ENOUGH, count, share, _SHARES_OF[each.kinds[0]], advice))
    return found


def _loss_notes(context: Context) -> list[str]:
    trace, losses, notes = context.trace, context.trace.losses, list(context.trace.notes)
    found = [coverage_note(each, trace.window_start_ns, trace.window_end_ns) for each in trace.coverage]
    notes += [note for note in found if note]
    for count, one, several, what in (
        (losses.dropped, "record was", "records were", "dropped during the recording: buffers were full"),
        (losses.undecoded, "record", "records", "could not be read"),
        (losses.torn, "chunk was", "chunks were", "cut off: the daemon ended during the recording"),
    ):
        if count:
            notes.append(f"{count:,} {one if count == 1 else several} {what}")
    return notes


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
            advice = f"{str(value)[:40]!r} is not {_TYPE_NAMES[wanted]}, so it counts as missing"
            rows.append((f"{kind}: argument {key}", False, len(table), share, "views that read this argument", advice))
    return rows


PARTS = (
    TracePart(
        "GPU activities",
        "all views of GPU time",
        "record CUDA activities",
        f"{_DEFAULT}, or kernel, gpu_memcpy and gpu_memset named in --activities, while the process uses its GPU",
        _activities,
        option=_DEFAULT,
        kinds=GPU_TABLES,
    ),
    TracePart(
        "calls of the runtime and driver",
        "launches, queue lengths, idle time by cause, operators' GPU time",
        _CALLS,
        _OUR_CALLS,
        _calls,
        option=_DEFAULT,
        of=GPU_TABLES,
        kinds=API_TABLES,
    ),
    TracePart(
        "launches of GPU activities",
        "launches, queue lengths, host_wait in idle time, operators' GPU time",
        f"{_CALLS}; {_QUEUED}",
        f"{_OUR_CALLS}; {_QUEUED}",
        _launched,
    ),
    TracePart(
        "operators",
        "operator views, delays, sequences, modules",
        "record CPU activities",
        _OUR_OPS,
        _table("cpu_op"),
        option=_DEFAULT,
        kinds=("cpu_op",),
    ),
    TracePart(
        "operators around launches",
        "operators' GPU time",
        "launches outside any operator come from other libraries",
        "launches outside any operator come from other libraries",
        _attributed,
        of_some=True,
    ),
    TracePart(
        STEPS,
        "all views by step",
        "call the profiler's step() after each step, and record at least one step from beginning to end",
        "trace for longer than a step; without torch's optimizers, call kineto_agent.step() after each step",
        _steps,
        option=f"{_TRACE} with a longer --duration",
    ),
    TracePart(
        "input shapes",
        "operators by shape, matrix sizes, findings on number types and layouts",
        f"use {_PROFILER}(record_shapes=True)",
        f"{_TRACE} --record-shapes",
        _shapes,
        option=f"{_TRACE} --record-shapes",
        of=("cpu_op",),
        request="record_shapes",
    ),
    TracePart(
        "links from backward to forward operators",
        "backward modules, recomputation",
        "record CPU activities",
        _OUR_OPS,
        _sequences,
    ),
    TracePart(
        "Python stacks",
        "call stacks, modules, flame graphs, host activity outside any operator",
        f"use {_PROFILER}(with_stack=True)",
        f"{_TRACE} --with-stack, or --with-stack=trace for every call",
        _python,
        option=f"{_TRACE} --with-stack",
        kinds=("python_function",),
        request="with_stack",
        by_default=True,
    ),
    TracePart(
        "annotations",
        "time by annotation",
        "use torch.profiler.record_function",
        "mark ranges of the program with torch.profiler.record_function, which costs little",
        _table("user_annotation"),
    ),
    TracePart(
        "synchronisations",
        "critical path",
        "record cuda_sync activities: _ExperimentalConfig(enable_cuda_sync_events=True)",
        f"{_TRACE} --activities …,cuda_sync, which slows every CUDA call",
        _table("cuda_sync"),
    ),
    TracePart(
        "allocations",
        "memory views",
        f"use {_PROFILER}(profile_memory=True)",
        f"{_TRACE} --memory",
        _table("cpu_instant_event"),
        option=f"{_TRACE} --memory",
        kinds=("cpu_instant_event",),
        request="profile_memory",
    ),
    TracePart(
        "arguments of collectives",
        "bandwidth and skew of collectives",
        f"use {_PROFILER}(record_shapes=True) and PyTorch 2.2 or later: older versions do not name collectives",
        f"{_OUR_OPS}, and PyTorch 2.2 or later: older versions do not name collectives",
        _collectives,
        option=_DEFAULT,
        of=("kernel",),
        of_some=True,
    ),
    TracePart(
        "profiled ranges",
        "hardware counters of operators",
        "use CUPTI's range profiler",
        "kinetod does not record the ranges of CUPTI's range profiler",
        _ranges,
        of_some=True,
    ),
    TracePart(
        "counters",
        "counters over time",
        "kinetod records the Linux kernel's counters; a file can have its own",
        _DEFAULT,
        _counters,
        of_some=True,
    ),
    TracePart(
        "hardware counters",
        "how busy the GPU's units and links were, roofline",
        "kinetod records hardware counters",
        f"{_TRACE} --counters",
        _hardware_counters,
        of_some=True,
    ),
    TracePart(
        "events",
        "all views",
        "record any activity",
        f"{_DEFAULT}, while the process works",
        _events,
    ),
    TracePart(
        "rank",
        "views over several ranks",
        "start the job with torch.distributed, or put the rank into the file name, for example rank3.json",
        "start the job with torchrun or Slurm, which set the rank in environment variables",
        _rank,
    ),
)
