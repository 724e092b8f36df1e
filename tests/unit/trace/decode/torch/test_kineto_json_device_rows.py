import json
from typing import Any

import pytest
from kineto_trace.decode.decoded import Decoded
from kineto_trace.decode.torch import kineto_json
from kineto_trace.model.trace import StringTable
from kineto_trace.spool.raw_records import Chunk, RawSource

BASE = 1_790_857_026_000_000_000


def row(cat: str, name: str, ts: float, args: Any, *, pid: int = 41, tid: int = 42) -> str:
    """As Kineto writes it, with any text as its arguments."""
    text = args if isinstance(args, str) else json.dumps(args)
    return (
        f'  {{\n    "ph": "X",\n    "cat": "{cat}",\n    "name": "{name}",\n    "pid": {pid},\n    "tid": {tid},\n'
        f'    "ts": {ts},\n    "dur": 2.500\n    ,\n    "args": {text}\n  }}'
    )


def document(*rows: str, devices: str = "[]") -> bytes:
    head = f'\x1e\n{{\n    "deviceProperties": {devices},\n    "baseTimeNanoseconds": {BASE},\n'
    head += '    "traceEvents": [\n    \n'
    return (head + ",\n".join(rows) + '\n  ],"traceName": "x" }').encode()


def decode(data: bytes, **metadata: Any) -> tuple[Decoded, list[str]]:
    strings = StringTable()
    chunks = (Chunk(sequence=0, records=1, offset=0, size=len(data)),)
    source = RawSource(
        source="torch_ops", format="kineto_json/1", metadata=metadata, record_bytes={}, records=1, dropped=0,
        data=memoryview(data), chunks=chunks, strings={}, torn=0,
    )  # fmt: skip
    return kineto_json.decode(source, strings), strings.strings


def columns(trace: Decoded, kind: str, *names: str) -> list[tuple[Any, ...]]:
    table = trace.tables[kind]
    return list(zip(*(table[name].tolist() for name in names), strict=True))


def test_a_kernel_has_its_times_place_shape_and_operator() -> None:
    shape = {"grid": [4, 2, 1], "block": [32, 1, 1], "device": 1, "stream": 7, "correlation": 9, "External id": 6}
    data = document(
        row("cpu_op", "npu::gemm", 1.0, {"External id": 6}),
        row("kernel", "gemm", 3.25, shape, pid=1, tid=3),
        row("privateuse1_runtime", "npuLaunch", 2.0, {"correlation": 9}),
    )
    trace, strings = decode(data)
    assert columns(trace, "kernel", "start", "duration", "device", "stream", "correlation", "grid_x", "block_x") == [
        (BASE + 3250, 2500, 1, 7, 9, 4, 32)
    ]
    assert columns(trace, "kernel", "external_id") == columns(trace, "cpu_op", "id") == [(1,)]
    assert columns(trace, "cuda_runtime", "start", "thread", "correlation") == [(BASE + 2000, 42, 9)]
    assert [strings[number] for (number,) in columns(trace, "kernel", "name")] == ["gemm"]
    assert trace.categories == {"cuda_runtime": "privateuse1_runtime"}
    assert (trace.records, trace.undecoded, trace.warnings) == (3, 0, ())


def test_a_row_without_a_device_and_stream_has_those_of_its_track() -> None:
    trace, _ = decode(document(row("gpu_memcpy", "copy", 1.0, {"bytes": 4096}, pid=2, tid=5)))
    assert columns(trace, "gpu_memcpy", "device", "stream", "bytes") == [(2, 5, 4096)]


@pytest.mark.parametrize(
    "args",
    [
        {"device": "x", "correlation": -1, "grid": [1, 2], "stream": 1 << 40, "External id": 2**80},
        {"grid": "[4, 2, 1]", "block": [1.5, 2, 3], "correlation": None, "queued": -3},
        '{"correlation": nan}',
    ],
)
def test_arguments_of_another_kind_are_left_out(args: Any) -> None:
    trace, _ = decode(document(row("kernel", "gemm", 1.0, args)))
    assert columns(trace, "kernel", "duration", "correlation", "grid_x", "block_x", "queued") == [(2500, 0, 0, 0, 0)]


def test_numbers_of_operators_are_those_of_their_own_document() -> None:
    one = document(row("cpu_op", "first", 1.0, {"External id": 3}), row("kernel", "a", 2.0, {"External id": 3}))
    two = document(row("cpu_op", "second", 9.0, {"External id": 3}), row("kernel", "b", 10.0, {"External id": 3}))
    trace, _ = decode(one + two)
    assert columns(trace, "kernel", "external_id") == [(1,), (2,)]


def test_only_the_wanted_categories_are_kept() -> None:
    data = document(row("kernel", "a", 1.0, {}), row("privateuse1_runtime", "b", 1.0, {}))
    trace, _ = decode(data, activity_types=["kernel"])
    assert (len(trace.tables["kernel"]), "cuda_runtime" in trace.tables) == (1, False)
    assert trace.warnings == ()


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ('[{"id": 0, "name": "Acme A1", "numSms": 8}]', [{"id": 0, "name": "Acme A1", "numSms": 8}]),
        ('[{"id": 3, "name": "other"}]', [{"id": 0, "name": "acme"}, {"id": 3, "name": "other"}]),
        ("[[]", [{"id": 0, "name": "acme"}]),
        ('"[" * 9', [{"id": 0, "name": "acme"}]),
    ],
)
def test_devices_are_as_their_profiler_tells_or_named_after_the_accelerator(
    devices: str, expected: list[dict[str, Any]]
) -> None:
    trace, _ = decode(document(row("kernel", "a", 1.0, {}, pid=0), devices=devices), accelerator="acme")
    assert trace.metadata == {"devices": expected}
