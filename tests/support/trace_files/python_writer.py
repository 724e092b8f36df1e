"""The Chrome export in plain Python, one dictionary and one json.dumps an event: what ours is measured against.

It makes the same events as kineto_trace.formats.chrome.chrome_writer from the same columns (kernels, copies, sets,
calls and their flows), and is checked against it by a test.
"""

import json
from collections.abc import Iterator
from typing import Any, TextIO

import numpy as np
from kineto_trace.formats.chrome.chrome_writer import base_ns
from kineto_trace.formats.viewer_rows import LaunchShapes
from kineto_trace.model.trace import API_TABLES, GPU_TABLES, Table, Trace

KINDS = GPU_TABLES + API_TABLES
FLOW_CALLS = ("cudaLaunch", "cudaMemcpy", "cudaMemset", "cudaDeviceSynchronize", "cuLaunchKernel")


def part_of(trace: Trace, activities: int) -> Trace:
    """The same mixture with about so many activities."""
    share = min(1.0, activities / sum(len(table) for table in trace.tables.values()))
    tables = {kind: _first(trace.table(kind), share) for kind in KINDS}
    return Trace(**{**{name: getattr(trace, name) for name in Trace.__slots__}, "tables": tables})


def _first(table: Table, share: float) -> Table:
    return table.take(np.arange(int(len(table) * share)))


def write(trace: Trace, file: TextIO) -> int:
    """Writes the rows of all activities. Returns the number of events."""
    count = 0
    for event in events(trace):
        file.write(json.dumps(event))
        file.write(",\n")
        count += 1
    return count


def events(trace: Trace) -> Iterator[dict[str, Any]]:
    base = base_ns(trace.window_start_ns)
    shapes = _shape_arguments(trace)
    for kind in KINDS:
        table = trace.table(kind)
        names = list(table.columns)
        for number, values in enumerate(zip(*(table[name].tolist() for name in names), strict=True)):
            row = dict(zip(names, values, strict=True))
            yield from _activity(trace, kind, row, base, shapes[number] if kind == "kernel" else {})


def _shape_arguments(trace: Trace) -> list[dict[str, Any]]:
    """The launch arguments of every kernel; one dictionary for all kernels of one shape, to be fair."""
    kernels = trace.table("kernel")
    if not len(kernels):
        return []
    numbers, texts = LaunchShapes(trace.devices).texts(kernels.columns)
    data, ends = texts.data.tobytes(), texts.ends.tolist()
    parsed = [json.loads(b"{" + data[ends[n] + 1 : ends[n + 1]] + b"}") for n in range(texts.count)]
    return [parsed[number] for number in numbers.tolist()]


def _activity(
    trace: Trace, kind: str, row: dict[str, Any], base: int, shape: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    name = trace.strings[row["name"]]
    place = {"pid": row["device"], "tid": row["stream"]} if kind in GPU_TABLES else None
    place = place or {"pid": trace.target.pid, "tid": row["thread"]}
    time = (row["start"] - base) / 1000
    args = _gpu_arguments(kind, row, shape) if kind in GPU_TABLES else {"cbid": row["cbid"]}
    args["correlation"] = row["correlation"]
    yield {"ph": "X", "cat": kind, "name": name, **place, "ts": time, "dur": row["duration"] / 1000, "args": args}
    flow = {"id": row["correlation"], **place, "ts": time, "cat": "ac2g", "name": "ac2g"}
    if kind in GPU_TABLES:
        yield {"ph": "f", **flow, "bp": "e"}
    elif name.startswith(FLOW_CALLS):
        yield {"ph": "s", **flow}


def _gpu_arguments(kind: str, row: dict[str, Any], shape: dict[str, Any]) -> dict[str, Any]:
    args = {"device": row["device"], "context": row["context"], "stream": row["stream"]}
    if kind == "kernel":
        args.update(queued=row["queued"], **shape)
    else:
        args["bytes"] = row["bytes"]
        args["memory bandwidth (GB/s)"] = row["bytes"] / max(1, row["duration"])
    args["graph id"], args["graph node id"] = row["graph_id"], row["graph_node_id"]
    args["channel"], args["channel_type"] = row["channel"], row["channel_type"]
    return args
