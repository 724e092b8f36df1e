"""Opens the folder that a capture leaves: raw records, libkineto's file, and the counters beside them.

Theory of operation
    Every source is decoded into tables, and losses are counted. Then, on the tables of all of them: kernels of XLA's
    modules are matched with HLO instructions, using all recorded ones; the window is applied; iterations become
    annotations; calls, GPU activities and allocations are attributed to ops; and annotations get their images on the
    GPU. The order matters: only rows inside the window are attributed.

If the target's own libkineto recorded, its file is checked, and joined with the daemon's information.

The file is read like any file of Kineto's. It has to be complete and to repeat the number of the request: users who may
write into the process's folder could have put another file there.

The files of hardware counters in a target's raw folder become the table `counter`.
    A file has the UUID of its GPU, a trace has the indexes of the devices as the process sees them. The index of a GPU
    is found, in this order, by
    - the agent, which reports the UUID of each device, or its PCI address, by which the daemon knows the GPU;
    - the driver: the process had a context on one GPU only, and the trace has work of one device only, or has one
      device only.
    If neither works, the counters are left out, and a note says so: the index is never guessed.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kineto_trace.arrays import spilled_memory
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.base.quantities import times
from kineto_trace.decode import (
    cupti_records,
    declared_records,
    exact_calls,
    hlo_modules,
    iterations,
    pti_records,
    python_stacks,
    rocprofiler_records,
    xplane_profile,
)
from kineto_trace.decode.decoded import Decode, Decoded, DecodeWindow, StepMarks, Submissions
from kineto_trace.decode.hardware_counters import counter_table, samples_per_row
from kineto_trace.decode.iterations import apply_window, drop_trailing_requests, whole_extent
from kineto_trace.decode.torch import graph_nodes, kineto_json, memory_events, torch_ops
from kineto_trace.errors import DamagedError, FileError, SpoolError
from kineto_trace.formats.chrome.chrome_reader import load_chrome
from kineto_trace.model.hlo_module import HloModule
from kineto_trace.model.source_coverage import SourceCoverage, coverage_note, parts_of
from kineto_trace.model.target_info import TargetInfo, header_value
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
from kineto_trace.spool import raw_records
from kineto_trace.spool.counter_samples import CounterSamples, TargetGpus, read_counter_samples, sample_files
from kineto_trace.spool.kineto_file import OnDemandRequest, kineto_file
from kineto_trace.spool.raw_records import RawSource, read_source, source_directories
from kineto_trace.structure.activity_links import with_evaluated_sequences
from kineto_trace.structure.hlo_kernels import with_hlo
from kineto_trace.structure.nesting import attribute, gpu_annotations

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
    xplane_profile.FORMAT: xplane_profile.decode,
    hlo_modules.FORMAT: hlo_modules.decode,
}
# The tables that the records of a format fill, used if a source does not cover them.
FILLS: Mapping[str, tuple[str, ...]] = {
    cupti_records.FORMAT: (*GPU_TABLES, *API_TABLES),
    pti_records.FORMAT: (*GPU_TABLES, *API_TABLES),
    torch_ops.FORMAT: OP_TABLES,
    kineto_json.FORMAT: OP_TABLES,
    exact_calls.FORMAT: ("python_function",),
    **dict.fromkeys(python_stacks.FORMATS, ("python_function",)),
    memory_events.FORMAT: ("cpu_instant_event",),
    xplane_profile.FORMAT: OP_TABLES,
}
_DECLARED = (
    declared_records.FORMAT,
    rocprofiler_records.FORMAT,
)  # the schema defines which tables records of these formats fill
VERSION_KEYS = ("cupti_version", "cuda_runtime_version", "cuda_driver_version", "rocprofiler_version")
TRACE_ID = "trace_id"  # the member of the file that repeats REQUEST_TRACE_ID
_WHAT = "the file that libkineto wrote"
_PLAIN = (b"", b"{", b" ", b"\n", b"\r", b"\t")  # libkineto never compresses; nothing is empty
TABLE = "counter"
_MIG = "MIG-"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTarget:
    """A trace, and the warnings about how it was read."""

    trace: Trace
    warnings: tuple[str, ...]


@dataclass(slots=True)
class _Parts:
    """The parts decoded so far."""

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


@dataclass(frozen=True, slots=True)
class FoundCounters:
    """warnings: what the files lack. notes: the daemon's notes, which are already among the target's warnings."""

    table: Table | None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def load_target(target_dir: Path) -> LoadedTarget:
    """Reads target.json and all sources of a target. Raises TraceError."""
    target = TargetInfo.read(target_dir)
    parts = _Parts(StringTable(), {}, dict(target.threads), [], Losses(), {})
    for directory in source_directories(target_dir):
        source = read_source(directory)
        spilled_memory.watch(np.frombuffer(source.data, np.uint8))
        _add_source(source, target, parts)
    start, end = target.window_start_ns, target.window_end_ns
    if not end:  # the agent never reported the window
        start, end = whole_extent(parts.tables)
    target = replace(
        target, threads=parts.threads, thread_use=parts.thread_use, window_start_ns=start, window_end_ns=end
    )
    coverage = [found for source, kinds in parts.sources if (found := _coverage(source, kinds, start, end))]
    parts.warnings.extend(
        f"{note}; shares exclude that time" for each in coverage if (note := coverage_note(each, start, end))
    )
    tables = with_hlo(drop_trailing_requests(parts.tables), parts.hlo_modules, parts.strings)
    tables, outside = apply_window(tables, start, end)
    marks = iterations.reported_marks(target) if parts.step_marks is None else parts.step_marks
    if not iterations.has_counted(marks, (start, end)):
        numbered = iterations.with_program_steps(tables, parts.strings)
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
    """Returns the part of the window that the source does not cover; None if that is unknown."""
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
    if source.format == raw_records.FORMAT:
        return  # a file beside the trace
    if source.torn:
        parts.warnings.append(f"{source.source}: the end of the data is missing because the daemon ended")
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
        parts.warnings.append(f"{source.source}: records in the unknown format {source.format!r} are left out")
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
                f"{whose}: {len(table)} rows of {kind} are left out: another source declares its columns differently"
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


def load_kineto_target(target_dir: Path) -> LoadedTarget:
    """Reads the file and target.json. Raises TraceError: DamagedError for a file that is incomplete or not the right
    one.
    """
    request, info = OnDemandRequest.read(target_dir), TargetInfo.read(target_dir)
    path = kineto_file(target_dir)
    try:
        with path.open("rb", buffering=0) as file:
            if file.read(1) not in _PLAIN:
                raise DamagedError(f"{_WHAT} does not begin like a libkineto trace")
        trace = load_chrome(path, name=_WHAT, whole=True)
    except FileError as exc:
        raise DamagedError(str(exc)) from exc
    _check_id(trace.head or {}, request)
    found = trace.target
    target = replace(
        info,
        pid=found.pid or info.pid,
        rank=info.rank if info.rank is not None else found.rank,
        world_size=info.world_size if info.world_size is not None else found.world_size,
        threads={**found.threads, **info.threads},
        options=found.options,
        window_start_ns=trace.window_start_ns,
        window_end_ns=trace.window_end_ns,
        complete=True,
    )
    noted = trace.notes
    trace, missing = with_counters(replace(trace, target=target), target_dir)
    return LoadedTarget(trace=trace, warnings=(*noted, *missing))


def _check_id(head: Mapping[str, str], request: OnDemandRequest) -> None:
    found = header_value(head, TRACE_ID)
    if str(found) != str(request.trace_id):
        what = f"the trace id {found!r:.40}, not {request.trace_id}" if found is not None else "no trace id"
        raise DamagedError(f"{_WHAT} has {what}, so it is not the trace of this request")


def counter_rows(
    target_dir: Path,
    strings: StringTable,
    *,
    devices: Sequence[Mapping[str, Any]],
    tables: Mapping[str, Table],
    window_ns: tuple[int, int],
) -> FoundCounters:
    """Reads the samples that overlap the window.

    devices: the properties of those of the trace, with `id` and maybe `uuid` or `pci_bus_id`.
    tables: those of the trace, whose work shows which devices it has.
    """
    warnings: list[str] = []
    try:
        gpus = TargetGpus.read(target_dir)
    except SpoolError as exc:
        gpus, warnings = TargetGpus(), [f"hardware counters: {exc}"]
    used = {
        device for kind in GPU_TABLES if kind in tables for device in unique_values(tables[kind]["device"]).tolist()
    }
    files = list[tuple[int, CounterSamples]]()
    for path in sample_files(target_dir / "raw"):
        try:
            samples = read_counter_samples(path)
        except FileError as exc:
            warnings.append(f"hardware counters: {exc}")
            continue
        device = _device(samples.header.gpu_uuid, devices, used, gpus)
        if device is None:
            head = samples.header
            why = _why_unknown(head.gpu_uuid, devices, gpus)
            warnings.append(f"hardware counters of GPU {head.gpu_index} ({head.gpu_uuid}) are left out: {why}")
            continue
        if samples.disordered:
            disordered = times(samples.disordered, "sample")
            warnings.append(f"hardware counters of device {device}: {disordered} had impossible times")
        files.append((device, samples))
    table = counter_table(files, strings, *window_ns) if files else None
    if (together := samples_per_row(files, *window_ns)) > 1:
        warnings.append(f"hardware counters: too many samples to keep, so each value is the mean of {together} samples")
    return FoundCounters(table, tuple(dict.fromkeys(warnings)), gpus.notes)


def with_counters(trace: Trace, target_dir: Path) -> tuple[Trace, tuple[str, ...]]:
    """Returns the trace with the counters of its target's folder, and warnings."""
    strings = StringTable(trace.strings)
    found = counter_rows(
        target_dir,
        strings,
        devices=trace.devices,
        tables=trace.tables,
        window_ns=(trace.window_start_ns, trace.window_end_ns),
    )
    trace = replace(trace, notes=(*trace.notes, *found.notes))
    if found.table is not None:
        trace = replace(trace, strings=tuple(strings.strings), tables={**trace.tables, TABLE: found.table})
    return trace, found.warnings


def _device(uuid: str, devices: Sequence[Mapping[str, Any]], used: Collection[int], gpus: TargetGpus) -> int | None:
    named = {each["uuid"]: each["id"] for each in devices if isinstance(each.get("uuid"), str)}
    if named:
        return named.get(uuid)
    placed, address = _by_address(devices), gpus.addresses.get(uuid, "")
    if address and (address in placed or _is_elsewhere(address, devices)):
        return placed.get(address)
    candidates = set(used) or {each["id"] for each in devices}
    return candidates.pop() if gpus.contexts == (uuid,) and len(candidates) == 1 else None


def _by_address(devices: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    return {each["pci_bus_id"]: each["id"] for each in devices if isinstance(each.get("pci_bus_id"), str)}


def _is_elsewhere(address: str, devices: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether all devices have addresses, so that a GPU with another one is none of them."""
    placed = _by_address(devices)
    return bool(address) and address not in placed and len(placed) == len(devices) > 0


def _why_unknown(uuid: str, devices: Sequence[Mapping[str, Any]], gpus: TargetGpus) -> str:
    uuids = [each["uuid"] for each in devices if isinstance(each.get("uuid"), str)]
    if any(uuid.startswith(_MIG) for uuid in uuids):
        return "the process uses a MIG instance, which has no counters of its own"
    if uuids or _is_elsewhere(gpus.addresses.get(uuid, ""), devices):
        return "it is not one of the devices that the process sees"
    return "the process uses several GPUs, and the trace does not show which of them this is"
