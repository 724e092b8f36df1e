"""PTI's records become rows, in the layout of their version, with Kineto's names."""

import random
import struct
from collections.abc import Mapping
from typing import Any

import pytest
from kineto_agent.protocol.records import SPACE_DRIVER_API, SPACE_KERNEL_NAME, SPACE_RUNTIME_API
from kineto_agent.protocol.schema import from_json, to_json
from kineto_trace.decode import pti_layouts, pti_records
from kineto_trace.decode.decoded import Decoded, DecodeWindow
from kineto_trace.decode.pti_records import NO_QUEUE, decode
from kineto_trace.errors import UnknownVersionError
from kineto_trace.model.trace import UNKNOWN_STREAM, StringTable
from support.trace_files.declared import BASE, packed, source_of

WINDOW = DecodeWindow(BASE, BASE + 10**9)
VERSIONS = tuple(pti_layouts.LAYOUTS)
UUIDS = (bytes([7] * 16), bytes([8] * 15 + [0]))
DEVICES = [{"id": number, "uuid": uuid.hex()} for number, uuid in enumerate(UUIDS)]
QUEUE = 0x7F0000001000


def record(version: str, kind: int, *, at: int = 100, length: int = 50, **values: Any) -> bytes:
    """A record of a version; its times are relative to BASE."""
    schema = pti_records.schema_of(version)
    start, end = schema.records[kind].time
    known = {name: value for name, value in values.items() if name in schema.records[kind].fields}
    assert known == values, f"the schema lacks one of {values}"
    raw = bytearray(packed(schema, kind, **{start: BASE + at, end: BASE + at + length, **values}))
    struct.pack_into("<I", raw, 0, kind)
    return bytes(raw)


def decoded(
    version: str, *records: bytes, strings: Mapping[tuple[int, int], bytes] = {}, texts: StringTable | None = None
) -> tuple[Decoded, StringTable]:
    """The rows of one buffer with these records, from a process with two devices."""
    found = texts or StringTable()
    source = source_of(
        pti_records.schema_of(version), [b"".join(records)], strings=strings, counts={0: len(records)},
        pti_version=f"{version}.9", devices=DEVICES,
    )  # fmt: skip
    return decode(source, found, WINDOW), found


def names(result: tuple[Decoded, StringTable], table: str) -> list[str]:
    found, strings = result
    return [strings.strings[number] for number in found.tables[table]["name"].tolist()]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_schema_is_sound(version: str) -> None:
    schema = pti_records.schema_of(version)
    assert from_json(to_json(schema)) == schema


@pytest.mark.parametrize("version", VERSIONS)
def test_kernels_have_name_device_stream_and_when_they_were_appended(version: str) -> None:
    gpu: dict[str, Any] = {"context_handle": 1 << 40, "queue_handle": QUEUE, "sycl_queue_id": NO_QUEUE}
    result = decoded(
        version,
        record(version, 1, name=11, device_uuid=UUIDS[1], append_timestamp=BASE + 60, thread_id=77, **gpu),
        record(version, 1, at=300, name=12, device_uuid=UUIDS[0], append_timestamp=BASE + 250, thread_id=78, **gpu),
        strings={(SPACE_KERNEL_NAME, 11): b"_Z3addPf"},
    )
    found = result[0]
    kernels = found.tables["kernel"]
    assert (found.records, found.undecoded, found.warnings) == (2, 0, ())
    assert names(result, "kernel") == ["add(float*)", "kernel with unknown name"]
    assert kernels["start"].tolist() == [BASE + 100, BASE + 300]
    assert kernels["duration"].tolist() == [50, 50]
    assert kernels["device"].tolist() == [1, 0]
    assert kernels["stream"].tolist() == [0, 0]
    assert kernels["queued"].tolist() == [BASE + 60, BASE + 250]
    assert found.submissions is not None
    assert [column.tolist() for column in found.submissions] == [[1, 2], [77, 78], [BASE + 60, BASE + 250]]


@pytest.mark.parametrize("version", VERSIONS)
def test_copies_and_fills_are_named_as_kineto_names_them(version: str) -> None:
    copy: dict[str, Any] = {"device_uuid": UUIDS[0], "sycl_queue_id": 3, "queue_handle": QUEUE, "bytes": 4096}
    between: dict[str, Any] = {"src_uuid": UUIDS[0], "dst_uuid": UUIDS[1], "sycl_queue_id": 3, "bytes": 64}
    result = decoded(
        version,
        record(version, 8, memcpy_type=6, mem_src=1, mem_dst=2, **copy),
        record(version, 10, memcpy_type=10, mem_src=2, mem_dst=2, **between),
        record(
            version,
            9,
            mem_type=2,
            value_for_set=5,
            bytes=128,
            device_uuid=UUIDS[0],
            queue_handle=QUEUE,
            sycl_queue_id=3,
        ),
        record(version, 8, memcpy_type=99, mem_src=77, mem_dst=2, **copy),
    )
    host, device = ("HOST", "DEVICE") if version.startswith("0.") else ("Host (Driver Allocated)", "Device")
    assert names(result, "gpu_memcpy") == [
        f"Memcpy H2D ({host} -> {device})", f"Memcpy unknown 99 (unknown 77 -> {device})",
        f"Memcpy D2D ({device} -> {device})",
    ]  # fmt: skip
    assert names(result, "gpu_memset") == [f"Memset (5 -> {device})"]
    copies = result[0].tables["gpu_memcpy"]
    columns = ("bytes", "copy_kind", "src_kind", "dst_kind", "peer", "src_device", "dst_device", "stream")
    assert [copies[name].tolist() for name in columns] == [
        [4096, 4096, 64], [1, 9, 10], [2, 1, 3], [3, 3, 3], [0, 0, 1], [0, 0, 0], [0, 0, 1], [3, 3, 3],
    ]  # fmt: skip
    assert result[0].tables["gpu_memset"]["memory_kind"].tolist() == [3]


@pytest.mark.parametrize("version", VERSIONS)
def test_calls_and_waits_have_vendors_names_and_join_by_correlation(version: str) -> None:
    launch, wait, submit = 0x2D << 32 | 1, 1 << 32 | 0x50, 0x10 << 32 | 3
    result = decoded(
        version,
        record(version, 3, api=launch, correlation_id=5, thread_id=77),
        record(version, 6, api=submit, correlation_id=5, thread_id=77),
        record(version, 11, api=wait, synch_type=4, queue_handle=QUEUE),
        record(version, 11, api=wait, synch_type=7, queue_handle=1),
        record(version, 1, correlation_id=5, queue_handle=QUEUE, sycl_queue_id=9, device_uuid=UUIDS[1]),
        record(version, 5, overhead_kind=5),
        strings={
            (SPACE_DRIVER_API, launch): b"zeCommandListAppendLaunchKernel",
            (SPACE_RUNTIME_API, submit): b"urEnqueueKernelLaunch",
            (pti_records.SPACE_SYNCHRONIZATION, wait): b"zeEventHostSynchronize",
        },
    )
    found = result[0]
    assert found.categories == {"cuda_runtime": "xpu_runtime", "cuda_driver": "xpu_driver", "cuda_sync": "xpu_sync"}
    assert names(result, "cuda_driver") == ["zeCommandListAppendLaunchKernel"]
    assert names(result, "cuda_runtime") == ["urEnqueueKernelLaunch"]
    assert names(result, "cuda_sync") == ["zeEventHostSynchronize"] * 2
    assert names(result, "overhead") == ["Instrumentation"]
    assert found.tables["overhead"]["kind"].tolist() == [2 << 16]
    waits = found.tables["cuda_sync"]
    assert [waits[name].tolist() for name in ("type", "stream", "device")] == [[1, 4], [9, UNKNOWN_STREAM], [1, -1]]
    assert found.tables["kernel"]["correlation"].tolist() == found.tables["cuda_driver"]["correlation"].tolist() == [5]


@pytest.mark.parametrize("version", VERSIONS)
def test_without_calls_each_activity_has_a_number_of_its_own(version: str) -> None:
    found, _ = decoded(version, *(record(version, 1, at=at, correlation_id=4) for at in (10, 20, 30)))
    assert found.tables["kernel"]["correlation"].tolist() == [1, 2, 3]


def test_fills_of_versions_that_have_no_queue_number_are_on_the_queue_of_their_handle() -> None:
    for version, stream in (("0.12", 4), ("0.17", 0)):
        found, _ = decoded(
            version,
            record(version, 1, queue_handle=QUEUE, sycl_queue_id=4),
            record(version, 9, queue_handle=QUEUE, sycl_queue_id=0),
        )
        assert found.tables["gpu_memset"]["stream"].tolist() == [stream]


def test_devices_that_the_target_did_not_tell_of_come_after_the_others() -> None:
    other = bytes([9] * 16)
    found, _ = decoded("1.2", *(record("1.2", 1, device_uuid=uuid) for uuid in (other, UUIDS[0], other)))
    assert found.tables["kernel"]["device"].tolist() == [2, 0, 2]


def test_a_time_that_pti_could_not_determine_is_counted_and_left_out() -> None:
    found, _ = decoded("1.1", record("1.1", 1), record("1.1", 1, start_timestamp=0))
    assert (len(found.tables["kernel"]), found.undecoded) == (1, 1)


@pytest.mark.parametrize("told", ["0.10.2", "2.0.0", "1", "", None, 7])
def test_a_version_whose_layouts_are_unknown_is_refused(told: object) -> None:
    source = source_of(pti_records.schema_of("1.1"), [b""], pti_version=told)
    with pytest.raises(UnknownVersionError, match=r"does not support \(it supports 0\.12"):
        decode(source, StringTable(), WINDOW)


def test_the_same_versions_are_known_to_agent_and_decoder() -> None:
    from kineto_agent.sources.pti.known_versions import KNOWN

    assert VERSIONS == KNOWN


def test_the_name_of_a_kernel_lies_where_the_collector_looks_for_it() -> None:
    assert {layouts["KERNEL"].offsets["_name"] for layouts in pti_layouts.LAYOUTS.values()} == {24}


@pytest.mark.parametrize("seed", range(40))
def test_random_bytes_are_counted_and_never_raise(seed: int) -> None:
    chance = random.Random(seed)
    version = chance.choice(VERSIONS)
    kinds = [kind for kind, layout in pti_records.schema_of(version).records.items() if layout.type]
    data = bytearray(b"".join(record(version, chance.choice(kinds)) for _ in range(20)))
    for _ in range(chance.randrange(200)):
        data[chance.randrange(len(data))] = chance.randrange(256)
    source = source_of(
        pti_records.schema_of(version), [bytes(data)], counts={0: 20}, pti_version=version + ".0",
        devices=chance.choice([DEVICES, [{"uuid": 5}, "no"], "none", [{"uuid": "zz"}]]),
    )  # fmt: skip
    found = decode(source, StringTable(), WINDOW)
    assert sum(len(table) for table in found.tables.values()) <= 20 * 8
