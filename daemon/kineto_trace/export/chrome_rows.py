"""The event rows of Kineto's Chrome-trace JSON, as tables of literals and columns.

Each function here turns one block of a table's rows into fields for the native writer: what Kineto's writer
says in C++ about one activity is said here once about all of them. A row may carry its flow event with it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.codec import DECIMAL, MICROSECONDS, SIGNED, TEXT, UNSIGNED, Field, Texts
from kineto_trace.export.launch_shapes import LaunchShapes
from kineto_trace.model import NO_PRIORITY

Fields = list[Field]
AnyArray = npt.NDArray[Any]
Columns = Mapping[str, AnyArray]  # of the table, and "tid": the viewer's row


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What rows refer to by number."""

    texts: Texts  # the trace's strings, escaped
    base_ns: int  # of all times in the file
    pid: int
    shapes: LaunchShapes


def _event(category: str, names: Names, rows: Columns, pid: Field) -> Fields:
    """The beginning of a complete event, up to its duration."""
    return [
        Field(b'{"ph":"X","cat":"%s","name":"' % category.encode(), TEXT, rows["name"], names.texts),
        Field(b'","pid":', pid.operation, pid.column),
        Field(pid.literal + b',"tid":', SIGNED, rows["tid"]),
        Field(b',"ts":', MICROSECONDS, rows["start"], base=names.base_ns),
        Field(b',"dur":', MICROSECONDS, rows["duration"]),
    ]


def _flow(phase: str, names: Names, rows: Columns, pid: Field) -> Fields:
    """The flow event of a row, after the row itself. phase: "s" (start) or "f" (finish)."""
    end = b',"cat":"ac2g","name":"ac2g","bp":"e"},\n' if phase == "f" else b',"cat":"ac2g","name":"ac2g"},\n'
    return [
        Field(b'{"ph":"%s","id":' % phase.encode(), UNSIGNED, rows["correlation"]),
        Field(b',"pid":', pid.operation, pid.column),
        Field(pid.literal + b',"tid":', SIGNED, rows["tid"]),
        Field(b',"ts":', MICROSECONDS, rows["start"], base=names.base_ns),
        Field(end),
    ]


def _numbers(*pairs: tuple[str, AnyArray]) -> Fields:
    """Unsigned arguments; every literal begins with the comma."""
    return [Field(b',"%s":' % name.encode(), UNSIGNED, column) for name, column in pairs]


def _first(fields: Fields, before: bytes) -> Fields:
    """The same fields, with `before` in place of the first comma."""
    return [fields[0]._replace(literal=before + fields[0].literal[1:]), *fields[1:]]


_ARGS = b',"args":{'
_CLOSE = Field(b"}},\n")


def host_pid(names: Names) -> Field:
    """The traced process as the row's process."""
    return Field(b"%d" % names.pid)


def device_pid(rows: Columns) -> Field:
    """The GPU as the row's process, as Kineto does."""
    return Field(b"", UNSIGNED, rows["device"])


def _graph(rows: Columns) -> Fields:
    return _numbers(("graph id", rows["graph_id"]), ("graph node id", rows["graph_node_id"]))


def _channel(rows: Columns) -> Fields:
    return _numbers(("channel", rows["channel"]), ("channel_type", rows["channel_type"]))


def kernel(rows: Columns, names: Names) -> Fields:
    """Kernels; everything that depends on the launch shape alone is one ready text."""
    shape, texts = names.shapes.texts(rows)
    head = _numbers(
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
        *_event("kernel", names, rows, device_pid(rows)),
        *_first(head, _ARGS),
        Field(b"", TEXT, shape, texts),
        *_graph(rows),
        *priority,
        *_channel(rows),
        _CLOSE,
    ]


def gpu_memcpy(rows: Columns, names: Names) -> Fields:
    """Copies with one device."""
    return _memory("gpu_memcpy", rows, names, (("device", rows["device"]), ("context", rows["context"])))


def gpu_memcpy_peer(rows: Columns, names: Names) -> Fields:
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


def gpu_memset(rows: Columns, names: Names) -> Fields:
    """Sets."""
    return _memory("gpu_memset", rows, names, (("device", rows["device"]), ("context", rows["context"])))


def _memory(category: str, rows: Columns, names: Names, where: Sequence[tuple[str, AnyArray]]) -> Fields:
    bandwidth = rows["bytes"] / np.maximum(rows["duration"], 1)  # bytes per ns: GB/s
    head = _numbers(*where, ("stream", rows["stream"]), ("correlation", rows["correlation"]), ("bytes", rows["bytes"]))
    return [
        *_event(category, names, rows, device_pid(rows)),
        *_first(head, _ARGS),
        Field(b',"memory bandwidth (GB/s)":', DECIMAL, bandwidth),
        *_graph(rows),
        *_channel(rows),
        _CLOSE,
    ]


def gpu_flow(rows: Columns, names: Names) -> Fields:
    """The end of a flow at a GPU activity."""
    return _flow("f", names, rows, device_pid(rows))


def cuda_runtime(rows: Columns, names: Names) -> Fields:
    """Runtime calls."""
    return _api("cuda_runtime", rows, names)


def cuda_driver(rows: Columns, names: Names) -> Fields:
    """Driver calls."""
    return _api("cuda_driver", rows, names)


def _api(category: str, rows: Columns, names: Names) -> Fields:
    args = _first(_numbers(("cbid", rows["cbid"]), ("correlation", rows["correlation"])), _ARGS)
    return [*_event(category, names, rows, host_pid(names)), *args, _CLOSE]


def api_flow(rows: Columns, names: Names) -> Fields:
    """The beginning of a flow at a call."""
    return _flow("s", names, rows, host_pid(names))


def cuda_sync(rows: Columns, names: Names) -> Fields:
    """Stream and context synchronization: `device` holds a real device here."""
    return _sync(rows, names, [])


def cuda_sync_event(rows: Columns, names: Names) -> Fields:
    """Waits for an event: also which one."""
    wait = [
        Field(b',"wait_on_stream":', SIGNED, rows["wait_on_stream"]),
        Field(b',"wait_on_cuda_event_record_corr_id":', SIGNED, rows["wait_on_correlation"]),
        Field(b',"wait_on_cuda_event_id":', UNSIGNED, rows["event"]),
    ]
    return _sync(rows, names, wait)


def _sync(rows: Columns, names: Names, wait: Fields) -> Fields:
    return [
        *_event("cuda_sync", names, rows, Field(b"", SIGNED, rows["device"])),
        Field(_ARGS + b'"cuda_sync_kind":"', TEXT, rows["name"], names.texts),
        Field(b'"'),
        *wait,
        Field(b',"stream":', SIGNED, rows["stream"].view(np.int32)),
        *_numbers(("correlation", rows["correlation"])),
        Field(b',"device":', SIGNED, rows["device"]),
        *_numbers(("context", rows["context"])),
        _CLOSE,
    ]


def sync_flow(rows: Columns, names: Names) -> Fields:
    """The end of a flow at a synchronization."""
    return _flow("f", names, rows, Field(b"", SIGNED, rows["device"]))


def overhead(rows: Columns, names: Names) -> Fields:
    """CUPTI's own work."""
    return [*_event("overhead", names, rows, Field(b"-1")), Field(b"},\n")]


def python_root(rows: Columns, names: Names) -> Fields:
    """Outermost Python frames."""
    return _python(rows, names, Field(b',"Python parent id":null'))


def python_function(rows: Columns, names: Names) -> Fields:
    """Python frames with a caller; `parent` is the caller's row in the table."""
    return _python(rows, names, Field(b',"Python parent id":', SIGNED, rows["parent"] + 1))


def _python(rows: Columns, names: Names, parent: Field) -> Fields:
    """A slice is one ns shorter at both ends than its caller's, so that nesting is unambiguous."""
    inset = np.minimum(rows["depth"], np.maximum(rows["duration"] - 1, 0) // 2)
    nested = {"start": rows["start"] + inset, "duration": rows["duration"] - 2 * inset}
    return [
        *_event("python_function", names, {**rows, **nested}, host_pid(names)),
        Field(_ARGS + b'"Python id":', SIGNED, rows["row"] + 1),
        parent,
        Field(b',"Python thread":', UNSIGNED, rows["thread"]),
        Field(b',"samples":', SIGNED, rows["samples"]),
        Field(b',"self samples":', SIGNED, rows["self_samples"]),
        _CLOSE,
    ]


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
