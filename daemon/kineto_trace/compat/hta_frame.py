"""The events of a trace as HTA 0.6.1 (traceinsight) sees them: for figures with compat=HTA.

Theory of operation
    HTA reads a Chrome trace into one frame, and all its figures are figures of that frame. Its rules, which are
    followed here with their faults:

    - Rows without a duration or a category are no events, nor are those of the category "Trace".
    - Times are microseconds. If any event of the file has no time, or not an integer, every event begins at the next
      whole microsecond and ends at the last one before its end, so that shorter events may last 0 or -1 us. The sums
      are made with 64-bit floats, of times as they are in the file.
    - "stream" and "correlation" are the arguments of these names, -1 if there are none. A GPU event is a row with a
      stream: that makes cuda_sync one, and gpu_user_annotation none.
    - A "GPU side" row has a stream and a correlation, or is called "Event Sync" or "Context Sync"; all others are
      the "CPU side", gpu_user_annotation too. Rows of the two sides with one correlation are linked.
    - A CPU row belongs to the last named step in which it begins, a GPU row to that of its link, else -1. A link to the
      first row of the file (its number is 0) does not count for steps and queues; a row with a correlation and no
      partner has this link, which only the causes of idle time use.
    - If rows of at least two different ProfilerSteps are there, the CPU side loses everything from the start of the
      last one on (of a gpu_user_annotation of that name, where there is one: it starts later), and the GPU side
      what has no partner left; a GPU row with several partners is there several times.

    Times are kept as int64 Unix ns, multiples of 1000 after rounding, so that analyses are the same code for both.
    Rows are in the order of the file, which decides between equal times; those of a capture, table by table.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from kineto_trace.analysis.gpu_time_views import GpuEvents
from kineto_trace.arrays.id_sets import lookup, unique_values
from kineto_trace.base.array_types import NOTHING, AnyArray, AnyInts, Flags, Floats, Ints, Ints32, UInts8
from kineto_trace.errors import ViewError
from kineto_trace.formats.chrome.chrome_writer import base_ns
from kineto_trace.kernel_traits.kernel_types import hta_types
from kineto_trace.model.activity_tables import DUR, DUR_REAL, TS, TS_INTEGER, TS_REAL
from kineto_trace.model.context import Context
from kineto_trace.model.target_info import base_ns as head_base_ns
from kineto_trace.model.trace import GPU_TABLES, NO_STRING, Table, Trace
from kineto_trace.structure.event_arguments import argument

# In the order of concatenation: number into it is HtaFrame.kind.
KINDS = (
    "cpu_op",
    "user_annotation",
    "python_function",
    "cuda_runtime",
    "cuda_driver",
    *sorted(GPU_TABLES),
    "cuda_sync",
    "gpu_user_annotation",
    "overhead",
    "other",
)
KIND = {name: number for number, name in enumerate(KINDS)}
# Categories in HTA's rules, in its spelling: it ignores other spellings and older names.
_CATEGORIES = {
    **{kind: (kind,) for kind in KINDS},
    "gpu_memcpy": ("gpu_memcpy", "Memcpy"),
    "gpu_memset": ("gpu_memset", "Memset"),
    "kernel": ("kernel", "Kernel"),
    "other": ("mtia_ccp_events",),
}
_STEP = re.compile(r"ProfilerStep#(\d{1,18})(?!\d)")
_STEP_OF_ITERATION = re.compile(r"ProfilerStep\s*#\s*(\d{1,18})(?!\d)")
_SYNC_NAMES = ("Event Sync", "Context Sync")
_US = 1000


class HtaError(ViewError):
    """HTA itself fails on this trace, so there are no figures to reproduce."""

    @property
    def note(self) -> str:
        """Returns the note on the exact figures that replace HTA's."""
        return f"HTA fails on this trace ({self}), so the exact figures are shown"


@dataclass(frozen=True, slots=True)
class HtaFrame:
    """HTA's rows. Times in Unix ns, whole microseconds if the file's times had to be rounded.

    kind: number into KINDS.
    row: in that table.
    exact: its category is one that HTA's rules name.
    pid, tid: for GPU rows, device and stream.
    stream, correlation: -1 for none.
    leads: whether it is the first row of the file.
    link: place in this frame of the row of the other side, or NOTHING.
    iteration: -1 for none.
    origin_ns: the first start before anything was dropped: HTA counts times from there.
    time_type: of its times, the smallest that holds those of the file.
    """

    kind: UInts8
    row: Ints
    exact: Flags
    start: Ints
    duration: Ints
    name: Ints32
    pid: Ints
    tid: Ints
    stream: Ints
    correlation: Ints
    leads: Flags
    link: Ints
    iteration: Ints
    origin_ns: int
    time_type: str

    def __len__(self) -> int:
        return len(self.kind)

    def links_to_first(self) -> Flags:
        """Returns whether the link of each row leads to the first row of the file."""
        found: Flags = np.append(self.leads, False)[self.link]
        return found

    @property
    def end(self) -> Ints:
        """Returns the ends in Unix ns; an end may lie before its start."""
        return self.start + self.duration

    def take(self, places: AnyArray) -> "HtaFrame":
        """Returns these rows, or those under this mask; links still refer to this frame."""
        columns = {name: getattr(self, name)[places] for name in _ARRAYS}
        return HtaFrame(**columns, origin_ns=self.origin_ns, time_type=self.time_type)

    def order(self, time: Ints) -> Ints:
        """Returns the order of starts (Unix ns) by HTA's sort: numpy's quicksort, which is unstable and depends on the
        type.
        """
        return np.argsort(self.counted(time), kind="quicksort")

    def counted(self, time: Ints) -> AnyInts:
        """Starts as HTA has them: microseconds from the first one on, in its type."""
        found: AnyInts = ((time - self.origin_ns) // _US).astype(self.time_type)
        return found


_ARRAYS = tuple(field.name for field in fields(HtaFrame) if field.name not in ("origin_ns", "time_type"))


def hta_frame(context: Context) -> HtaFrame:
    """Returns all rows that HTA keeps after loading."""
    frame, strings = context.get(hta_rows), context.trace.strings
    is_step = step_numbers(strings, frame.name, _STEP) >= 0
    if len(unique_values(frame.name[is_step])) < 2:
        return frame
    return _without_last_step(frame, _gpu_side(strings, frame.stream, frame.correlation, frame.name), is_step)


def hta_rows(context: Context) -> HtaFrame:
    """Returns all rows including those of the last step, which HTA's TraceDiff compares."""
    trace = context.trace
    parts = [_rows(context, kind) for kind in KINDS]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    if all("place" in trace.table(kind).origin for kind in KINDS if len(trace.table(kind))):
        order = np.argsort(np.concatenate([_places(trace, part) for part in parts]), kind="stable")
        columns = {name: column[order] for name, column in columns.items()}
    columns["start"], columns["duration"] = _rounded(trace, columns)
    gpu_side = _gpu_side(trace.strings, columns["stream"], columns["correlation"], columns["name"])
    link = _links(columns["correlation"], gpu_side)
    numbers = step_numbers(trace.strings, columns["name"])
    origin_ns = int(columns["start"].min()) if len(link) else 0
    return HtaFrame(
        **columns,
        link=link,
        iteration=_iterations(columns, link, numbers),
        origin_ns=origin_ns,
        time_type=_time_type(trace, columns["start"]),
    )


def _rows(context: Context, kind: str) -> dict[str, AnyArray]:
    trace, table = context.trace, context.trace.table(kind)
    kept = np.arange(len(table), dtype=np.int64)
    if table.origin:
        is_event = (table.origin["present"] & np.uint64(DUR) != 0) & (table.origin["category"] != NO_STRING)
        is_event &= ~_named(trace, "Trace")[table.origin["category"]]
        kept = np.flatnonzero(is_event)
    elif kind == "other":
        kept = kept[:0]
    pid, tid = _tracks(trace, table)
    rows: dict[str, AnyArray] = {
        "kind": np.full(len(table), KIND[kind], np.uint8),
        "row": np.arange(len(table), dtype=np.int64),
        "start": table["start"],
        "duration": table["duration"],
        "name": table["name"],
        "pid": pid,
        "tid": tid,
        "stream": _argument(context, table, "stream"),
        "correlation": _argument(context, table, "correlation"),
        "exact": _exact(trace, table),
        "leads": table.origin["place"] == 0 if "place" in table.origin else np.zeros(len(table), np.bool_),
    }
    return {name: column[kept] for name, column in rows.items()}


def _exact(trace: Trace, table: Table) -> Flags:
    if not table.origin:
        return np.ones(len(table), np.bool_)
    names = _CATEGORIES[table.kind]
    found: Flags = np.array([*(text in names for text in trace.strings), False])[table.origin["category"]]
    return found


def _places(trace: Trace, part: Mapping[str, AnyArray]) -> Ints:
    """Returns the places of rows in the file."""
    if not len(part["row"]):
        return part["row"]
    places: Ints = trace.table(KINDS[int(part["kind"][0])]).origin["place"][part["row"]].astype(np.int64)
    return places


def _named(trace: Trace, name: str) -> Flags:
    """Returns for each string whether it is this one, and one more value at the end, for none."""
    return np.array([*(text == name for text in trace.strings), False], np.bool_)


def _tracks(trace: Trace, table: Table) -> tuple[Ints, Ints]:
    """Returns pid and tid; for GPU rows device and stream."""
    if table.origin:
        return table.origin["pid"].astype(np.int64), table.origin["tid"].astype(np.int64)
    if "thread" in table.columns:
        return np.full(len(table), trace.target.pid, np.int64), table["thread"].astype(np.int64)
    if "stream" in table.columns:
        return table["device"].astype(np.int64), table["stream"].view(np.int32).astype(np.int64)
    return np.full(len(table), NOTHING, np.int64), np.zeros(len(table), np.int64)


def _argument(context: Context, table: Table, name: str) -> Ints:
    """Returns streams or correlations; in captures -1 for CUPTI's number of no stream, which older files contain."""
    missing = np.full(len(table), NOTHING, np.int64)
    if table.origin:
        without_column = name not in table.columns and table.kind != "other"
        if without_column and not any(f'"{name}"' in text for text in context.trace.strings):
            return missing
        found = argument(context, table.kind, name)
        return np.where(np.isfinite(found), np.trunc(found), NOTHING).astype(np.int64)
    if name not in table.columns or table.kind == "gpu_user_annotation":
        return missing
    values = table[name].astype(np.int64)
    return np.where(values >= 1 << 31, values - (1 << 32), values) if name == "stream" else values


def _rounded(trace: Trace, columns: Mapping[str, AnyArray]) -> tuple[Ints, Ints]:
    """Rounds starts up and ends down to microseconds, unless all times of the file are integers."""
    start, duration = columns["start"], columns["duration"]
    if not _has_floats(trace):
        return start, duration
    base = _base(trace)
    ts, length = _microseconds(start - base), _microseconds(duration)
    for kind in KINDS:
        origin = trace.table(kind).origin
        if "ts_real" in origin or "dur_real" in origin:
            rows = np.flatnonzero(columns["kind"] == KIND[kind])
            places = columns["row"][rows]
            for times, bit, name in ((ts, TS_REAL, "ts_real"), (length, DUR_REAL, "dur_real")):
                if name in origin:
                    real = origin["present"][places] & np.uint64(bit) != 0
                    times[rows[real]] = origin[name][places[real]]
    end = np.floor(ts + length)
    first = np.ceil(ts)
    return base + first.astype(np.int64) * _US, (end - first).astype(np.int64) * _US


def _base(trace: Trace) -> int:
    """Returns the origin of the times in the file, Unix ns."""
    return base_ns(trace.window_start_ns) if trace.head is None else head_base_ns(trace.head, [])


def _time_type(trace: Trace, start: Ints) -> str:
    """Returns the smallest integer type for the starts in microseconds."""
    if not len(start):
        return "int64"
    low, high = ((int(value) - _base(trace)) // _US for value in (start.min(), start.max()))
    types = ("int8", "int16", "int32")
    return next((name for name in types if np.iinfo(name).min <= low and high <= np.iinfo(name).max), "int64")


def _has_floats(trace: Trace) -> bool:
    """Returns whether any event's time is missing or not an integer, so that HTA has them all as floats."""
    if trace.head is None:
        return True
    integer = np.uint64(TS | TS_INTEGER)
    tables = [table for table in trace.tables.values() if "present" in table.origin]
    return any(bool((table.origin["present"] & integer != integer).any()) for table in tables)


def _microseconds(ns: Ints) -> Floats:
    """Returns this time in microseconds as the float that a JSON reader makes of it."""
    return ns // _US + (ns % _US) / _US


def _gpu_side(strings: Sequence[str], stream: Ints, correlation: Ints, name: Ints32) -> Flags:
    syncs = np.array([text in _SYNC_NAMES for text in strings], np.bool_)
    found: Flags = (stream >= 0) & (correlation >= 0)
    return found | syncs[name] if len(syncs) else found


def _links(correlation: Ints, gpu_side: Flags) -> Ints:
    """Links rows; if there are several partners, the last one counts."""
    link = np.full(len(correlation), NOTHING, np.int64)
    known = correlation != NOTHING
    cpu, gpu = np.flatnonzero(known & ~gpu_side), np.flatnonzero(known & gpu_side)
    keys = correlation.astype(np.uint64)
    link[cpu] = lookup(keys[cpu], keys[gpu], gpu, NOTHING)
    link[gpu] = lookup(keys[gpu], keys[cpu], cpu, NOTHING)
    return link


def step_numbers(strings: Sequence[str], name: Ints32, pattern: re.Pattern[str] = _STEP_OF_ITERATION) -> Ints:
    """Returns for each row the step number in its name; -1 if it is not a step."""
    found = [pattern.match(text) if text.startswith("ProfilerStep") else None for text in strings]
    numbers = np.array([NOTHING if match is None else int(match[1]) for match in found], np.int64)
    return numbers[name] if len(numbers) else np.full(len(name), NOTHING, np.int64)


def _iterations(columns: Mapping[str, AnyArray], link: Ints, numbers: Ints) -> Ints:
    start, stream = columns["start"], columns["stream"]
    order = np.argsort(start, kind="stable")
    in_order = start[order]
    iteration = np.full(len(start), NOTHING, np.int64)
    for step in np.flatnonzero(numbers >= 0).tolist():
        low, high = np.searchsorted(in_order, [start[step], start[step] + columns["duration"][step]])
        iteration[order[low:high]] = numbers[step]
    on_gpu = stream > 0
    iteration[(stream == 0) & ~(columns["exact"] & (columns["kind"] == KIND["cpu_op"]))] = NOTHING
    linked = (link >= 0) & ~np.append(columns["leads"], False)[link]
    iteration[on_gpu] = np.where(linked[on_gpu], iteration[link[on_gpu]], NOTHING)
    return iteration


def _without_last_step(frame: HtaFrame, gpu_side: Flags, is_step: Flags) -> HtaFrame:
    cpu = np.flatnonzero(~gpu_side)
    if not len(cpu):
        return frame
    steps = cpu[is_step[cpu]]
    last = int(frame.start[steps if len(steps) else cpu].max() if len(steps) else frame.start[cpu].min())
    cpu = cpu[frame.start[cpu] < last]
    gpu = np.flatnonzero(gpu_side & (frame.correlation >= 0))
    wanted = frame.correlation[cpu]
    keys, counts = np.unique(wanted[wanted >= 0], return_counts=True)
    if len(keys):
        at = np.minimum(np.searchsorted(keys, frame.correlation[gpu]), len(keys) - 1)
        gpu = np.repeat(gpu, np.where(keys[at] == frame.correlation[gpu], counts[at], 0))
    else:
        gpu = gpu[:0]
    places = np.concatenate([gpu, cpu])
    new_place = np.full(len(frame) + 1, NOTHING, np.int64)  # the last one is for rows without a link
    new_place[places] = np.arange(len(places))
    kept = frame.take(places)
    return replace(kept, link=new_place[kept.link])


def hta_events(context: Context) -> GpuEvents:
    """Returns all rows with a stream, in HTA's order. Streams are distinguished, devices are not."""
    frame = context.get(hta_frame)
    row = np.flatnonzero(frame.stream != NOTHING)
    link = frame.link[row]
    first = np.flatnonzero(frame.leads)
    if len(first):  # HTA's link of rows with a correlation but no partner
        link = np.where((link < 0) & (frame.correlation[row] >= 0), first[0], link)
    types = context.get(hta_types)
    return GpuEvents(
        row=row,
        start=frame.start[row],
        end=frame.end[row],
        name=frame.name[row],
        device=frame.pid[row],
        stream=frame.stream[row],
        track=np.unique(frame.stream[row], return_inverse=True)[1].astype(np.int64),
        type=types[frame.name[row]],
        launch=np.where(link >= 0, frame.start[link], NOTHING),
        activity=frame.exact[row] & np.isin(frame.kind[row], [KIND[kind] for kind in (*GPU_TABLES, "other")]),
    )
