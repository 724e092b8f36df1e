"""Renders the rows of a Chrome trace that are not activities: names and order of processes and threads, the window."""

import json
from collections.abc import Iterator, Sequence, Set
from typing import Any

import numpy as np

from kineto_trace.arrays.id_sets import distinct
from kineto_trace.formats.chrome.chrome_sections import OVERHEAD_PID, Section
from kineto_trace.formats.shared.viewer_rows import row_name
from kineto_trace.model.activity_table import ViewerRow
from kineto_trace.model.activity_tables import COUNTER
from kineto_trace.model.trace import DEVICE_TABLES, HOST_TABLES, Trace, own_tables

GPU_SORT_INDEX = 5_000_000
OVERHEAD_SORT_INDEX = 0x100000A
SPANS_SORT_INDEX = 1 << 29


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _time(time_ns: int, base_ns: int) -> float:
    return max(0, time_ns - base_ns) / 1000


def rows(trace: Trace, sections: Sequence[Section], base_ns: int) -> Iterator[bytes]:
    """Yields the names, labels and order of all processes and threads that the sections use."""
    for row in _rows(trace, sections):
        yield _json({"ph": "M", "ts": _time(trace.window_start_ns, base_ns), **row})


def _rows(trace: Trace, sections: Sequence[Section]) -> Iterator[dict[str, Any]]:
    target = trace.target
    yield from _process(target.pid, target.process_name, "CPU", target.pid)
    gpu = _gpu_rows(sections, {*DEVICE_TABLES, *own_tables(trace.tables, ViewerRow.GPU)})
    measured = distinct(trace.table(COUNTER)["device"]).tolist()
    devices = {device for device, _ in gpu} | {_device_id(item) for item in trace.devices} - {-1} | set(measured)
    for device in sorted(devices):
        yield from _process(device, target.process_name, f"GPU {device}", GPU_SORT_INDEX + device)
    if any(section.kind == "overhead" for section in sections):
        yield from _process(OVERHEAD_PID, "CUPTI Overhead", "CUPTI Overhead", OVERHEAD_SORT_INDEX)
    for device, row in sorted(gpu):
        yield from _thread(device, row, row_name(device, row))
    threads = set(target.threads) | _host_threads(sections, {*HOST_TABLES, *own_tables(trace.tables, ViewerRow.CALL)})
    for tid in sorted(threads):
        name = target.threads.get(tid, target.process_name if tid else "unknown: allocations")
        yield from _thread(target.pid, tid, f"thread {tid} ({name})")


def _process(pid: int, name: str, label: str, sort_index: int) -> Iterator[dict[str, Any]]:
    yield {"name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    yield {"name": "process_labels", "pid": pid, "tid": 0, "args": {"labels": label}}
    yield {"name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": sort_index}}


def _thread(pid: int, tid: int, name: str) -> Iterator[dict[str, Any]]:
    yield {"name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
    yield {"name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _device_id(properties: Any) -> int:
    number = properties.get("id")
    return number if isinstance(number, int) and number >= 0 else -1


def _gpu_rows(sections: Sequence[Section], kinds: Set[str]) -> set[tuple[int, int]]:
    """Returns the (device, row) pairs on which there are activities of these tables."""
    found: set[tuple[int, int]] = set()
    for section in sections:
        if section.kind in kinds:
            device = section.columns["device"].astype(np.int64)
            keys = distinct((device << 32) + section.columns["tid"] + 1)
            found.update((key >> 32, (key & 0xFFFFFFFF) - 1) for key in keys.tolist())
    return found


def _host_threads(sections: Sequence[Section], kinds: Set[str]) -> set[int]:
    found: set[int] = set()
    for section in sections:
        if section.kind in kinds:
            found.update(distinct(section.columns["thread"]).tolist())
    return found


def closing_rows(trace: Trace, base_ns: int) -> list[bytes]:
    """Returns the window as a span and as marks. "Record Window End" is the last row of the file."""
    start = _time(trace.window_start_ns, base_ns)
    length = (trace.window_end_ns - trace.window_start_ns) / 1000
    span = {"ph": "X", "cat": "Trace", "ts": start, "dur": length, "pid": "Spans", "tid": "PyTorch Profiler"}
    return [
        _json({**span, "name": "PyTorch Profiler (0)", "args": {"Op count": 0}}),
        _json(
            {
                "name": "process_sort_index",
                "ph": "M",
                "ts": start,
                "pid": "Spans",
                "tid": 0,
                "args": {"sort_index": SPANS_SORT_INDEX},
            }
        ),
        _json(
            {
                "name": "Iteration Start: PyTorch Profiler",
                "ph": "i",
                "s": "g",
                "pid": "Traces",
                "tid": "Trace PyTorch Profiler",
                "ts": start,
            }
        ),
        _json(
            {
                "name": "Record Window End",
                "ph": "i",
                "s": "g",
                "pid": "",
                "tid": "",
                "ts": _time(trace.window_end_ns, base_ns),
            }
        ),
    ]
