from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kineto_agent.sources.cupti import known_versions
from kineto_trace.decode import cupti_records
from kineto_trace.decode.cupti_layouts import LAYOUTS, WIDTHS
from kineto_trace.decode.cupti_records import clocks_of, translate
from kineto_trace.errors import UnknownLayoutError, UnknownVersionError
from kineto_trace.model.activity_tables import NO_PRIORITY
from kineto_trace.model.trace import StringTable
from kineto_trace.spool.raw_records import Chunk, RawSource, read_source
from support.trace_files.h200 import RECORDINGS, make_spool, recording


def source_of(data: bytes, version: int = 26, chunks: int = 1, **changes: Any) -> RawSource:
    size = len(data) // chunks
    values: dict[str, Any] = {
        "source": "cupti",
        "format": "cupti/1",
        "metadata": {"cupti_version": version},
        "record_bytes": {},
        "records": 0,
        "dropped": 0,
        "data": memoryview(data),
        "chunks": tuple(Chunk(sequence=i, records=0, offset=i * size, size=size) for i in range(chunks)),
        "strings": {},
        "torn": 0,
    }
    return RawSource(**{**values, **changes})


def record(version: int, kind: int, layout: str, **fields: int) -> bytes:
    """One record with these fields, under the vendor's names."""
    known = LAYOUTS[version].records[layout]
    raw = bytearray(known.size)
    raw[:4] = kind.to_bytes(4, "little")
    for name, value in fields.items():
        width = WIDTHS[layout][name]
        raw[known.offsets[name] : known.offsets[name] + width] = (value % 2 ** (8 * width)).to_bytes(width, "little")
    return bytes(raw)


@pytest.mark.parametrize("name", RECORDINGS)
def test_every_record_of_a_recording_is_decoded(tmp_path: Path, name: str) -> None:
    source = read_source(make_spool(tmp_path, name) / "raw" / "cupti")
    result = cupti_records.decode(source, StringTable())
    kinds = {kind: entry["count"] for kind, entry in recording(name).info["kinds"].items()}
    assert (result.records, result.undecoded, result.warnings) == (sum(kinds.values()), 0, ())
    tables = {"1": "gpu_memcpy", "2": "gpu_memset", "4": "cuda_driver", "5": "cuda_runtime", "10": "kernel"}
    assert {kind: len(result.tables[tables[kind]]) for kind in kinds if kind in tables} == {
        kind: count for kind, count in kinds.items() if kind in tables
    }


def test_the_first_kernel_of_a_recording(tmp_path: Path) -> None:
    strings = StringTable()
    source = read_source(make_spool(tmp_path, "mlp-cupti130001") / "raw" / "cupti")
    kernels = cupti_records.decode(source, strings).tables["kernel"]
    assert {name: int(column[0]) for name, column in kernels.columns.items() if name != "name"} == {
        "start": 1795163478531690960,
        "duration": 929,
        "device": 0,
        "context": 1,
        "stream": 7,
        "correlation": 37,
        "external_id": 0,
        "grid_x": 16,
        "grid_y": 2,
        "grid_z": 1,
        "block_x": 256,
        "block_y": 1,
        "block_z": 1,
        "registers": 18,
        "static_shared_memory": 0,
        "dynamic_shared_memory": 0,
        "queued": 0,
        "priority": NO_PRIORITY,
        "graph_id": 0,
        "graph_node_id": 0,
        "channel": 0,
        "channel_type": 1,
        "hlo": -1,
    }
    assert strings.strings[kernels["name"][0]] == (
        "void scal_kernel<float, float, 1, true, 6, 5, 5, 3>"
        "(cublasTransposeParams<float>, float const*, float*, float const*)"
    )


def test_the_tables_of_agent_and_decoder_know_the_same_versions() -> None:
    assert set(LAYOUTS) == known_versions.KNOWN
    offsets = {version: layout.records["KERNEL"].offsets["name"] for version, layout in LAYOUTS.items()}
    assert offsets == known_versions.KERNEL_NAME_OFFSETS
    assert (LAYOUTS[26].records["KERNEL"].size, LAYOUTS[130001].records["KERNEL"].size) == (208, 216)


@pytest.mark.parametrize("version", sorted(LAYOUTS))
def test_every_version_decodes_its_own_kernel_record(version: int) -> None:
    has_priority = "priority" in LAYOUTS[version].records["KERNEL"].offsets
    fields = {"start": 1000, "end": 1500, "gridX": 7, "streamId": 9, "name": 0x1234, "correlationId": 5}
    data = record(version, 10, "KERNEL", **fields, **({"priority": -3} if has_priority else {})) * 3
    kernels = cupti_records.decode(source_of(data, version), StringTable()).tables["kernel"]
    assert kernels["duration"].tolist() == [500] * 3
    assert kernels["grid_x"].tolist() == [7] * 3
    assert kernels["priority"].tolist() == [-3 if has_priority else NO_PRIORITY] * 3


@pytest.mark.parametrize("version", [None, "26", 0, 19, 25, 140000])
def test_an_unknown_version_is_refused(version: object) -> None:
    with pytest.raises(UnknownVersionError, match=r"does not support \(it supports CUDA 12\.0, .*13\.4") as error:
        cupti_records.decode(source_of(b"", metadata={"cupti_version": version}), StringTable())
    assert error.value.reason_code == "CUPTI_UNKNOWN_VERSION"


def test_another_record_size_than_the_headers_say_is_refused() -> None:
    with pytest.raises(UnknownLayoutError, match="KERNEL records of 216 bytes, but its headers say 208") as error:
        cupti_records.decode(source_of(b"", record_bytes={10: 216}), StringTable())
    assert error.value.reason_code == "UNKNOWN_LAYOUT"


def test_buffers_without_one_known_record_are_refused() -> None:
    with pytest.raises(UnknownLayoutError, match=r"none of the records of CUPTI 26 .* of unknown kind 60"):
        cupti_records.decode(source_of(np.full(100, 60, np.uint32).tobytes()), StringTable())


def test_the_rest_of_a_buffer_after_an_unknown_kind_is_counted() -> None:
    api = record(26, 5, "API", cbid=211, start=1, end=2)
    data = api + bytes([60]) + bytes(39)
    source = source_of(data, chunks=1)
    source = replace(source, chunks=(replace(source.chunks[0], records=9),))
    result = cupti_records.decode(source, StringTable())
    assert (result.records, result.undecoded) == (1, 8)
    assert result.warnings == ("1 buffer could not be read past a record of unknown kind 60",)


def test_a_kind_that_only_the_collector_knows_is_stepped_over() -> None:
    api = record(26, 5, "API", cbid=211, start=1, end=2)
    result = cupti_records.decode(
        source_of(api + bytes([60]) + bytes(47) + api, record_bytes={5: 40, 60: 48}), StringTable()
    )
    assert (result.records, result.undecoded, len(result.tables["cuda_runtime"])) == (3, 0, 2)


def test_a_kind_that_the_collector_did_not_list_is_decoded_all_the_same() -> None:
    data = record(26, 5, "API", cbid=211, start=1, end=2) * 200
    result = cupti_records.decode(source_of(data, record_bytes={10: 208}), StringTable())
    assert (result.undecoded, len(result.tables["cuda_runtime"])) == (0, 200)


def test_copies_between_devices_join_the_other_copies() -> None:
    strings = StringTable()
    data = record(26, 1, "MEMCPY", copyKind=1, srcKind=1, dstKind=3, bytes=10, start=5, end=9)
    data += record(26, 22, "MEMCPY2", copyKind=10, srcKind=3, dstKind=3, bytes=20, srcDeviceId=1, dstDeviceId=2)
    copies = cupti_records.decode(source_of(data), strings).tables["gpu_memcpy"]
    assert [strings.strings[number] for number in copies["name"]] == [
        "Memcpy HtoD (Pageable -> Device)",
        "Memcpy PtoP (Device -> Device)",
    ]
    assert copies["peer"].tolist() == [0, 1]
    assert copies["src_device"].tolist() == [0, 1]
    assert copies["dst_device"].tolist() == [0, 2]


def test_kernels_recorded_one_by_one_join_the_concurrent_ones() -> None:
    data = record(26, 10, "KERNEL", start=1, end=2) + record(26, 3, "KERNEL", start=3, end=4)
    assert len(cupti_records.decode(source_of(data), StringTable()).tables["kernel"]) == 2


def test_waits_know_the_recorded_event_and_idle_streams_waits_are_dropped() -> None:
    data = record(26, 10, "KERNEL", start=1, end=2, contextId=1, streamId=7, deviceId=3)
    data += record(26, 36, "CUDA_EVENT", contextId=1, eventId=4, streamId=8, correlationId=50)
    data += record(26, 36, "CUDA_EVENT", contextId=1, eventId=4, streamId=9, correlationId=51)
    data += record(26, 38, "SYNCHRONIZATION", type=2, contextId=1, streamId=7, cudaEventId=4, start=1, end=2)
    data += record(26, 38, "SYNCHRONIZATION", type=2, contextId=1, streamId=99, cudaEventId=4, start=1, end=2)
    data += record(26, 38, "SYNCHRONIZATION", type=4, contextId=6, streamId=-1, cudaEventId=-1, start=1, end=2)
    sync = cupti_records.decode(source_of(data), StringTable()).tables["cuda_sync"]
    assert sync["type"].tolist() == [2, 4]
    assert sync["device"].tolist() == [3, -1]
    assert sync["wait_on_stream"].tolist() == [9, -1]
    assert sync["wait_on_correlation"].tolist() == [51, -1]


def test_names_that_never_came_say_so() -> None:
    strings = StringTable()
    data = record(26, 10, "KERNEL", name=0x7F00, start=1, end=2) + record(26, 4, "API", cbid=3) + record(26, 5, "API")
    tables = cupti_records.decode(source_of(data), strings).tables
    assert strings.strings[tables["kernel"]["name"][0]] == "kernel with unknown name at 0x7f00"
    assert strings.strings[tables["cuda_driver"]["name"][0]] == "driver call 3"
    assert strings.strings[tables["cuda_runtime"]["name"][0]] == "runtime call 0"


def test_an_absurd_callback_id_is_only_another_call() -> None:
    data = record(26, 5, "API", cbid=2**32 - 1) + record(26, 5, "API", cbid=1)
    strings = StringTable()
    calls = cupti_records.decode(source_of(data), strings).tables["cuda_runtime"]
    assert [strings.strings[number] for number in calls["name"]] == ["runtime call 4294967295", "runtime call 1"]


def test_no_buffers_give_empty_tables() -> None:
    result = cupti_records.decode(source_of(b"", chunks=1), StringTable())
    assert {kind: len(table) for kind, table in result.tables.items()} == dict.fromkeys(
        ("gpu_memcpy", "gpu_memset", "kernel", "cuda_driver", "cuda_runtime", "overhead", "cuda_sync"), 0
    )


@pytest.mark.parametrize("seed", range(40))
def test_damaged_buffers_never_crash_and_every_record_is_accounted_for(seed: int) -> None:
    random = np.random.default_rng(seed)
    recorded = recording("streams-cupti130001")
    data = np.frombuffer(b"".join(recorded.buffers), np.uint8).copy()
    hits = random.integers(0, len(data), 1 << (seed % 10))
    data[hits] = random.integers(0, 256, len(hits))
    cut = data[: random.integers(1, len(data))].tobytes()
    source = source_of(cut, recorded.info["cupti_version"], chunks=3)
    try:
        result = cupti_records.decode(source, StringTable())
    except UnknownLayoutError:
        return
    assert 0 < result.records <= recorded.info["records"] + len(cut) // 24
    assert (result.undecoded > 0) == bool(result.warnings)


UNIX, COUNTER, MONOTONIC = 1_790_000_000_000_000_000, 55_000_000_000_000, 9_000_000_000_000
SECOND = 1_000_000_000
# two samples, two seconds apart; the counter runs at 3 GHz, and the wall clock is slewed a little
SAMPLES = [
    [UNIX, COUNTER, MONOTONIC],
    [UNIX + 2 * SECOND + 200, COUNTER + 6 * SECOND, MONOTONIC + 2 * SECOND],
]


def columns(*starts: int, length: int = 3000) -> dict[str, np.ndarray]:
    return {"start": np.array(starts, np.int64), "duration": np.full(len(starts), length, np.int64)}


def test_unix_times_stay_as_they_are() -> None:
    rows = columns(UNIX + 5, UNIX + SECOND)
    assert not translate(rows, clocks_of(SAMPLES))
    assert rows["start"].tolist() == [UNIX + 5, UNIX + SECOND]


def test_readings_of_the_time_stamp_counter_become_unix_times() -> None:
    rows = columns(COUNTER, COUNTER + 3 * SECOND, 0)
    rows["queued"] = np.array([0, COUNTER + 3 * SECOND, 0], np.uint64)
    assert translate(rows, clocks_of(SAMPLES))
    assert rows["start"].tolist() == [UNIX, UNIX + SECOND + 100, 0]
    assert rows["duration"].tolist() == [1000] * 3
    assert rows["queued"].tolist() == [0, UNIX + SECOND + 100, 0]
    assert rows["queued"].dtype == np.uint64


def test_monotonic_times_become_unix_times() -> None:
    rows = columns(MONOTONIC + SECOND, MONOTONIC + 3 * SECOND)  # the second one after the last sample
    assert translate(rows, clocks_of(SAMPLES))
    assert rows["start"].tolist() == [UNIX + SECOND + 100, UNIX + 3 * SECOND + 300]
    assert rows["duration"].tolist() == [3000] * 2


def test_a_machine_without_a_counter_has_two_clocks() -> None:
    samples = [[UNIX, 0, MONOTONIC], [UNIX + SECOND, 0, MONOTONIC + SECOND]]
    assert [clock.first for clock in clocks_of(samples)] == [UNIX, MONOTONIC]


@pytest.mark.parametrize(
    "samples",
    [
        None,
        [],
        "ab",
        [SAMPLES[0]],
        [SAMPLES[0], SAMPLES[0]],
        [SAMPLES[0], ["x", 1, 2]],
        [[-1, 1, 1], SAMPLES[1]],
        [SAMPLES[0][:2], SAMPLES[1][:2]],
        SAMPLES[::-1],
    ],
)
def test_samples_that_say_nothing_change_nothing(samples: object) -> None:
    rows = columns(COUNTER)
    assert not translate(rows, clocks_of(samples))
    assert rows["start"].tolist() == [COUNTER]
    assert not translate(columns(), clocks_of(SAMPLES))
