"""Decides which rows of each table go into a Chrome trace, with which renderer, and on which row of the viewer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.id_sets import is_in
from kineto_trace.collectives.collective_arguments import collective_columns
from kineto_trace.formats.chrome import device_events, host_events
from kineto_trace.formats.chrome.chrome_fields import AnyArray, Columns, Render
from kineto_trace.formats.shared.viewer_rows import ANNOTATIONS, gpu_rows, sync_rows
from kineto_trace.model.activity_table import ViewerRow
from kineto_trace.model.trace import API_TABLES, GPU_TABLES, NO_ROW, OP_TABLES, Table, Trace, own_tables
from kineto_trace.structure.captured_graphs import captured_columns
from kineto_trace.structure.event_tree import build
from kineto_trace.structure.fwd_bwd import forward_backward

Mask = npt.NDArray[np.bool_]
OVERHEAD_PID = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Rows of one table with the same form. `chosen`: their places in the table; None for all rows."""

    kind: str
    columns: Mapping[str, AnyArray]
    chosen: npt.NDArray[np.int64] | None
    render: Render

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self.columns["start"] if self.chosen is None else self.chosen)

    def block(self, first: int, last: int) -> Columns:
        """Returns the columns of the rows first … last - 1."""
        rows = slice(first, last) if self.chosen is None else self.chosen[first:last]
        return {name: column[rows] for name, column in self.columns.items()}


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
    rows = gpu_rows(trace.tables, margin_ns=host_events.ANNOTATION_MARGIN_NS)
    parts += _gpu_annotations(trace.table(ANNOTATIONS), rows)
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
        Section(kind="overhead", columns={**overhead.columns, **tid}, chosen=None, render=device_events.overhead)
    )
    return [part for part in parts if part.count]


def _call_starts(trace: Trace, kind: str, work: Sequence[str]) -> Mask:
    """Marks the calls that begin a flow: those that Kineto names, and those that caused a recorded GPU activity.

    work: the tables of GPU activities.
    """
    table = trace.table(kind)
    if not len(table):
        return np.zeros(0, np.bool_)
    named: Mask = device_events.starts_flow(trace.strings)[table["name"]]
    rest = np.flatnonzero(~named)
    if len(rest):
        used = np.concatenate([trace.table(gpu)["correlation"] for gpu in work])
        named[rest] = is_in(table["correlation"][rest], used[used != 0])
    return named


def _linked_or_not(table: Table, columns: Columns, linked: Mask) -> list[Section]:
    """Returns two sections for each form of the rows: rows followed by their flow event, and rows without one."""
    parts, kind = [], table.kind
    for form in device_events.forms(table):
        among = np.ones(len(linked), np.bool_) if form.rows is None else form.rows(columns)
        for chosen, render in (
            (linked & among, device_events.with_flow(table, form.render)),
            (~linked & among, form.render),
        ):
            parts.append(Section(kind=kind, columns=columns, chosen=_places(chosen), render=render))
    return parts


def _places(mask: Mask) -> npt.NDArray[np.int64] | None:
    return None if mask.all() else np.flatnonzero(mask)


def _sync(trace: Trace, correlations: AnyArray) -> list[Section]:
    table = trace.table("cuda_sync")
    if not len(table):
        return []
    columns = {**table.columns, "device": sync_devices(trace), "tid": sync_rows(table)}
    return _linked_or_not(table, columns, is_in(table["correlation"], correlations))


def sync_devices(trace: Trace) -> npt.NDArray[np.int32]:
    """Returns the device on which each synchronization is shown: its own, else the first one with GPU work."""
    device = trace.table("cuda_sync")["device"]
    fallback = min((int(trace.table(kind)["device"].min()) for kind in GPU_TABLES if len(trace.table(kind))), default=0)
    return np.where(device < 0, fallback, device).astype(np.int32)


def _gpu_annotations(table: Table, rows: Mapping[str, npt.NDArray[np.int64]]) -> list[Section]:
    columns = {**table.columns, "tid": rows.get(table.kind, np.empty(0, np.int64))}
    return [Section(kind=table.kind, columns=columns, chosen=None, render=host_events.gpu_user_annotation)]


def _ops(trace: Trace) -> list[Section]:
    """Returns the host's rows: Python functions, annotations, operators with their links, allocations."""
    memory = trace.table("cpu_instant_event")
    index = max((int(trace.table(kind)["id"].max()) for kind in OP_TABLES if len(trace.table(kind))), default=0)
    return [
        *_python(trace, index + len(memory)),
        _host(trace.table("user_annotation"), host_events.user_annotation),
        _host(trace.table("cpu_op"), host_events.cpu_op),
        *_links(trace),
        _host(memory, host_events.cpu_instant_event, index),
    ]


def _host(table: Table, render: Render, index: int = 0) -> Section:
    columns = {**table.columns, "tid": table["thread"], "index": np.arange(index, index + len(table))}
    return Section(kind=table.kind, columns=columns, chosen=None, render=render)


def _links(trace: Trace) -> list[Section]:
    """Returns both ends of each link between a forward and a backward operator."""
    ops = trace.table("cpu_op")
    links = forward_backward(trace.tables)
    number = np.arange(1, len(links.forward_rows) + 1)
    ends = ((links.forward_rows, host_events.forward), (links.backward_rows, host_events.backward))
    return [
        Section(
            kind="fwdbwd",
            columns={"start": ops["start"][rows], "tid": ops["thread"][rows], "link": number},
            chosen=None,
            render=render,
        )
        for rows, render in ends
    ]


def _python(trace: Trace, index: int) -> list[Section]:
    table = trace.table("python_function")
    row = np.arange(len(table))
    columns = {**table.columns, "tid": table["thread"], "row": row, "index": row + index}
    root = table["parent"] == NO_ROW
    first, rest = host_events.python_call_root, host_events.python_call
    if trace.sample_period_ns:
        first, rest = host_events.python_sampled_root, host_events.python_sampled
        columns.update(nested_python(trace, table))
    return [
        Section(kind=table.kind, columns=columns, chosen=np.flatnonzero(root), render=first),
        Section(kind=table.kind, columns=columns, chosen=np.flatnonzero(~root), render=rest),
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
