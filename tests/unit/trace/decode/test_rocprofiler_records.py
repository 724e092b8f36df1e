"""Records of rocprofiler-sdk and HIP's calls as columns."""

import numpy as np
import pytest
from kineto_trace.decode import rocprofiler_records
from kineto_trace.decode import rocprofiler_records as kinds
from kineto_trace.decode.decoded import Decoded
from kineto_trace.decode.rocprofiler_records import FIRST_QUEUE, OLD_KERNEL, decode, kernel_name
from kineto_trace.errors import UnknownRocprofilerError
from kineto_trace.model.trace import UNKNOWN_STREAM, StringTable
from support.rocm.records import (
    AXPY,
    BOOT,
    GPU,
    HOST,
    OTHER_GPU,
    SECOND,
    SUM,
    TEXTS,
    UNIX,
    call,
    copy,
    dispatch,
    one_of_each,
    packed,
    source_of,
)
from support.trace_files.declared import texts


def decoded(*buffers: bytes, **metadata: object) -> tuple[Decoded, list[str]]:
    strings = StringTable()
    found = decode(source_of(buffers, **metadata), strings)  # type: ignore[arg-type]
    return found, strings.strings


def kernel_names(*buffers: bytes) -> list[str]:
    found, strings = decoded(*buffers)
    return texts(strings, found.tables["kernel"]["name"])


def kernel_streams(*buffers: bytes) -> list[int]:
    found, _ = decoded(*buffers)
    streams: list[int] = found.tables["kernel"]["stream"].tolist()
    return streams


def test_every_kind_of_record_has_its_table() -> None:
    found, strings = decoded(one_of_each())
    assert {kind: len(table) for kind, table in found.tables.items()} == {
        "kernel": 1, "gpu_memcpy": 1, "cuda_runtime": 2, "cuda_driver": 2, "rocm_memory": 1, "rocm_scratch": 1,
    }  # fmt: skip
    assert (found.records, found.undecoded, found.warnings) == (8, 0, ())
    assert texts(strings, found.tables["cuda_runtime"]["name"]) == ["hipModuleLaunchKernel", "__hipRegisterFunction"]
    assert texts(strings, found.tables["cuda_driver"]["name"]) == ["hsa_memory_allocate", "HSA call 3"]
    assert texts(strings, found.tables["rocm_memory"]["name"]) == ["Allocate"]
    assert texts(strings, found.tables["rocm_scratch"]["name"]) == ["Scratch freed"]
    memory = found.tables["rocm_memory"]
    assert (int(memory["bytes"][0]), int(memory["address"][0]), int(memory["device"][0])) == (1 << 20, 0x7000, 0)


def test_a_grid_of_work_items_becomes_one_of_blocks() -> None:
    found, _ = decoded(dispatch(items_x=130))
    kernel = found.tables["kernel"]
    assert [int(kernel[f"grid_{axis}"][0]) for axis in "xyz"] == [3, 3, 1]
    assert [int(kernel[f"block_{axis}"][0]) for axis in "xyz"] == [64, 1, 1]
    assert int(kernel["dynamic_shared_memory"][0]) == 512


def test_times_are_unix_ns_by_the_samples_of_the_clock() -> None:
    found, _ = decoded(dispatch(at=5 * SECOND, length=123))
    assert (int(found.tables["kernel"]["start"][0]), int(found.tables["kernel"]["duration"][0])) == (
        UNIX + 5 * SECOND,
        123,
    )


def test_a_clock_that_drifts_is_followed() -> None:
    from kineto_agent.protocol.records import CLOCK_PAIR, SPACE_CLOCK_PAIR

    drifting = {key: text for key, text in TEXTS.items() if key[0] != SPACE_CLOCK_PAIR}
    drifting[SPACE_CLOCK_PAIR, UNIX] = CLOCK_PAIR.pack(BOOT)
    drifting[SPACE_CLOCK_PAIR, UNIX + 10 * SECOND] = CLOCK_PAIR.pack(BOOT + 10 * SECOND - 1000)
    found = decode(source_of([dispatch(at=5 * SECOND)], drifting), StringTable())
    assert abs(int(found.tables["kernel"]["start"][0]) - (UNIX + 5 * SECOND + 500)) <= 1


def test_a_kernel_has_the_name_of_its_id_without_the_descriptors_ending() -> None:
    assert kernel_names(dispatch(kernel_id=7)) == ["axpy(float*, float*, float)"]
    assert kernel_name(b"plain.kd") == "plain"
    assert kernel_name(b"_Z3sumPKfPfi") == "sum(float const*, float*, int)"


def test_a_kernel_that_was_loaded_before_is_named_by_its_launch() -> None:
    launches = call(correlation=1, function=AXPY) + call(correlation=2, function=SUM)
    kernels = dispatch(kernel_id=0, correlation=1) + dispatch(kernel_id=0, correlation=2)
    assert kernel_names(launches, kernels) == ["axpy(float*, float*, float)", "sum(float const*, float*, int)"]


def test_what_one_launch_says_of_a_kernel_id_holds_for_a_graphs_kernels() -> None:
    """The launch of a graph names none of them."""
    calls = call(correlation=1, function=SUM) + call(correlation=2)
    assert kernel_names(calls, dispatch(kernel_id=9, correlation=2) + dispatch(kernel_id=9, correlation=1)) == [
        "sum(float const*, float*, int)",
        "sum(float const*, float*, int)",
    ]


def test_of_the_kernel_id_0_nothing_is_learned() -> None:
    calls = call(correlation=1, function=SUM) + call(correlation=2)
    kernels = dispatch(kernel_id=0, correlation=1) + dispatch(kernel_id=0, correlation=2) + dispatch(kernel_id=12)
    assert kernel_names(calls, kernels) == [
        "sum(float const*, float*, int)",
        OLD_KERNEL,
        "sum(float const*, float*, int)",
    ]
    assert kernel_names(dispatch(kernel_id=12)) == ["kernel #12"]


def test_launches_that_disagree_about_a_kernel_id_name_only_their_own_kernels() -> None:
    calls = call(correlation=1, function=SUM) + call(correlation=2, function=AXPY) + call(correlation=3)
    kernels = b"".join(dispatch(kernel_id=9, correlation=number) for number in (1, 2, 3))
    assert kernel_names(calls, kernels) == [
        "sum(float const*, float*, int)",
        "axpy(float*, float*, float)",
        "kernel #9",
    ]


def test_streams_are_those_of_the_launches_in_the_order_of_their_use() -> None:
    calls = b"".join(call(correlation=n, stream=stream) for n, stream in ((1, 0x7F00), (2, 0), (3, 0x6F00), (4, 1)))
    kernels = b"".join(dispatch(at=1000 - 100 * n, correlation=n) for n in (1, 2, 3, 4))
    assert kernel_streams(calls, kernels) == [2, 0, 1, 0]  # 1 is hipStreamLegacy, the null stream


def test_without_a_launch_the_queue_stands_for_the_stream() -> None:
    assert kernel_streams(dispatch(correlation=0, queue=0x9100) + dispatch(correlation=0, queue=0x9000, at=1)) == [
        FIRST_QUEUE + 1,
        FIRST_QUEUE,
    ]


def test_a_copy_is_on_the_stream_of_its_call() -> None:
    found, _ = decoded(call(correlation=2, stream=0x500) + copy(3, GPU, HOST) + dispatch(correlation=1))
    assert found.tables["gpu_memcpy"]["stream"].tolist() == [1]


@pytest.mark.parametrize(
    ("operation", "source", "destination", "name", "kind", "device"),
    [
        (1, HOST, HOST, "Memcpy HtoH (Host -> Host)", 9, 0),
        (2, HOST, OTHER_GPU, "Memcpy HtoD (Host -> Device)", 1, 1),
        (3, OTHER_GPU, HOST, "Memcpy DtoH (Device -> Host)", 2, 1),
        (4, GPU, GPU, "Memcpy DtoD (Device -> Device)", 8, 0),
        (4, GPU, OTHER_GPU, "Memcpy DtoD (Device -> Device)", 10, 1),
        (8, HOST, GPU, "Memcpy, operation 8", 0, 0),
    ],
)
def test_copies_say_from_where_to_where(
    operation: int, source: int, destination: int, name: str, kind: int, device: int
) -> None:
    found, strings = decoded(copy(operation, source, destination))
    table = found.tables["gpu_memcpy"]
    assert texts(strings, table["name"]) == [name]
    assert (int(table["copy_kind"][0]), int(table["device"][0]), int(table["bytes"][0])) == (kind, device, 4096)
    assert bool(table["peer"][0]) == (kind == 10)


def test_devices_are_ordinals_of_gpus() -> None:
    found, _ = decoded(dispatch() + dispatch(agent=OTHER_GPU))
    assert found.tables["kernel"]["device"].tolist() == [0, 1]


def test_agents_of_which_the_target_says_nothing_get_the_next_ordinals() -> None:
    found, _ = decoded(dispatch(agent=99) + dispatch(agent=98), agents="?")
    assert sorted(found.tables["kernel"]["device"].tolist()) == [0, 1]
    assert UNKNOWN_STREAM not in found.tables["kernel"]["device"]


def test_both_sizes_of_dispatches_are_known() -> None:
    found, _ = decoded(dispatch() + packed(kinds.KERNEL_DISPATCH, size=192, start=BOOT + 1, end=BOOT + 2))
    assert (len(found.tables["kernel"]), found.undecoded) == (2, 0)


def test_a_record_of_another_size_is_not_misread() -> None:
    strange = packed(kinds.KERNEL_DISPATCH, size=208, start=BOOT + 1, end=BOOT + 2)
    found, _ = decoded(dispatch() + strange)
    assert (len(found.tables["kernel"]), found.undecoded) == (1, 1)
    assert found.warnings == ("1 record of kind 11 that state a size of 208 bytes instead of 184 or 192",)


@pytest.mark.parametrize("version", [None, "1.3.5", 600, 9999, 10500, 20000])
def test_an_unknown_version_is_refused(version: object) -> None:
    with pytest.raises(
        UnknownRocprofilerError, match=r"does not support \(it supports 1\.0, 1\.1, 1\.2, 1\.3, 1\.4\): update kinetod"
    ):
        decode(source_of([dispatch()], rocprofiler_version=version), StringTable())


def test_calls_that_were_recorded_for_names_alone_are_not_in_the_trace() -> None:
    found, strings = decoded(call(function=SUM, stream=0x100), dispatch(kernel_id=0), activity_types=["kernel"])
    assert "cuda_runtime" not in found.tables
    assert texts(strings, found.tables["kernel"]["name"]) == ["sum(float const*, float*, int)"]


def test_correlation_ids_beyond_32_bits_still_join() -> None:
    large = (1 << 40) + 5
    found, _ = decoded(call(correlation=large), dispatch(correlation=large))
    assert found.tables["kernel"]["correlation"].tolist() == [5] == found.tables["cuda_runtime"]["correlation"].tolist()


def test_no_records_are_no_rows() -> None:
    found, _ = decoded()
    assert {len(table) for table in found.tables.values()} == {0}


def test_records_of_one_call_are_told_apart_by_nothing() -> None:
    one = call(correlation=1, stream=0x100, function=AXPY) + dispatch(kernel_id=0)
    found, strings = decoded(one * 20_000)
    assert len(found.tables["kernel"]) == 20_000
    assert np.unique(found.tables["kernel"]["stream"]).tolist() == [1]
    assert set(texts(strings, found.tables["kernel"]["name"])) == {"axpy(float*, float*, float)"}
    assert rocprofiler_records.FORMAT == "rocprofiler/1"
