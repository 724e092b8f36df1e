"""Writes Kineto's Chrome-trace JSON from columns, in the form that HTA, the TensorBoard plug-in and Perfetto read.

Theory of operation
    The file consists of a header (device properties, versions, base of all times), rows that name processes and
    threads, one section of rows per kind of activity, and the closing rows. The order within a section is free. Each
    section goes through the native writer block by block, so that memory does not grow with the trace.

    Times are microseconds since a base that all files of a three-month period share (Kineto's "trimonth"), so that
    files of several ranks can be combined.
"""

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from kineto_agent import __version__

from kineto_trace.arrays.codec import PreparedTexts, RowWriter
from kineto_trace.arrays.id_sets import distinct, is_in, unique_values
from kineto_trace.base.array_types import AnyArray, Flags, Ints, Ints32
from kineto_trace.collectives.nccl import collective_columns
from kineto_trace.formats.chrome import chrome_events
from kineto_trace.formats.chrome.chrome_events import Columns, FieldNames, Render
from kineto_trace.formats.chrome.counter_tracks import CounterTrack, hardware_tracks, write_counters
from kineto_trace.formats.chrome.verbatim_writer import is_verbatim, write_rows, write_verbatim
from kineto_trace.formats.text_sinks import TextSink, escaped, name_text
from kineto_trace.formats.viewer_rows import ANNOTATIONS, LaunchShapes, gpu_rows, row_name, sync_rows
from kineto_trace.model.activity_tables import COUNTER, OWN_ROWS, ViewerRow, arguments_of
from kineto_trace.model.target_info import TargetInfo
from kineto_trace.model.target_info import base_ns as stated_base_ns
from kineto_trace.model.trace import (
    API_TABLES,
    DEVICE_TABLES,
    GPU_TABLES,
    HOST_TABLES,
    NO_ROW,
    NO_STRING,
    OP_TABLES,
    Table,
    Trace,
    own_tables,
)
from kineto_trace.structure.activity_links import forward_backward
from kineto_trace.structure.captured_graphs import captured_columns
from kineto_trace.structure.nesting import build

TRIMONTH_NS = 7_889_238 * 1_000_000_000
# Kineto's keys (1, or absent) and the options that each stands for
OPTION_KEYS = {
    "record_shapes": ("record_shapes",),
    "with_stack": ("with_stack", "stack_trace"),
    "profile_memory": ("profile_memory",),
    "with_flops": ("with_flops",),
    "with_modules": ("with_modules",),
}
LOSS_KEYS = {  # of Losses -> ours
    "dropped": "records_dropped",
    "undecoded": "records_undecoded",
    "torn": "chunks_torn",
    "out_of_window": "records_out_of_window",
}
BLOCK_ROWS = 64 * 1024
GPU_SORT_INDEX = 5_000_000
OVERHEAD_SORT_INDEX = 0x100000A
SPANS_SORT_INDEX = 1 << 29
OVERHEAD_PID = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Rows of one table with the same form.

    chosen: their places in the table; None for all rows.
    events: in the text of each row.
    """

    kind: str
    columns: Mapping[str, AnyArray]
    chosen: Ints | None
    render: Render
    events: int = 1

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self.columns["start"] if self.chosen is None else self.chosen)

    def block(self, first: int, last: int) -> Columns:
        """Returns the columns of the rows first … last - 1."""
        rows = slice(first, last) if self.chosen is None else self.chosen[first:last]
        return {name: column[rows] for name, column in self.columns.items()}


def base_ns(time_ns: int) -> int:
    """Returns Kineto's baseTimeNanoseconds for a trace of this time."""
    return time_ns // TRIMONTH_NS * TRIMONTH_NS


def file_base_ns(trace: Trace) -> int:
    """Returns the Unix ns that all times in the file of a trace are relative to."""
    return stated_base_ns(trace.head or {}, []) if is_verbatim(trace) else base_ns(trace.window_start_ns)


def write_chrome(trace: Trace, sink: TextSink, *, trace_name: str, tracks: Sequence[CounterTrack] = ()) -> None:
    """Writes the whole file into the sink.

    A trace that was read from a Chrome trace is written back unchanged, with its own name.

    trace_name: the file's name, which the file contains.
    tracks: counters that are not in the trace.
    """
    if is_verbatim(trace):
        write_verbatim(trace, sink, tracks)
        return
    base = base_ns(trace.window_start_ns)
    arguments = _arguments(trace)
    names = FieldNames(
        texts=PreparedTexts(
            [b"" if ready else name_text(text) for text, ready in zip(trace.strings, arguments, strict=True)]
        ),
        arguments=PreparedTexts(
            [
                b"," + text.encode("utf-8", "replace") if ready else b""
                for text, ready in zip(trace.strings, arguments, strict=True)
            ]
        ),
        lines=_as_argument(trace, "lines", trace.table("python_function")["lines"]),
        callees=_as_argument(trace, "callees", trace.table("python_function")["callees"]),
        captured=_as_argument(trace, "captured op", trace.table("graph_op")["name"]),
        base_ns=base,
        pid=trace.target.pid,
        shapes=LaunchShapes(trace.devices),
        categories=trace.categories,
        own=_own_texts(trace),
    )
    parts = sections(trace)
    named, other, closing = list(rows(trace, parts, base)), trace.table("other"), closing_rows(trace, base)
    count = len(named) + sum(part.events * part.count for part in parts) + len(other) + len(closing)
    sink.text(_header(trace, base, count))
    for row in named:
        sink.text(row + b",\n")
    for part in parts:
        _write_section(part, names, sink)
    write_rows(trace, [other] if other.origin else [], base, sink)
    write_counters(chain(hardware_tracks(trace), tracks), trace, base, sink)
    sink.text(b",\n".join(closing))
    sink.text(b'\n],\n"traceName": %s\n}\n' % json.dumps(trace_name).encode())


def _arguments(trace: Trace) -> list[bool]:
    """Returns for each string whether it consists of ready-made arguments (inputs of an operator, HLO of a kernel)."""
    ready = np.zeros(len(trace.strings), np.bool_)
    for numbers in (*(trace.table(kind)["inputs"] for kind in OP_TABLES), trace.table("kernel")["hlo"]):
        ready[numbers[numbers != NO_STRING]] = True
    return [bool(value) for value in ready.tolist()]


def _as_argument(trace: Trace, key: str, numbers: Ints32) -> PreparedTexts:
    """Returns each of these strings as an argument with a leading comma; nothing for the other strings."""
    texts = [b""] * len(trace.strings)
    for number in unique_values(numbers[numbers != NO_STRING]).tolist():
        texts[number] = b',"%s":"%s"' % (key.encode(), escaped(trace.strings[number]))
    return PreparedTexts(texts)


def _own_texts(trace: Trace) -> dict[tuple[str, str], PreparedTexts]:
    """Returns the texts in the columns of tables that the trace declares itself, as arguments."""
    own = [trace.table(kind) for kind in own_tables(trace.tables, *OWN_ROWS)]
    return {
        (table.kind, column.name): _as_argument(trace, column.name, table[column.name])
        for table in own
        if table.declared is not None
        for column in arguments_of(table.declared)
        if column.text
    }


def head_texts(trace: Trace, base: int, events: int = 0) -> dict[str, str]:
    """Returns the members of the file other than its events, each as JSON text.

    events: about how many there are, by which a reader sees how much of a truncated file is left; 0 if unknown.
    """
    target = trace.target
    values: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": list(trace.devices), "host_name": target.host}
    values.update((key, 1) for key, names in OPTION_KEYS.items() if any(map(target.options.get, names)))
    values.update((name, trace.versions[name]) for name in sorted(trace.versions))
    if target.rank is not None:
        distributed = {"backend": "unknown", "rank": target.rank, "world_size": target.world_size}
        values["distributedInfo"] = {name: value for name, value in distributed.items() if value is not None}
    values["kinetod"] = {
        "version": __version__,
        "capture_id": target.capture_id,
        **_given(target, "command", "job_id"),
        "framework": target.framework,
        "python_version": target.python_version,
        "window_start_ns": trace.window_start_ns,
        "window_end_ns": trace.window_end_ns,
        "labels": target.labels,
        **_given(target, "resource", "trace_parent"),
        "complete": target.complete,
        **({"events": events} if events else {}),
        **{key: getattr(trace.losses, name) for name, key in LOSS_KEYS.items()},
        "coverage": [each.to_json(trace.category) for each in trace.coverage],
        **_stack_samples(trace),
        **_given(target, "kernel_counters", "settings", "step_ratio", "least_step_ratio"),
        **({} if target.activity_types is None else {"activity_types": target.activity_types}),
        **_given(target, "not_recorded"),
        **_clock(target),
    }
    values["displayTimeUnit"] = "ms"
    values["baseTimeNanoseconds"] = base
    # HTA finds the rank by a pattern that requires the space after the colon, so the separators matter.
    return {name: json.dumps(value, separators=(", ", ": ")) for name, value in values.items()}


def _stack_samples(trace: Trace) -> dict[str, Any]:
    """Returns the use of each sampled thread, and the sampling period."""
    if not trace.target.thread_use:
        return {}
    return {"sample_period_ns": trace.sample_period_ns, "threads": trace.target.thread_use}


def _given(target: TargetInfo, *names: str) -> dict[str, Any]:
    """Returns those of these fields that are known."""
    return {name: value for name in names if (value := getattr(target, name))}


def _clock(target: TargetInfo) -> dict[str, int]:
    """Returns the measured offset and uncertainty of the host's clock."""
    if target.clock_offset_ns is None:
        return {}
    known = {"clock_offset_ns": target.clock_offset_ns, "clock_uncertainty_ns": target.clock_uncertainty_ns}
    return {name: value for name, value in known.items() if value is not None}


def _header(trace: Trace, base: int, events: int) -> bytes:
    lines = [f"{json.dumps(name)}: {text}" for name, text in head_texts(trace, base, events).items()]
    return ("{\n" + ",\n".join(lines) + ',\n"traceEvents": [\n').encode()


def _write_section(section: Section, names: FieldNames, sink: TextSink) -> None:
    for first in range(0, section.count, BLOCK_ROWS):
        block = section.block(first, min(first + BLOCK_ROWS, section.count))
        sink.rows(RowWriter(section.render(block, names)), len(block["start"]))


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _time(time_ns: int, base_ns: int) -> float:
    return max(0, time_ns - base_ns) / 1000


def rows(trace: Trace, sections: Sequence[Section], base_ns: int) -> Iterator[bytes]:
    """Yields the names, labels and order of all processes and threads that the sections use."""
    for row in _rows(trace, sections):
        yield _json({"ph": "M", "ts": _time(trace.window_start_ns, base_ns), **row})


def _rows(trace: Trace, sections: Sequence[Section]) -> Iterator[dict[str, Any]]:
    target = trace.target
    yield from _process(target.pid, target.process_name, "CPU", target.pid)
    gpu = _gpu_rows(sections, {*DEVICE_TABLES, *own_tables(trace.tables, ViewerRow.GPU)})
    measured = distinct(trace.table(COUNTER)["device"]).tolist()
    devices = {device for device, _ in gpu} | {_device_id(item) for item in trace.devices} - {-1} | set(measured)
    for device in sorted(devices):
        yield from _process(device, target.process_name, f"GPU {device}", GPU_SORT_INDEX + device)
    if any(section.kind == "overhead" for section in sections):
        yield from _process(OVERHEAD_PID, "CUPTI Overhead", "CUPTI Overhead", OVERHEAD_SORT_INDEX)
    for device, row in sorted(gpu):
        yield from _thread(device, row, row_name(device, row))
    threads = set(target.threads) | _host_threads(sections, {*HOST_TABLES, *own_tables(trace.tables, ViewerRow.CALL)})
    for tid in sorted(threads):
        name = target.threads.get(tid, target.process_name if tid else "unknown: allocations")
        yield from _thread(target.pid, tid, f"thread {tid} ({name})")


def _process(pid: int, name: str, label: str, sort_index: int) -> Iterator[dict[str, Any]]:
    yield {"name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    yield {"name": "process_labels", "pid": pid, "tid": 0, "args": {"labels": label}}
    yield {"name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": sort_index}}


def _thread(pid: int, tid: int, name: str) -> Iterator[dict[str, Any]]:
    yield {"name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
    yield {"name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _device_id(properties: Any) -> int:
    number = properties.get("id")
    return number if isinstance(number, int) and number >= 0 else -1


def _gpu_rows(sections: Sequence[Section], kinds: Set[str]) -> set[tuple[int, int]]:
    """Returns the (device, row) pairs on which there are activities of these tables."""
    found: set[tuple[int, int]] = set()
    for section in sections:
        if section.kind in kinds:
            device = section.columns["device"].astype(np.int64)
            keys = distinct((device << 32) + section.columns["tid"] + 1)
            found.update((key >> 32, (key & 0xFFFFFFFF) - 1) for key in keys.tolist())
    return found


def _host_threads(sections: Sequence[Section], kinds: Set[str]) -> set[int]:
    found: set[int] = set()
    for section in sections:
        if section.kind in kinds:
            found.update(distinct(section.columns["thread"]).tolist())
    return found


def closing_rows(trace: Trace, base_ns: int) -> list[bytes]:
    """Returns the window as a span and as marks. "Record Window End" is the last row of the file."""
    start = _time(trace.window_start_ns, base_ns)
    length = (trace.window_end_ns - trace.window_start_ns) / 1000
    span = {"ph": "X", "cat": "Trace", "ts": start, "dur": length, "pid": "Spans", "tid": "PyTorch Profiler"}
    order, mark, traces = {"name": "process_sort_index"}, {"ph": "i", "s": "g"}, "Trace PyTorch Profiler"
    return [
        _json({**span, "name": "PyTorch Profiler (0)", "args": {"Op count": 0}}),
        _json({**order, "ph": "M", "ts": start, "pid": "Spans", "tid": 0, "args": {"sort_index": SPANS_SORT_INDEX}}),
        _json({"name": "Iteration Start: PyTorch Profiler", **mark, "pid": "Traces", "tid": traces, "ts": start}),
        _json({"name": "Record Window End", **mark, "pid": "", "tid": "", "ts": _time(trace.window_end_ns, base_ns)}),
    ]


def sections(trace: Trace) -> list[Section]:
    """Returns all rows of a trace. Where rows of one thread start together, enclosing rows come first."""
    parts = _ops(trace)
    work = (*GPU_TABLES, *own_tables(trace.tables, ViewerRow.GPU))
    kinds = (*API_TABLES, *own_tables(trace.tables, ViewerRow.CALL))
    calls = {kind: _call_starts(trace, kind, work) for kind in kinds}
    started = [trace.table(kind)["correlation"][mask] for kind, mask in calls.items()]
    correlations = np.concatenate(started)
    correlations = correlations[correlations != 0]
    for kind, mask in calls.items():
        table = trace.table(kind)
        parts += _linked_or_not(table, {**table.columns, "tid": table["thread"]}, mask)
    rows = gpu_rows(trace.tables, margin_ns=chrome_events.ANNOTATION_MARGIN_NS)
    images = trace.table(ANNOTATIONS)
    columns = {**images.columns, "tid": rows.get(images.kind, np.empty(0, np.int64))}
    parts.append(Section(kind=images.kind, columns=columns, chosen=None, render=chrome_events.gpu_user_annotation))
    captured = captured_columns(trace)
    for kind in work:
        if kind in rows:
            table = trace.table(kind)
            extra: Columns = collective_columns(trace) if kind == "kernel" else {}
            columns = {**table.columns, **extra, **captured.get(kind, {}), "tid": rows[kind]}
            parts += _linked_or_not(table, columns, is_in(columns["correlation"], correlations))
    parts += _sync(trace, correlations)
    overhead = trace.table("overhead")
    tid = {"tid": np.zeros(len(overhead), np.int64)}
    parts.append(
        Section(kind="overhead", columns={**overhead.columns, **tid}, chosen=None, render=chrome_events.overhead)
    )
    return [part for part in parts if part.count]


def _call_starts(trace: Trace, kind: str, work: Sequence[str]) -> Flags:
    """Marks the calls that begin a flow: those that Kineto names, and those that caused a recorded GPU activity.

    work: the tables of GPU activities.
    """
    table = trace.table(kind)
    if not len(table):
        return np.zeros(0, np.bool_)
    named: Flags = chrome_events.starts_flow(trace.strings)[table["name"]]
    rest = np.flatnonzero(~named)
    if len(rest):
        used = np.concatenate([trace.table(gpu)["correlation"] for gpu in work])
        named[rest] = is_in(table["correlation"][rest], used[used != 0])
    return named


def _linked_or_not(table: Table, columns: Columns, linked: Flags) -> list[Section]:
    """Returns two sections for each form of the rows: rows followed by their flow event, and rows without one."""
    parts, kind = [], table.kind
    for form in chrome_events.forms(table):
        among = np.ones(len(linked), np.bool_) if form.rows is None else form.rows(columns)
        for chosen, render, events in (
            (linked & among, chrome_events.with_flow(table, form.render), 2),
            (~linked & among, form.render, 1),
        ):
            parts.append(Section(kind=kind, columns=columns, chosen=_places(chosen), render=render, events=events))
    return parts


def _places(mask: Flags) -> Ints | None:
    return None if mask.all() else np.flatnonzero(mask)


def _sync(trace: Trace, correlations: AnyArray) -> list[Section]:
    table = trace.table("cuda_sync")
    if not len(table):
        return []
    columns = {**table.columns, "device": sync_devices(trace), "tid": sync_rows(table)}
    return _linked_or_not(table, columns, is_in(table["correlation"], correlations))


def sync_devices(trace: Trace) -> Ints32:
    """Returns the device on which each synchronization is shown: its own, else the first one with GPU work."""
    device = trace.table("cuda_sync")["device"]
    fallback = min((int(trace.table(kind)["device"].min()) for kind in GPU_TABLES if len(trace.table(kind))), default=0)
    return np.where(device < 0, fallback, device).astype(np.int32)


def _ops(trace: Trace) -> list[Section]:
    """Returns the host's rows: Python functions, annotations, operators with their links, allocations."""
    memory = trace.table("cpu_instant_event")
    index = max((int(trace.table(kind)["id"].max()) for kind in OP_TABLES if len(trace.table(kind))), default=0)
    return [
        *_python(trace, index + len(memory)),
        *(_host(trace.table(kind), partial(chrome_events.op, kind)) for kind in ("user_annotation", "cpu_op")),
        *_links(trace),
        _host(memory, chrome_events.cpu_instant_event, index),
    ]


def _host(table: Table, render: Render, index: int = 0) -> Section:
    columns = {**table.columns, "tid": table["thread"], "index": np.arange(index, index + len(table))}
    return Section(kind=table.kind, columns=columns, chosen=None, render=render)


def _links(trace: Trace) -> list[Section]:
    """Returns both ends of each link between a forward and a backward operator."""
    ops = trace.table("cpu_op")
    links = forward_backward(trace.tables)
    number = np.arange(1, len(links.forward_rows) + 1)
    ends = ((links.forward_rows, "s"), (links.backward_rows, "f"))
    return [
        Section(
            kind="fwdbwd",
            columns={"start": ops["start"][rows], "tid": ops["thread"][rows], "link": number},
            chosen=None,
            render=partial(chrome_events.link, phase),
        )
        for rows, phase in ends
    ]


def _python(trace: Trace, index: int) -> list[Section]:
    table = trace.table("python_function")
    row = np.arange(len(table))
    columns = {**table.columns, "tid": table["thread"], "row": row, "index": row + index}
    root = table["parent"] == NO_ROW
    render = chrome_events.python_call
    if trace.sample_period_ns:
        render = chrome_events.python_sampled
        columns.update(nested_python(trace, table))
        columns["start_moved"] = columns["start"] - table["start"]
        columns["end_moved"] = columns["start"] + columns["duration"] - table.end()
    return [
        Section(kind=table.kind, columns=columns, chosen=np.flatnonzero(chosen), render=partial(render, is_root))
        for chosen, is_root in ((root, True), (~root, False))
    ]


def nested_python(trace: Trace, python: Table) -> dict[str, AnyArray]:
    """Returns times of sampled slices that nest with their thread's other events: viewers drop partial overlaps."""
    if not any(len(trace.table(kind)) for kind in (*OP_TABLES, *API_TABLES)):
        return {}
    tree = build(trace.tables, trace.window_end_ns, sample_period_ns=trace.sample_period_ns)
    nodes = tree.nodes_of(python.kind, len(python))
    start = np.where(nodes >= 0, tree.start[nodes], python["start"])
    end = np.where(nodes >= 0, tree.end[nodes], python.end())
    return {"start": start, "duration": np.maximum(end - start, 0)}
