"""Maps older or vendor-specific forms of GPU traces to those of today's Kineto: the same activities in today's tables.

Theory of operation
    Four forms differ. PyTorch before 1.9 recorded the ranges of its own Python code (steps, DataLoader, optimizers) as
    operators. MTIA's device activities have the category mtia_ccp_events; copies among them are called dma_…, and
    events are marks or waits, not work. On AMD GPUs, copies and fills by kernels of the runtime (__amd_rocclr_…) are
    recorded as kernels. Other writers have a begin and an end event for each kernel. Views of exact figures, SQL and
    flame graphs get a trace in which these rows are annotations, copies, fills and kernels. Readers, writers of traces,
    and code that reproduces other tools' figures use the file's own tables.

    A kernel that was still running when the three kernels after it on its stream had ended has an impossible duration:
    views get a trace without it, and the doubt. (Not on AMD GPUs, whose queues are not in order, and not in graphs.)

    In our own files, sampled slices of Python are moved so that they nest in viewers, and say by how much. Views get
    them where they were sampled, so that a file has the same figures as the stored columns that it was written from.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import methodcaller

import numpy as np

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.arrays.row_groups import group
from kineto_trace.base.array_types import AnyArray, Flags, Ints, Ints32, UInts8
from kineto_trace.base.quantities import format_duration, times
from kineto_trace.decode.activity_names import MEMCPY_KINDS
from kineto_trace.kernel_traits.gpu_vendors import GpuVendor
from kineto_trace.model.activity_tables import FIRST_ARG_BIT, KINDS, NO_PRIORITY, STEP_PREFIX, table_of
from kineto_trace.model.context import Context
from kineto_trace.model.trace import DOUBTED, GPU_TABLES, NO_ROW, NO_STRING, ORIGIN_COLUMNS, Table, Trace, make_table
from kineto_trace.structure.activity_links import gpu_vendor
from kineto_trace.structure.module_calls import is_lightning
from kineto_trace.structure.python_frames import sample_period_ns

MTIA = "mtia_ccp_events"
ANNOTATIONS = (
    STEP_PREFIX,
    "enumerate(DataLoader)#",
    "enumerate(DataPipe)#",
    "Optimizer.step#",
    "Optimizer.zero_grad#",
    "DataParallel.forward",
    "DistributedDataParallel.forward",
)
_COPY = "dma"
_MARKS = ("event_record", "event_wait")
_DIRECTIONS = {"HOST_TO_DEVICE": "HtoD", "DEVICE_TO_HOST": "DtoH", "DEVICE_TO_DEVICE": "DtoD"}
_TOLD_BY = {"correlation": "correlation", "bytes": "size"}  # columns of GPU work by arguments of MTIA
_RUNTIME_KERNELS = {"gpu_memcpy": "__amd_rocclr_copy", "gpu_memset": "__amd_rocclr_fill"}
_OF_GPU_WORK = ("start", "duration", "name", "device", "stream", "correlation", "external_id")
_BEGIN, _END = ord("B"), ord("E")
_LATER, _MARGIN_NS = 3, 1000  # kernels that ended before, and by how much
_MEMBERS = (1 << FIRST_ARG_BIT) - 1
_FURTHEST_NS = 10**12  # a file may hold anything
PROFILER_SPAN = "PyTorch Profiler (0)"
RUNTIMES = ("runtime", *(f"{vendor}_runtime" for vendor in ("cuda", "mtia", "glow", "xpu", "privateuse1")))  # Kineto's
SPANNING = (*GPU_TABLES, "cuda_runtime", "cpu_op", "user_annotation", "gpu_user_annotation", "python_function")


def with_current_forms(context: Context) -> Context:
    """Returns the context of the same trace with such rows in today's tables."""
    trace = _with_copies(_with_pairs(_with_device_work(_with_ranges(_with_sampled_times(context.trace)))))
    trace = _without_impossible(trace, context.get(gpu_vendor))
    return context if trace is context.trace else Context(trace, rank=context.rank, worker=context.worker)


def _with_sampled_times(trace: Trace) -> Trace:
    table = trace.table("python_function")
    moved = [table.origin.get(name) for name in ("start_moved", "end_moved")]
    if all(each is None for each in moved):
        return trace
    first, last = (0 if each is None else np.clip(each, -_FURTHEST_NS, _FURTHEST_NS) for each in moved)
    start = table["start"] - first
    changed = {"start": start, "duration": np.maximum(table.end() - last - start, 0)}
    seen = Table(table.kind, {**table.columns, **changed}, table.origin, table.declared)
    tables = {**trace.tables, table.kind: _callers_first(seen)}
    return replace(trace, tables=tables, sample_period_ns=sample_period_ns(trace))


def _callers_first(python: Table) -> Table:
    """Returns the slices in the order in which they were stored; Perfetto files have them in that of their ends."""
    ids = python.origin.get("python_id")
    if ids is None or bool((ids[1:] > ids[:-1]).all()):
        return python
    order = np.argsort(ids, kind="stable")
    place = np.full(len(python) + 1, NO_ROW, np.int32)  # the last one is for "no caller"
    place[order] = np.arange(len(python), dtype=np.int32)
    sorted_ = python.take(order)
    return Table(python.kind, {**sorted_.columns, "parent": place[sorted_["parent"]]}, sorted_.origin, python.declared)


def _with_ranges(trace: Trace) -> Trace:
    """Returns the trace with ranges of PyTorch's Python code as annotations, not as operators."""
    ops = trace.table("cpu_op")
    if not len(ops) or not ops.origin:
        return trace
    ranges = _those(trace, ops["name"], lambda text: text.startswith(ANNOTATIONS))
    if not ranges.any():
        return trace
    moved = ops.take(np.flatnonzero(ranges))
    own = Table("user_annotation", dict(moved.columns), dict(moved.origin))
    annotations = _joined(trace.table("user_annotation"), own)
    changed = {"cpu_op": ops.take(np.flatnonzero(~ranges)), "user_annotation": annotations}
    return replace(trace, tables={**trace.tables, **changed})


def _with_device_work(trace: Trace) -> Trace:
    """Returns the trace with MTIA's device activities as kernels and copies."""
    other = trace.table("other")
    if not len(other) or not other.origin:
        return trace
    own = _those(trace, other["category"], lambda text: text == MTIA) & (other["phase"] == ord("X"))
    if not own.any():
        return trace
    copies = own & _those(trace, other["name"], lambda text: text.startswith(_COPY))
    work = own & ~copies & ~_those(trace, other["name"], lambda text: text in _MARKS)
    copied, ran = (other.take(np.flatnonzero(rows)) for rows in (copies, work))
    kind = np.zeros(len(trace.strings) + 1, np.uint8)
    for number in unique_values(copied.origin["args"]).tolist():
        if number != NO_STRING:
            kind[number] = _direction(trace.strings[number])
    copy_kind = kind[copied.origin["args"]]
    strings, name = _names_of_copies(trace.strings, copied["name"], copy_kind)
    told: dict[str, AnyArray] = {"bytes": _argument(copied, _TOLD_BY["bytes"], 0), "copy_kind": copy_kind, "name": name}
    found = {
        "kernel": _on_device("kernel", ran, {"priority": np.full(len(ran), NO_PRIORITY)}),
        "gpu_memcpy": _on_device("gpu_memcpy", copied, told),
    }
    changed = {kind: _joined(trace.table(kind), table) for kind, table in found.items()}
    changed["other"] = other.take(np.flatnonzero(~copies & ~work))
    return replace(trace, strings=strings, tables={**trace.tables, **changed})


def _with_copies(trace: Trace) -> Trace:
    """Returns the trace with kernels by which AMD's runtime copies and fills as copies and fills."""
    kernels = trace.table("kernel")
    changed: dict[str, Table] = {}
    moved = np.zeros(len(kernels), np.bool_)
    for kind, beginning in _RUNTIME_KERNELS.items():
        rows = _those(trace, kernels["name"], methodcaller("startswith", beginning))
        if rows.any():
            part = kernels.take(np.flatnonzero(rows))
            columns = {name: part[name] for name in _OF_GPU_WORK}
            origin = _origin_without_arguments(part) if part.origin else {}
            changed[kind] = _joined(trace.table(kind), make_table(kind, len(part), columns, origin))
            moved |= rows
    if not changed:
        return trace
    changed["kernel"] = kernels.take(np.flatnonzero(~moved))
    return replace(trace, tables={**trace.tables, **changed})


def _with_pairs(trace: Trace) -> Trace:
    """Returns the trace with GPU work that the file tells by begin and end events."""
    other = trace.table("other")
    if not len(other) or not other.origin or not (other["phase"] == _BEGIN).any():
        return trace
    changed: dict[str, Table] = {}
    for kind in GPU_TABLES:
        begins = _those(trace, other["category"], partial(_belongs, kind))
        begins &= other["phase"] == _BEGIN
        if begins.any():
            rows, length = _paired(other, begins)
            priority = {"priority": np.full(len(rows), NO_PRIORITY)} if kind == "kernel" else {}
            found = _on_device(kind, other.take(rows), {"duration": length, **priority})
            changed[kind] = _joined(trace.table(kind), found)
    return replace(trace, tables={**trace.tables, **changed}) if changed else trace


def _paired(other: Table, begins: Flags) -> tuple[Ints, Ints]:
    """Returns the rows of begin events that end, and the lengths (ns), in the order of their ends."""
    track = group([other.origin["pid"], other.origin["tid"]]).number
    mine = np.isin(track, track[begins]) & np.isin(other["phase"], (_BEGIN, _END))
    rows = np.flatnonzero(mine)
    rows = rows[np.lexsort((other.origin["place"][rows], other["start"][rows]))]
    begun: dict[int, list[int]] = {}
    found: list[tuple[int, int]] = []
    for row, on, phase in zip(rows.tolist(), track[rows].tolist(), other["phase"][rows].tolist(), strict=True):
        if phase == _BEGIN:
            begun.setdefault(on, []).append(row)
        elif begun.get(on):
            begin = begun[on].pop()
            if begins[begin]:
                found.append((begin, row))
    pairs = np.array(found, np.int64).reshape(-1, 2)
    return pairs[:, 0], other["start"][pairs[:, 1]] - other["start"][pairs[:, 0]]


def _without_impossible(trace: Trace, vendor: GpuVendor) -> Trace:
    """Returns the trace without kernels whose duration is impossible, and with the doubt."""
    kernels = trace.table("kernel")
    if vendor not in (GpuVendor.NVIDIA, GpuVendor.UNKNOWN) or len(kernels) <= _LATER:
        return trace
    end = kernels.end()
    pid = kernels.origin.get("pid", np.zeros(len(kernels), np.int64))
    keys = (pid, kernels["device"], kernels["stream"])
    order = np.lexsort((kernels["start"], *reversed(keys)))
    falls = np.flatnonzero(end[order[1:]] < end[order[:-1]])
    if not np.all([key[order[falls]] == key[order[falls + 1]] for key in keys], axis=0).any():
        return trace  # in each stream, kernels end in the order of their starts
    _, place, count = np.unique(kernels["correlation"], return_inverse=True, return_counts=True)
    order = order[(count[place] == 1)[order]]  # the kernels of a graph have the correlation of its launch
    late = np.ones(max(len(order) - _LATER, 0), np.bool_)
    first = order[: len(late)]
    for step in range(1, _LATER + 1):
        after = order[step : step + len(late)]
        late &= end[after] + _MARGIN_NS < end[first]
        for key in keys:
            late &= key[after] == key[first]
    if not late.any():
        return trace
    wrong = first[late]
    shown = format_duration(int(kernels["duration"][wrong].max()))
    what = f"{times(len(wrong), 'kernel lasts', 'kernels last')} until after later ones of the same stream had ended"
    note = f"{DOUBTED}: {what} (up to {shown}), and {'is' if len(wrong) == 1 else 'are'} left out"
    kept = kernels.take(np.delete(np.arange(len(kernels)), wrong))
    return replace(trace, tables={**trace.tables, "kernel": kept}, notes=(note, *trace.notes))


def _names_of_copies(strings: Sequence[str], name: Ints32, kind: UInts8) -> tuple[Sequence[str], Ints32]:
    """Returns the trace's strings with further ones, and names that state the kind, like those of copies on GPUs."""
    further = list(strings)
    keys, place = np.unique(name.astype(np.int64) << 8 | kind, return_inverse=True)
    numbers = []
    for key in keys.tolist():
        numbers.append(key >> 8)
        if key & 255:
            numbers[-1] = len(further)
            further.append(f"Memcpy {MEMCPY_KINDS[key & 255]} ({strings[key >> 8]})")
    return further, np.array(numbers, np.int32)[place.reshape(-1)]


def _direction(arguments: str) -> int:
    """Returns CUPTI's number of the copy's kind; 0 if unknown."""
    return next((MEMCPY_KINDS.index(kind) for text, kind in _DIRECTIONS.items() if text in arguments), 0)


def _on_device(kind: str, rows: Table, more: Mapping[str, AnyArray]) -> Table:
    """Returns rows of `other` as a table of GPU work. The device is the row's process unless an argument names it."""
    pid = np.maximum(rows.origin["pid"], 0)
    columns = {
        **{name: rows[name] for name in ("start", "duration", "name")},
        "device": _argument(rows, "device", -1, pid),
        "stream": _argument(rows, "stream", -1, rows["thread"].astype(np.int64)),
        "correlation": _argument(rows, "correlation", 0),
        **more,
    }
    origin = _origin_without_arguments(rows)
    for place, argument in enumerate(KINDS[kind]):
        source = _TOLD_BY.get(argument.columns[0])
        if source is not None:
            told = (_argument(rows, source, 0) > 0).astype(np.uint64)
            origin["present"] |= told << np.uint64(FIRST_ARG_BIT + place)
    return make_table(kind, len(rows), columns, origin)


def _origin_without_arguments(rows: Table) -> dict[str, AnyArray]:
    """Returns the origin of rows that become those of another table, which has other arguments."""
    origin = {column.name: rows.origin[column.name] for column in ORIGIN_COLUMNS}
    return {**origin, "present": origin["present"] & np.uint64(_MEMBERS)}


def _argument(rows: Table, name: str, missing: int, instead: Ints | None = None) -> Ints:
    """Returns an argument that is not in the table's columns."""
    found = rows.origin.get(name, np.full(len(rows), missing)).astype(np.int64)
    usable = (found >= 0) & (found < 1 << 32) & (found != missing)
    return np.where(usable, found, np.zeros(len(rows), np.int64) if instead is None else instead)


def _belongs(kind: str, category: str) -> bool:
    return table_of(category) == kind


def _those(trace: Trace, numbers: Ints32, fits: Callable[[str], bool]) -> Flags:
    """Tells for each number of a string whether the string fits."""
    used = np.zeros(len(trace.strings) + 1, np.bool_)  # the last one is for NO_STRING
    used[numbers] = True
    used[:-1][used[:-1]] = [fits(trace.strings[number]) for number in np.flatnonzero(used[:-1]).tolist()]
    used[NO_STRING] = False
    found: Flags = used[numbers]
    return found


def _joined(first: Table, second: Table) -> Table:
    if not len(first):
        return second
    columns = {name: np.concatenate([first[name], second[name]]) for name in second.columns}
    if not first.origin:
        return Table(second.kind, columns)
    origin = {}
    for name in {**first.origin, **second.origin}:
        parts = [part.origin.get(name) for part in (first, second)]
        dtype = next(part.dtype for part in parts if part is not None)
        origin[name] = np.concatenate(
            [
                np.zeros(len(table), dtype) if part is None else part
                for table, part in zip((first, second), parts, strict=True)
            ]
        )
    return Table(second.kind, columns, origin)


# The span of a recording: the profiler's own range if the file has it, otherwise that of all events.


def recording_span(context: Context) -> tuple[int, int]:
    """Returns start and end of the recording, in Unix ns."""
    tables = spanning_tables(context)
    if not tables:
        return context.trace.window_start_ns, context.trace.window_end_ns
    return min(int(table["start"].min()) for table in tables), max(int(table.end().max()) for table in tables)


def spanning_tables(context: Context) -> list[Table]:
    """Returns the events whose first start and last end bound the recording; no table is empty.

    In PyTorch Lightning's traces the calls of Python functions do not count, but those of all runtimes do.
    """
    trace = context.trace
    spans = events_of(trace, "trace")
    own = spans.take(np.array([trace.strings[name] == PROFILER_SPAN for name in spans["name"].tolist()], np.bool_))
    if len(own):
        return [own.take(np.argsort(own["start"], kind="stable")[-1:])]
    if is_lightning(trace):
        tables = [trace.table(kind) for kind in SPANNING if kind != "python_function"]
    else:
        tables = [runtime_calls(trace) if kind == "cuda_runtime" else trace.table(kind) for kind in SPANNING]
    return [table for table in (*tables, spans, events_of(trace, "python")) if len(table)]


def runtime_calls(trace: Trace) -> Table:
    """Returns the calls of the runtime whose category in the file, if there is one, is one that Kineto writes."""
    table = trace.table("cuda_runtime")
    if "category" not in table.origin:
        return table
    category, texts = table.origin["category"], trace.strings
    numbers = [
        number for number in unique_values(category).tolist() if number >= 0 and texts[number].lower() in RUNTIMES
    ]
    known = np.isin(category, numbers)
    return table if known.all() else table.take(known)


def events_of(trace: Trace, category: str) -> Table:
    """Returns the events with a duration of a category (in lower case) that has no table of its own."""
    table = trace.table("other")
    return table.take(in_categories(trace, table, (category,)))


def in_categories(trace: Trace, table: Table, categories: tuple[str, ...]) -> Flags:
    """Returns which rows of the table `other` have a duration and one of these categories (in lower case)."""
    known = np.array([text.lower() in categories for text in trace.strings] + [False])
    found: Flags = known[table["category"]] & (table["phase"] == ord("X"))
    return found
