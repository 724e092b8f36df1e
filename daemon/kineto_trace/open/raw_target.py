"""A target's raw folder to a Trace.

Theory of operation
    Every source is decoded into tables, and losses are counted. Then, on the tables of all of them: kernels of XLA's
    modules learn which HLO instruction they ran, from all that were recorded; the window is applied; iterations become
    annotations; calls, GPU activities and allocations learn from which op they came; and annotations get their images
    on the GPU. The order matters: what is attributed is what is in the trace.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kineto_trace.arrays import spilled_memory
from kineto_trace.decode import iterations
from kineto_trace.decode.cupti import cupti_records
from kineto_trace.decode.declared import declared_records
from kineto_trace.decode.decoded import Decode, Decoded, DecodeWindow, StepMarks, Submissions
from kineto_trace.decode.pti import pti_records
from kineto_trace.decode.python import exact_calls, python_stacks
from kineto_trace.decode.rocprofiler import rocprofiler_records
from kineto_trace.decode.time_window import apply_window, drop_trailing_requests, whole_extent
from kineto_trace.decode.torch import graph_nodes, kineto_json, memory_events, torch_ops
from kineto_trace.decode.xplane import hlo_modules, xplane
from kineto_trace.model.hlo_module import HloModule
from kineto_trace.model.source_coverage import SourceCoverage, coverage_note, parts_of
from kineto_trace.model.target_info import TargetInfo
from kineto_trace.model.trace import (
    API_TABLES,
    GPU_TABLES,
    NO_ROW,
    OP_TABLES,
    Losses,
    StringTable,
    Table,
    Trace,
    make_table,
)
from kineto_trace.open.counter_files import with_counters
from kineto_trace.spool import attachments
from kineto_trace.spool.raw_records import RawSource, read_source, source_directories
from kineto_trace.structure.attribution import attribute
from kineto_trace.structure.fwd_bwd import with_evaluated_sequences
from kineto_trace.structure.gpu_annotations import gpu_annotations
from kineto_trace.structure.hlo.hlo_kernels import with_hlo

DECODERS: Mapping[str, Decode] = {
    cupti_records.FORMAT: cupti_records.decode,
    pti_records.FORMAT: pti_records.decode,
    torch_ops.FORMAT: torch_ops.decode,
    kineto_json.FORMAT: kineto_json.decode,
    exact_calls.FORMAT: exact_calls.decode,
    **dict.fromkeys(python_stacks.FORMATS, python_stacks.decode),
    memory_events.FORMAT: memory_events.decode,
    iterations.FORMAT: iterations.decode,
    graph_nodes.FORMAT: graph_nodes.decode,
    declared_records.FORMAT: declared_records.decode,
    rocprofiler_records.FORMAT: rocprofiler_records.decode,
    xplane.FORMAT: xplane.decode,
    hlo_modules.FORMAT: hlo_modules.decode,
}
# The tables that the records of a format fill, for what a source does not cover.
FILLS: Mapping[str, tuple[str, ...]] = {
    cupti_records.FORMAT: (*GPU_TABLES, *API_TABLES),
    pti_records.FORMAT: (*GPU_TABLES, *API_TABLES),
    torch_ops.FORMAT: OP_TABLES,
    kineto_json.FORMAT: OP_TABLES,
    exact_calls.FORMAT: ("python_function",),
    **dict.fromkeys(python_stacks.FORMATS, ("python_function",)),
    memory_events.FORMAT: ("cpu_instant_event",),
    xplane.FORMAT: OP_TABLES,
}
_DECLARED = (
    declared_records.FORMAT,
    rocprofiler_records.FORMAT,
)  # the schema says which tables records of these formats fill
VERSION_KEYS = ("cupti_version", "cuda_runtime_version", "cuda_driver_version", "rocprofiler_version")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTarget:
    """A trace, and the warnings about how it was read."""

    trace: Trace
    warnings: tuple[str, ...]


@dataclass(slots=True)
class _Parts:
    """What has been decoded so far."""

    strings: StringTable
    tables: dict[str, Table]
    threads: dict[int, str]
    warnings: list[str]
    losses: Losses
    metadata: dict[str, Any]
    thread_use: list[dict[str, int]] = field(default_factory=list)
    sample_period_ns: int = 0
    step_marks: StepMarks | None = None
    hlo_modules: tuple[HloModule, ...] = ()
    sources: list[tuple[RawSource, tuple[str, ...]]] = field(default_factory=list)  # and the tables that each fills
    categories: dict[str, str] = field(default_factory=dict)
    submissions: list[Submissions] = field(default_factory=list)


def load_target(target_dir: Path) -> LoadedTarget:
    """Reads target.json and all sources of a target. Raises TraceError."""
    target = TargetInfo.read(target_dir)
    parts = _Parts(StringTable(), {}, dict(target.threads), [], Losses(), {})
    for directory in source_directories(target_dir):
        source = read_source(directory)
        spilled_memory.watch(np.frombuffer(source.data, np.uint8))
        _add_source(source, target, parts)
    start, end = target.window_start_ns, target.window_end_ns
    if not end:  # the agent never said what the window was
        start, end = whole_extent(parts.tables)
    target = replace(
        target, threads=parts.threads, thread_use=parts.thread_use, window_start_ns=start, window_end_ns=end
    )
    coverage = [found for source, kinds in parts.sources if (found := _coverage(source, kinds, start, end))]
    parts.warnings.extend(
        f"{note}; shares leave that time out" for each in coverage if (note := coverage_note(each, start, end))
    )
    tables = with_hlo(drop_trailing_requests(parts.tables), parts.hlo_modules, parts.strings)
    tables, outside = apply_window(tables, start, end)
    marks = iterations.reported_marks(target) if parts.step_marks is None else parts.step_marks
    if not iterations.counted(marks, (start, end)):
        numbered = iterations.numbered_by_program(tables, parts.strings)
        if numbered is not None:
            tables = numbered
            parts.warnings.append(iterations.BY_PROGRAM)
    tables = iterations.add_iterations(tables, parts.strings, marks, (start, end))
    tables = relate(tables, parts.strings, parts.submissions)
    trace = Trace(
        target=target,
        strings=tuple(parts.strings.strings),
        tables=tables,
        window_start_ns=start,
        window_end_ns=end,
        devices=tuple(_devices(parts.metadata)),
        versions={key: parts.metadata[key] for key in VERSION_KEYS if isinstance(parts.metadata.get(key), int)},
        losses=replace(parts.losses, out_of_window=parts.losses.out_of_window + outside),
        sample_period_ns=parts.sample_period_ns,
        coverage=tuple(coverage),
        categories=parts.categories,
    )
    trace, missing = with_counters(trace, target_dir)
    return LoadedTarget(trace=trace, warnings=(*parts.warnings, *missing))


def _coverage(source: RawSource, kinds: tuple[str, ...], start_ns: int, end_ns: int) -> SourceCoverage | None:
    """Returns what the source does not cover of the window; None if that is unknown."""
    covered = parts_of([source.metadata.get("covered_ns")])
    losing = [*(parts_of(source.metadata.get("losing_ns")) or ()), *(parts_of(source.metadata.get("gaps_ns")) or ())]
    if not kinds or (not covered and not losing):
        return None
    began, ended = covered[0] if covered else (start_ns, end_ns)
    missing = [(start_ns, began), (ended, end_ns), *losing]
    parts = parts_of([(max(start, start_ns), min(end, end_ns)) for start, end in missing]) or ()
    return SourceCoverage(source=source.source, kinds=kinds, missing=parts, dropped=source.dropped)


def relate(
    tables: Mapping[str, Table], strings: StringTable, submissions: Sequence[Submissions] = ()
) -> dict[str, Table]:
    """Returns the tables with the relations between their rows filled in."""
    related = attribute(tables, submissions)
    if "cpu_op" in related:
        related["cpu_op"] = with_evaluated_sequences(related["cpu_op"], strings.strings)
    images = gpu_annotations(related)
    if len(images):
        related[images.kind] = images
    return related


def _add_source(source: RawSource, target: TargetInfo, parts: _Parts) -> None:
    if source.format == attachments.FORMAT:
        return  # a file beside the trace
    if source.torn:
        parts.warnings.append(f"{source.source}: the last data was truncated when the daemon ended")
    found = _decode(source, target, parts)
    kinds = tuple(found.tables) if source.format in _DECLARED else FILLS.get(source.format, ())
    if source.metadata.get("accelerator"):  # torch's profiler recorded it beside the operators
        kinds = (*kinds, *GPU_TABLES, *API_TABLES)
    parts.sources.append((source, kinds))
    if found.undecoded:
        parts.warnings.append(
            f"{source.source}: {found.undecoded} records could not be decoded and are not in the trace"
        )
    parts.losses = Losses(
        dropped=parts.losses.dropped + source.dropped,
        undecoded=parts.losses.undecoded + found.undecoded,
        torn=parts.losses.torn + source.torn,
        out_of_window=parts.losses.out_of_window + found.out_of_window,
    )


def _decode(source: RawSource, target: TargetInfo, parts: _Parts) -> Decoded:
    """Adds the data of one source, and returns it."""
    decode = DECODERS.get(source.format)
    if decode is None:
        parts.warnings.append(f"{source.source}: records of the unknown format {source.format!r} are left out")
        return Decoded(tables={}, records=0, undecoded=source.records)
    found = decode(source, parts.strings, DecodeWindow(target.window_start_ns, target.window_end_ns))
    _add_tables(parts, found.tables, source.source)
    parts.categories |= found.categories
    parts.warnings.extend(f"{source.source}: {warning}" for warning in found.warnings)
    parts.metadata.update(found.metadata)
    parts.threads = {**found.threads, **parts.threads}
    parts.thread_use = [*found.thread_use] or parts.thread_use
    parts.sample_period_ns = found.sample_period_ns or parts.sample_period_ns
    parts.hlo_modules += found.hlo_modules
    parts.step_marks = parts.step_marks if found.step_marks is None else found.step_marks
    parts.submissions += [] if found.submissions is None else [found.submissions]
    return found


def _add_tables(parts: _Parts, tables: Mapping[str, Table], whose: str) -> None:
    """Adds the tables of one more source."""
    ids = [int(table["id"].max()) for kind, table in parts.tables.items() if kind in OP_TABLES and len(table)]
    for kind, table in tables.items():
        columns = dict(table.columns)
        before = parts.tables.get(kind)
        if before is not None and before.declared != table.declared:
            parts.warnings.append(
                f"{whose}: {len(table)} rows of {kind}, which another source declares otherwise, are left out"
            )
            continue
        for name in ("op", "id"):
            if name in columns and ids and table.declared is None:  # of another source: they must differ
                columns[name] = columns[name] + max(ids)
        if before is not None and len(before):
            if "parent" in columns and table.declared is None:
                columns["parent"] = np.where(columns["parent"] >= 0, columns["parent"] + len(before), NO_ROW)
            columns = {name: np.concatenate([before[name], column]) for name, column in columns.items()}
        parts.tables[kind] = make_table(kind, len(next(iter(columns.values()))), columns, declared=table.declared)


def _devices(metadata: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the device properties that the target provided, if they are valid."""
    found = metadata.get("devices")
    if not isinstance(found, list):
        return []
    return [
        {name: value for name, value in item.items() if isinstance(value, (int, str))}  # no NaN, nothing nested
        for item in found
        if isinstance(item, dict) and isinstance(item.get("id"), int)
    ]
