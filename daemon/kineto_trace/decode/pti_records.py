"""Decodes raw PTI records ("pti/1") into columns.

Theory of operation
    The layouts depend on the version of the library: pti_schemas has them for every version that we know, and any other
    version is refused. decode_records does the rest, except for what a schema cannot express: devices are identified by
    their uuid, streams by SYCL's number of the queue or, if PTI came after SYCL, by the handle of Level Zero's queue;
    names of copies and fills have two parts; some numbers become CUPTI's; and records contain where activities were
    submitted.

    Times are Unix ns. A time that PTI could not determine is 0: such records are dropped and counted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from kineto_agent.protocol.records import PTI_FORMAT, SPACE_DRIVER_API, SPACE_KERNEL_NAME, SPACE_RUNTIME_API
from kineto_agent.protocol.schema import Activity, Col, Record, Schema, Texts

from kineto_trace.arrays.codec import Interner
from kineto_trace.arrays.id_sets import lookup, unique_values
from kineto_trace.base.array_types import NOTHING, AnyArray
from kineto_trace.decode.activity_names import name_of_number
from kineto_trace.decode.declared_records import decode_records, small_numbers
from kineto_trace.decode.decoded import EVERYTHING, Decoded, DecodeWindow, Submissions
from kineto_trace.decode.pti_layouts import LAYOUTS, WIDTHS, PtiLayout
from kineto_trace.decode.record_set import RecordSet, Rows
from kineto_trace.errors import UnknownVersionError
from kineto_trace.model.trace import UNKNOWN_STREAM, StringTable
from kineto_trace.spool.raw_records import RawSource

FORMAT = PTI_FORMAT
NO_QUEUE = 0xFFFFFFFFFFFFFFFE  # PTI_INVALID_QUEUE_ID
UNKNOWN_DEVICE = 0xFFFFFFFF
MAX_DEVICES, MAX_NAMES = 64, 4096  # of a process; of copies or fills: further ones share one
_FILLS_WITHOUT_NUMBER = ("0.12", "0.13")  # the field of SYCL's queue is not a number there

KERNEL, OVERHEAD, COPY, FILL, COPY_BETWEEN, SYNCHRONIZATION = 1, 5, 8, 9, 10, 11
_GPU_KINDS = (KERNEL, COPY, FILL, COPY_BETWEEN)
_CALL_KINDS = (3, 6)  # of the driver, of the runtime
# CUPTI's numbers: of memory (pageable, pinned, device, managed), by pti_view_memory_type;
_MEMORY_KINDS = np.array((1, 2, 3, 5), np.uint8)
# of copies, by _memcpy_type: memory of the user's and of the driver's is the host's, shared memory has no side;
_COPY_KINDS = np.array((9, 9, 1, 0, 9, 9, 1, 0, 2, 2, 8, 0, 0, 0, 0, 0), np.uint8)
_PEER_TO_PEER = 10
# of synchronizations, by pti_view_synchronization_type: event, stream, context;
_SYNC_TYPES = np.array((0, 0, 0, 3, 1, 3, 3, 4), np.uint32)
# of overheads, by pti_view_overhead_kind.
_OVERHEAD_KINDS = np.array((0, 0, 3 << 16, 1 << 16, 0, 2 << 16), np.uint32)

SPACE_SYNCHRONIZATION = 16  # of names of calls, for the keys of synchronizations (agent/native/pti/vendor.c)
COPY_NAMES = tuple(f"{source}2{target}" for source in "MHDS" for target in "MHDS")  # by _memcpy_type
# By pti_view_memory_type, as in ptiViewMemoryTypeToString: before 1.0, and since.
MEMORY_NAMES_0 = ("MEMORY(Unknown)", "HOST", "DEVICE", "SHARED")
MEMORY_NAMES_1 = ("Host (User Allocated)", "Host (Driver Allocated)", "Device", "Shared")
# By pti_view_overhead_kind: Kineto's names for them.
OVERHEAD_NAMES = {1: "Unknown", 2: "Resource", 3: "Buffer Flush", 4: "Driver", 5: "Instrumentation"}

_CODES = {4: "I", 8: "Q", 16: "16s"}
_TIMES = ("start_timestamp", "end_timestamp")


def decode(source: RawSource, strings: StringTable, window: DecodeWindow = EVERYTHING) -> Decoded:
    """Decodes all buffers of a source; names go into `strings`. Raises UnknownVersionError."""
    version = version_of(source)
    submissions: list[Submissions] = []

    def amend(found: RecordSet) -> None:
        _find_devices(found)
        _find_streams(found, version)
        _name_copies(found, version)
        _use_known_numbers(found)
        _number_uncalled(found)
        submissions.append(_launches(found))

    return replace(decode_records(source, schema_of(version), strings, window, amend), submissions=submissions[0])


def version_of(source: RawSource) -> str:
    """Returns the library's version without its patch number. Raises UnknownVersionError if its layouts are unknown."""
    told = source.metadata.get("pti_version")
    version = ".".join(told.split(".")[:2]) if isinstance(told, str) else ""
    if version not in LAYOUTS:
        raise UnknownVersionError(
            f"the target's PTI has version {told!r}, which this kinetod does not support (it supports "
            f"{', '.join(LAYOUTS)}): update kinetod, or use one of these intel-pti versions in the target"
        )
    return version


def _picked(table: AnyArray, numbers: AnyArray) -> AnyArray:
    """Returns the entries of a table; its first one for numbers that it does not have."""
    return table.take(np.where(numbers < len(table), numbers, 0))


def _number_uncalled(found: RecordSet) -> None:
    """Gives each activity a number of its own if no calls were recorded.

    Unless calls are recorded, PTI 0.12 gives all activities of a thread the same number.
    """
    if any(len(found.rows[kind]) for kind in _CALL_KINDS):
        return
    first = 1
    for rows in (found.rows[kind] for kind in _GPU_KINDS):
        rows.columns["correlation"] = np.arange(first, first + len(rows), dtype=np.uint32)
        first += len(rows)


def _launches(found: RecordSet) -> Submissions:
    """Returns when and on which thread GPU activities were appended to their command lists."""
    gpu = [found.rows[kind] for kind in _GPU_KINDS]
    return Submissions(
        correlation=np.concatenate([rows.columns["correlation"].astype(np.uint32) for rows in gpu]),
        thread=np.concatenate([rows.field("thread_id") for rows in gpu]),
        time=np.concatenate([rows.field("append_timestamp").astype(np.int64) for rows in gpu]),
    )


# ------------------------------------------------------------ devices


def _uuids(metadata: Mapping[str, Any]) -> list[bytes]:
    """Returns the uuids of the devices that the target provided, in its order, without trailing zeros."""
    found = metadata.get("devices")
    known = []
    for item in found if isinstance(found, list) else []:
        try:
            known.append(bytes.fromhex(item["uuid"]).rstrip(b"\0"))
        except (KeyError, TypeError, ValueError):
            known.append(b"")
    return known


def _find_devices(found: RecordSet) -> None:
    """Fills the columns of devices. Those that the target did not report come after the others."""
    uuids = _uuids(found.source.metadata)
    for kind in _GPU_KINDS:
        rows = found.rows[kind]
        if kind == COPY_BETWEEN:
            rows.columns["src_device"] = rows.columns["device"] = _device_numbers(rows.field("src_uuid"), uuids)
            rows.columns["dst_device"] = _device_numbers(rows.field("dst_uuid"), uuids)
        else:
            rows.columns["device"] = _device_numbers(rows.field("device_uuid"), uuids)


def _device_numbers(column: AnyArray, uuids: list[bytes]) -> AnyArray:
    numbers = np.full(len(column), UNKNOWN_DEVICE, np.uint32)
    for number, uuid in enumerate(uuids):
        numbers[column == uuid] = number
    for uuid in unique_values(column[numbers == UNKNOWN_DEVICE])[: MAX_DEVICES - len(uuids)].tolist():
        numbers[column == uuid] = len(uuids)
        uuids.append(uuid)
    return numbers


# ------------------------------------------------------------ streams


def _find_streams(found: RecordSet, version: str) -> None:
    """Fills the column stream of GPU activities, and device and stream of synchronizations on their queues."""
    gpu = [found.rows[kind] for kind in _GPU_KINDS]
    handles = [rows.field("queue_handle") for rows in gpu]
    sync = found.rows[SYNCHRONIZATION]
    waited = sync.field("queue_handle")
    for rows, numbers in zip(gpu, small_numbers(_queues(gpu, handles, version)), strict=True):
        rows.columns["stream"] = numbers
    streams = [rows.columns["stream"] for rows in gpu]
    devices = [rows.columns["device"] for rows in gpu]
    sync.columns["stream"] = _of_queue(handles, streams, waited, np.full(len(waited), UNKNOWN_STREAM))
    sync.columns["device"] = _of_queue(handles, devices, waited, np.full(len(waited), -1))


def _queues(gpu: Sequence[Rows], handles: Sequence[AnyArray], version: str) -> list[AnyArray]:
    """Returns the identity of queues: SYCL's numbers, and the handles of those without one."""
    queues = []
    for rows, handle in zip(gpu, handles, strict=True):
        number = rows.field("sycl_queue_id")
        queues.append(np.where(number == NO_QUEUE, handle, number))
    if version in _FILLS_WITHOUT_NUMBER:
        fill = _GPU_KINDS.index(FILL)
        others = [at for at in range(len(gpu)) if at != fill]
        known = [handles[at] for at in others], [queues[at] for at in others]
        queues[fill] = _of_queue(*known, handles[fill], handles[fill])
    return queues


def _of_queue(
    handles: Sequence[AnyArray], values: Sequence[AnyArray], wanted: AnyArray, otherwise: AnyArray
) -> AnyArray:
    """Returns for each queue the value of the last activity on it."""
    known, value = np.concatenate(handles), np.concatenate(values)
    row = lookup(wanted, known, np.arange(len(known)), NOTHING)
    return np.where(row == NOTHING, otherwise, value[row].astype(otherwise.dtype)) if len(known) else otherwise


# ------------------------------------------------------------ names and numbers


def _name_copies(found: RecordSet, version: str) -> None:
    """Names copies and fills as Kineto does: 'Memcpy M2D (Host (User Allocated) -> Device)', 'Memset (0 -> Device)'."""
    memory = memory_names(version)

    def copy(key: tuple[int, ...]) -> str:
        kind, source, target = (
            name_of_number(names, number) for names, number in zip((COPY_NAMES, memory, memory), key, strict=True)
        )
        return f"Memcpy {kind} ({source} -> {target})"

    def fill(key: tuple[int, ...]) -> str:
        return f"Memset ({key[1]} -> {name_of_number(memory, key[0])})"

    for kind in (COPY, COPY_BETWEEN):
        rows = found.rows[kind]
        parts = [rows.field(name) for name in ("memcpy_type", "mem_src", "mem_dst")]
        rows.columns["name"] = _named(parts, copy, found.strings)
    rows = found.rows[FILL]
    rows.columns["name"] = _named([rows.field("mem_type"), rows.field("value_for_set")], fill, found.strings)


def _named(parts: Sequence[AnyArray], name_of: Callable[[tuple[int, ...]], str], strings: StringTable) -> AnyArray:
    """Returns the number of the name for each row of these columns."""
    codes: AnyArray = np.zeros(len(parts[0]), np.uint64)
    rows: list[tuple[int, ...]] = [()]  # the values of all columns so far, by code
    for part in parts:
        of_part, of_both = Interner(), Interner()
        numbers = of_part.intern(part.astype(np.uint64)).astype(np.uint64)
        values = of_part.keys().tolist()
        codes = of_both.intern(codes * np.uint64(len(values)) + numbers).astype(np.uint64)
        rows = [(*rows[key // len(values)], values[key % len(values)]) for key in of_both.keys().tolist()]
    texts = [name_of(row) for row in rows[:MAX_NAMES]] + ["…"] * max(0, len(rows) - MAX_NAMES)
    return strings.add_all(texts).take(codes.astype(np.int64)) if len(codes) else np.empty(0, np.int32)


def _use_known_numbers(found: RecordSet) -> None:
    """Fills the columns that have CUPTI's numbers."""
    for kind in (COPY, COPY_BETWEEN):
        rows = found.rows[kind]
        rows.columns["copy_kind"] = _picked(_COPY_KINDS, rows.field("memcpy_type"))
        rows.columns["src_kind"] = _picked(_MEMORY_KINDS, rows.field("mem_src"))
        rows.columns["dst_kind"] = _picked(_MEMORY_KINDS, rows.field("mem_dst"))
    between = found.rows[COPY_BETWEEN]
    between.columns["copy_kind"] = np.full(len(between), _PEER_TO_PEER, np.uint8)
    fill, sync, overhead = found.rows[FILL], found.rows[SYNCHRONIZATION], found.rows[OVERHEAD]
    fill.columns["memory_kind"] = _picked(_MEMORY_KINDS, fill.field("mem_type")).astype(np.uint16)
    sync.columns["type"] = _picked(_SYNC_TYPES, sync.field("synch_type"))
    overhead.columns["kind"] = _picked(_OVERHEAD_KINDS, overhead.field("overhead_kind"))


# The schema of PTI's records, by library version: kineto_agent.protocol.schema with the layouts of pti_layouts.
# Names and numbers are those of Kineto's plug-in for Intel GPUs (xpupti), so that traces read alike. Columns with
# CUPTI's numbers get them here, too: analyses know those.
def memory_names(version: str) -> tuple[str, ...]:
    """Returns a version's names of types of memory."""
    return MEMORY_NAMES_0 if version.startswith("0.") else MEMORY_NAMES_1


def _fields(name: str, layout: PtiLayout) -> Mapping[str, tuple[str, int]]:
    """Returns the fields without their leading underscore; group and number of an API call are one field `api`."""
    fields = {
        field.removeprefix("_"): (_CODES[WIDTHS[name][field]], offset)
        for field, offset in layout.offsets.items()
        if field not in ("_api_group", "_api_id")
    }
    if "_api_group" in layout.offsets:
        fields["api"] = ("Q", min(layout.offsets["_api_group"], layout.offsets["_api_id"]))
    return fields


def _record(name: str, layout: PtiLayout, version: str) -> Record:
    bare = Record("", layout.size, _fields(name, layout), _TIMES)
    gpu = bare._replace(correlation="correlation_id", context="context_handle")
    call = bare._replace(correlation="correlation_id", thread="thread_id", name="api")
    copy = gpu._replace(
        type="gpu_memcpy", name="memcpy_type", texts=Texts(values=dict(enumerate(COPY_NAMES)), otherwise="unknown {}")
    )
    memory = Texts(values=dict(enumerate(memory_names(version))), otherwise="unknown {}")
    kernels = Texts(space=SPACE_KERNEL_NAME, otherwise="kernel with unknown name", demangle=True)
    waits = Texts(space=SPACE_SYNCHRONIZATION, otherwise="unknown synchronization")
    times = ("overhead_start_timestamp_ns", "overhead_end_timestamp_ns")
    overheads = Texts(values=OVERHEAD_NAMES, otherwise="Unknown")
    known = {
        "KERNEL": gpu._replace(type="kernel", name="name", texts=kernels),
        "MEMORY_COPY": copy._replace(constants={"peer": 0}),
        "MEMORY_COPY_P2P": copy._replace(constants={"peer": 1}),
        "MEMORY_FILL": gpu._replace(type="gpu_memset", name="mem_type", texts=memory),
        "DRIVER_API": call._replace(type="xpu_driver", texts=Texts(space=SPACE_DRIVER_API, otherwise="unknown call")),
        "RUNTIME_API": call._replace(
            type="xpu_runtime", texts=Texts(space=SPACE_RUNTIME_API, otherwise="unknown call")
        ),
        "SYNCHRONIZATION": gpu._replace(type="xpu_sync", name="api", texts=waits),
        "OVERHEAD": bare._replace(type="overhead", time=times, name="overhead_kind", texts=overheads),
    }
    return known.get(name, bare)  # external correlation: not requested


TYPES: Mapping[str, Activity] = {
    "kernel": Activity((Col("queued", field="append_timestamp"),)),
    "gpu_memcpy": Activity((Col("bytes"),)),
    "gpu_memset": Activity((Col("bytes"),)),
    "xpu_runtime": Activity(),
    "xpu_driver": Activity(),
    "xpu_sync": Activity(),
    "overhead": Activity(),
}


@cache
def schema_of(version: str) -> Schema:
    """Returns the schema of a version without its patch number, which must be among LAYOUTS."""
    layouts = LAYOUTS[version]
    records = {layout.kind: _record(name, layout, version) for name, layout in layouts.items()}
    return Schema("xpu", TYPES, records)
