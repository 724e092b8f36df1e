"""The schema of PTI's records, by library version: kineto_agent.protocol.schema with the layouts of pti_layouts.

Names and numbers are those that Kineto's plug-in for Intel GPUs (xpupti) gives, so that traces read alike. Columns that
have CUPTI's numbers get them here, too: analyses know those.
"""

from collections.abc import Mapping
from functools import cache

from kineto_agent.protocol.records import SPACE_DRIVER_API, SPACE_KERNEL_NAME, SPACE_RUNTIME_API
from kineto_agent.protocol.schema import Activity, Col, Record, Schema, Texts

from kineto_trace.decode.pti.pti_layouts import LAYOUTS, WIDTHS, RecordLayout

SPACE_SYNCHRONIZATION = 16  # of names of calls, for the keys of synchronizations (agent/native/pti/vendor.c)
COPY_NAMES = tuple(f"{source}2{target}" for source in "MHDS" for target in "MHDS")  # by _memcpy_type
# By pti_view_memory_type, as ptiViewMemoryTypeToString says it: before 1.0, and since.
MEMORY_NAMES_0 = ("MEMORY(Unknown)", "HOST", "DEVICE", "SHARED")
MEMORY_NAMES_1 = ("Host (User Allocated)", "Host (Driver Allocated)", "Device", "Shared")
# By pti_view_overhead_kind: Kineto's names for them.
OVERHEAD_NAMES = {1: "Unknown", 2: "Resource", 3: "Buffer Flush", 4: "Driver", 5: "Instrumentation"}

_CODES = {4: "I", 8: "Q", 16: "16s"}
_GPU = {"correlation": "correlation_id", "context": "context_handle"}
_CALL = {"correlation": "correlation_id", "thread": "thread_id"}
_TIMES = ("start_timestamp", "end_timestamp")


def memory_names(version: str) -> tuple[str, ...]:
    """Returns what a version calls its types of memory."""
    return MEMORY_NAMES_0 if version.startswith("0.") else MEMORY_NAMES_1


def _fields(name: str, layout: RecordLayout) -> Mapping[str, tuple[str, int]]:
    """Returns the fields without their leading underscore; group and number of an API call are one field `api`."""
    fields = {
        field.removeprefix("_"): (_CODES[WIDTHS[name][field]], offset)
        for field, offset in layout.offsets.items()
        if field not in ("_api_group", "_api_id")
    }
    if "_api_group" in layout.offsets:
        fields["api"] = ("Q", min(layout.offsets["_api_group"], layout.offsets["_api_id"]))
    return fields


def _record(name: str, layout: RecordLayout, version: str) -> Record:
    size, fields = layout.size, _fields(name, layout)
    copy_names = Texts(values=dict(enumerate(COPY_NAMES)), otherwise="unknown {}")
    if name == "KERNEL":
        names = Texts(space=SPACE_KERNEL_NAME, otherwise="kernel with unknown name", demangle=True)
        return Record("kernel", size, fields, _TIMES, name="name", texts=names, **_GPU)
    if name in ("MEMORY_COPY", "MEMORY_COPY_P2P"):
        peer = {"peer": int(name == "MEMORY_COPY_P2P")}
        return Record("gpu_memcpy", size, fields, _TIMES, name="memcpy_type", texts=copy_names, constants=peer, **_GPU)
    if name == "MEMORY_FILL":
        names = Texts(values=dict(enumerate(memory_names(version))), otherwise="unknown {}")
        return Record("gpu_memset", size, fields, _TIMES, name="mem_type", texts=names, **_GPU)
    if name in ("DRIVER_API", "RUNTIME_API"):
        driver = name == "DRIVER_API"
        names = Texts(space=SPACE_DRIVER_API if driver else SPACE_RUNTIME_API, otherwise="unknown call")
        kind = "xpu_driver" if driver else "xpu_runtime"
        return Record(kind, size, fields, _TIMES, name="api", texts=names, **_CALL)
    if name == "SYNCHRONIZATION":
        names = Texts(space=SPACE_SYNCHRONIZATION, otherwise="unknown synchronization")
        return Record("xpu_sync", size, fields, _TIMES, name="api", texts=names, **_GPU)
    if name == "OVERHEAD":
        times = ("overhead_start_timestamp_ns", "overhead_end_timestamp_ns")
        names = Texts(values=OVERHEAD_NAMES, otherwise="Unknown")
        return Record("overhead", size, fields, times, name="overhead_kind", texts=names)
    return Record("", size, fields)  # external correlation: not asked for


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
