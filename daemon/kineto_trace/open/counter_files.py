"""The files of hardware counters in a target's raw folder to the table `counter`.

Theory of operation
    A file has the UUID of its GPU, a trace has the indexes of the devices as the process sees them. Which index a GPU
    has is told, in this order, by
    - the agent, which reports the UUID of each device, or its PCI address, by which the daemon knows the GPU;
    - the driver: the process had a context on one GPU only, and the trace has work of one device only, or has one
      device only.
    Where neither tells, the counters are left out, and a note says so: it is never guessed.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.base.quantities import times
from kineto_trace.decode.hardware_counters import counter_table, samples_per_row
from kineto_trace.errors import FileError, SpoolError
from kineto_trace.model.trace import GPU_TABLES, StringTable, Table, Trace
from kineto_trace.spool.counter_samples import CounterSamples, read_counter_samples, sample_files
from kineto_trace.spool.target_gpus import TargetGpus

TABLE = "counter"
_MIG = "MIG-"


@dataclass(frozen=True, slots=True)
class FoundCounters:
    """warnings: what the files lack. notes: what the daemon has noted, which the target's warnings have already."""

    table: Table | None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def counter_rows(
    target_dir: Path,
    strings: StringTable,
    *,
    devices: Sequence[Mapping[str, Any]],
    tables: Mapping[str, Table],
    window_ns: tuple[int, int],
) -> FoundCounters:
    """Reads what overlaps the window. devices: the properties of those of the trace, with `id` and maybe `uuid` or
    `pci_bus_id`.

    tables: those of the trace, whose work tells which devices it has.
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
        warnings.append(f"hardware counters: there are so many samples that {together} neighbours are one, their mean")
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
    """Whether all devices have addresses, so that a GPU with another one is none of them."""
    placed = _by_address(devices)
    return bool(address) and address not in placed and len(placed) == len(devices) > 0


def _why_unknown(uuid: str, devices: Sequence[Mapping[str, Any]], gpus: TargetGpus) -> str:
    uuids = [each["uuid"] for each in devices if isinstance(each.get("uuid"), str)]
    if any(uuid.startswith(_MIG) for uuid in uuids):
        return "the process uses a MIG instance, which has no counters of its own"
    if uuids or _is_elsewhere(gpus.addresses.get(uuid, ""), devices):
        return "it is none of the devices that the process sees"
    return "the trace does not say which of its devices that is, and the process uses several GPUs"
