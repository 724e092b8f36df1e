"""The rows of GPU work and of the calls that cause it in Kineto's Chrome-trace JSON, as literals and columns.

Each function here turns one block of a table's rows into fields for the native writer: what Kineto's writer
says in C++ about one activity is said here once about all of them. A row may carry its flow event with it.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.codec import DECIMAL, SIGNED, TEXT, UNSIGNED, Field
from kineto_trace.collectives.collective_arguments import COLUMN
from kineto_trace.formats.chrome.chrome_fields import (
    ARGS,
    CLOSE,
    AnyArray,
    Columns,
    FieldNames,
    Fields,
    device_pid,
    event,
    external_id,
    first,
    flow,
    host_pid,
    numbers,
)
from kineto_trace.model.activity_tables import NO_PRIORITY


def _graph(rows: Columns) -> Fields:
    return numbers(("graph id", rows["graph_id"]), ("graph node id", rows["graph_node_id"]))


def _channel(rows: Columns) -> Fields:
    return numbers(("channel", rows["channel"]), ("channel_type", rows["channel_type"]))


def kernel(rows: Columns, names: FieldNames) -> Fields:
    """Kernels; everything that depends on the launch shape alone is one ready text."""
    shape, texts = names.shapes.texts(rows)
    head = numbers(
        ("queued", rows["queued"]),
        ("device", rows["device"]),
        ("context", rows["context"]),
        ("stream", rows["stream"]),
        ("correlation", rows["correlation"]),
    )
    priority: Fields = []
    if rows["priority"][0] != NO_PRIORITY:
        priority = [Field(b',"priority":', SIGNED, rows["priority"])]
    return [
        *event("kernel", names, rows, device_pid(rows)),
        *first(head, ARGS),
        Field(b"", TEXT, shape, texts),
        *_graph(rows),
        *priority,
        *_channel(rows),
        *([Field(b"", TEXT, rows[COLUMN], names.arguments)] if COLUMN in rows else []),
        *external_id(rows),
        CLOSE,
    ]


def gpu_memcpy(rows: Columns, names: FieldNames) -> Fields:
    """Copies with one device."""
    return _memory("gpu_memcpy", rows, names, (("device", rows["device"]), ("context", rows["context"])))


def gpu_memcpy_peer(rows: Columns, names: FieldNames) -> Fields:
    """Copies between two devices."""
    ends = (
        ("fromDevice", rows["src_device"]),
        ("inDevice", rows["device"]),
        ("toDevice", rows["dst_device"]),
        ("fromContext", rows["src_context"]),
        ("inContext", rows["context"]),
        ("toContext", rows["dst_context"]),
    )
    return _memory("gpu_memcpy", rows, names, ends)


def gpu_memset(rows: Columns, names: FieldNames) -> Fields:
    """Sets."""
    return _memory("gpu_memset", rows, names, (("device", rows["device"]), ("context", rows["context"])))


def _memory(category: str, rows: Columns, names: FieldNames, where: Sequence[tuple[str, AnyArray]]) -> Fields:
    bandwidth = rows["bytes"] / np.maximum(rows["duration"], 1)  # bytes per ns: GB/s
    head = numbers(*where, ("stream", rows["stream"]), ("correlation", rows["correlation"]), ("bytes", rows["bytes"]))
    return [
        *event(category, names, rows, device_pid(rows)),
        *first(head, ARGS),
        Field(b',"memory bandwidth (GB/s)":', DECIMAL, bandwidth),
        *_graph(rows),
        *_channel(rows),
        *external_id(rows),
        CLOSE,
    ]


def gpu_flow(rows: Columns, names: FieldNames) -> Fields:
    """The end of a flow at a GPU activity."""
    return flow("f", "ac2g", rows["correlation"], names, rows, device_pid(rows))


def cuda_runtime(rows: Columns, names: FieldNames) -> Fields:
    """Runtime calls."""
    return _api("cuda_runtime", rows, names)


def cuda_driver(rows: Columns, names: FieldNames) -> Fields:
    """Driver calls."""
    return _api("cuda_driver", rows, names)


def _api(category: str, rows: Columns, names: FieldNames) -> Fields:
    args = first(numbers(("cbid", rows["cbid"]), ("correlation", rows["correlation"])), ARGS)
    return [*event(category, names, rows, host_pid(names)), *args, *external_id(rows), CLOSE]


def api_flow(rows: Columns, names: FieldNames) -> Fields:
    """The beginning of a flow at a call."""
    return flow("s", "ac2g", rows["correlation"], names, rows, host_pid(names))


def cuda_sync(rows: Columns, names: FieldNames) -> Fields:
    """Stream and context synchronization: `device` holds a real device here."""
    return _sync(rows, names, [])


def cuda_sync_event(rows: Columns, names: FieldNames) -> Fields:
    """Waits for an event: also which one."""
    wait = [
        Field(b',"wait_on_stream":', SIGNED, rows["wait_on_stream"]),
        Field(b',"wait_on_cuda_event_record_corr_id":', SIGNED, rows["wait_on_correlation"]),
        Field(b',"wait_on_cuda_event_id":', UNSIGNED, rows["event"]),
    ]
    return _sync(rows, names, wait)


def _sync(rows: Columns, names: FieldNames, wait: Fields) -> Fields:
    return [
        *event("cuda_sync", names, rows, Field(b"", SIGNED, rows["device"])),
        Field(ARGS + b'"cuda_sync_kind":"', TEXT, rows["name"], names.texts),
        Field(b'"'),
        *wait,
        Field(b',"stream":', SIGNED, rows["stream"].view(np.int32)),
        *numbers(("correlation", rows["correlation"])),
        Field(b',"device":', SIGNED, rows["device"]),
        *numbers(("context", rows["context"])),
        CLOSE,
    ]


def sync_flow(rows: Columns, names: FieldNames) -> Fields:
    """The end of a flow at a synchronization."""
    return flow("f", "ac2g", rows["correlation"], names, rows, Field(b"", SIGNED, rows["device"]))


def overhead(rows: Columns, names: FieldNames) -> Fields:
    """CUPTI's own work."""
    return [*event("overhead", names, rows, Field(b"-1")), Field(b"},\n")]


def starts_flow(strings: Sequence[str]) -> npt.NDArray[np.bool_]:
    """For each string: whether Kineto begins a flow at calls of this name."""
    return np.array([_starts_flow(text) for text in strings], np.bool_)


_FLOW_CALLS = frozenset(
    (
        "cudaLaunchKernel",
        "cudaLaunchCooperativeKernel",
        "cudaLaunchCooperativeKernelMultiDevice",
        "cudaLaunchKernelExC",
        "cudaGraphLaunch",
        "cudaStreamSynchronize",
        "cudaDeviceSynchronize",
        "cudaStreamWaitEvent",
        "cuLaunchKernel",
        "cuLaunchKernelEx",
    )
)


def _starts_flow(name: str) -> bool:
    plain = name.removesuffix("_ptsz").removesuffix("_ptds")
    return plain in _FLOW_CALLS or plain.startswith(("cudaMemcpy", "cudaMemset"))
