"""The schema of PTI's records, by library version: kineto_agent.protocol.schema with the layouts of pti_layouts.

Names and numbers are those that Kineto's plug-in for Intel GPUs (xpupti) gives, so that traces read alike. Columns that
have CUPTI's numbers get them here, too: analyses know those.
"""

from collections.abc import Mapping
from functools import cache

from kineto_agent.protocol.records import SPACE_DRIVER_API, SPACE_KERNEL_NAME, SPACE_RUNTIME_API
from kineto_agent.protocol.schema import Activity, Col, Record, Schema, Texts

from kineto_trace.decode.pti.pti_layouts import LAYOUTS, WIDTHS, PtiLayout

SPACE_SYNCHRONIZATION = 16  # of names of calls, for the keys of synchronizations (agent/native/pti/vendor.c)
COPY_NAMES = tuple(f"{source}2{target}" for source in "MHDS" for target in "MHDS")  # by _memcpy_type
# By pti_view_memory_type, as ptiViewMemoryTypeToString says it: before 1.0, and since.
MEMORY_NAMES_0 = ("MEMORY(Unknown)", "HOST", "DEVICE", "SHARED")
MEMORY_NAMES_1 = ("Host (User Allocated)", "Host (Driver Allocated)", "Device", "Shared")
# By pti_view_overhead_kind: Kineto's names for them.
OVERHEAD_NAMES = {1: "Unknown", 2: "Resource", 3: "Buffer Flush", 4: "Driver", 5: "Instrumentation"}

_CODES = {4: "I", 8: "Q", 16: "16s"}
_TIMES = ("start_timestamp", "end_timestamp")


def memory_names(version: str) -> tuple[str, ...]:
    """Returns what a version calls its types of memory."""
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
    if name == "KERNEL":
        names = Texts(space=SPACE_KERNEL_NAME, otherwise="kernel with unknown name", demangle=True)
        return gpu._replace(type="kernel", name="name", texts=names)
    if name in ("MEMORY_COPY", "MEMORY_COPY_P2P"):
        names = Texts(values=dict(enumerate(COPY_NAMES)), otherwise="unknown {}")
        peer = {"peer": int(name == "MEMORY_COPY_P2P")}
        return gpu._replace(type="gpu_memcpy", name="memcpy_type", texts=names, constants=peer)
    if name == "MEMORY_FILL":
        names = Texts(values=dict(enumerate(memory_names(version))), otherwise="unknown {}")
        return gpu._replace(type="gpu_memset", name="mem_type", texts=names)
    if name == "DRIVER_API":
        return call._replace(type="xpu_driver", texts=Texts(space=SPACE_DRIVER_API, otherwise="unknown call"))
    if name == "RUNTIME_API":
        return call._replace(type="xpu_runtime", texts=Texts(space=SPACE_RUNTIME_API, otherwise="unknown call"))
    if name == "SYNCHRONIZATION":
        names = Texts(space=SPACE_SYNCHRONIZATION, otherwise="unknown synchronization")
        return gpu._replace(type="xpu_sync", name="api", texts=names)
    if name == "OVERHEAD":
        times = ("overhead_start_timestamp_ns", "overhead_end_timestamp_ns")
        names = Texts(values=OVERHEAD_NAMES, otherwise="Unknown")
        return bare._replace(type="overhead", time=times, name="overhead_kind", texts=names)
    return bare  # external correlation: not asked for


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
