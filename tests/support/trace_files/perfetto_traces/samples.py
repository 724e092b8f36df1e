"""Perfetto traces for tests: a small one of ours, and one as another program writes it."""

import io
from typing import Any

from kineto_trace.formats.perfetto.perfetto_writer import write_perfetto
from kineto_trace.formats.perfetto_proto import data, number, packet
from kineto_trace.formats.text_sinks import TextSink
from kineto_trace.model.trace import Trace

OP = {"thread": 70, "sequence": -1, "finished": 1, "inputs": -1}
SMALL: dict[str, list[dict[str, Any]]] = {
    "user_annotation": [{**OP, "start": 10, "duration": 900, "name": "step", "id": 1, "scope": 7}],
    "cpu_op": [
        {**OP, "start": 50, "duration": 100, "name": "aten::linear", "id": 2},
        {**OP, "start": 90, "duration": 100, "name": "overlaps in part", "id": 3, "sequence": 4},
    ],
    "cuda_runtime": [
        {"start": 60, "duration": 10, "name": "cudaLaunchKernel", "thread": 70, "correlation": 5, "external_id": 2}
    ],
    "kernel": [
        {"start": 300, "duration": 100, "name": 'gemm<"a\\b">', "stream": 7, "correlation": 5, "external_id": 2}
        | {"grid_x": 3, "grid_y": 1, "grid_z": 1, "block_x": 32, "block_y": 1, "block_z": 1, "priority": -5},
        {"start": 350, "duration": 100, "name": "übergreifend", "stream": 7, "correlation": 6, "priority": 0},
    ],
    "cpu_instant_event": [
        {"start": 65, "name": "[memory]", "thread": 70, "bytes": -64, "total_allocated": 1 << 40, "address": 1 << 63}
    ],
}


def written(whole: Trace) -> bytes:
    file = io.BytesIO()
    with TextSink(file) as sink:
        write_perfetto(whole, sink)
    return file.getvalue()


def foreign() -> bytes:
    """A trace of another program: names in the events themselves, absolute times, a dictionary and a list."""
    annotation = data(10, "where") + data(11, data(10, "rank") + number(4, 3)) + data(11, data(10, "on") + number(2, 1))
    many = data(10, "sizes") + data(12, number(3, 1)) + data(12, number(3, 2**64 - 1))
    begin = (
        number(9, 1) + number(11, 5) + data(23, "aten::mm") + data(22, "cpu_op") + data(4, annotation) + data(4, many)
    )
    return b"".join(
        (
            packet(data(60, number(1, 5) + data(4, number(1, 40) + number(2, 41) + data(5, "main")))),
            packet(number(8, 1_000), number(10, 1), data(11, begin)),
            packet(number(8, 1_500), number(10, 1), data(11, number(9, 3) + number(11, 5) + data(23, "mark"))),
            packet(number(8, 3_000), number(10, 1), data(11, number(9, 2) + number(11, 5))),
        )
    )
