"""What the CUPTI source offers, refuses and warns about."""

import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace

import pytest
from kineto_agent.sources.cupti.activity_kinds import KINDS
from kineto_agent.sources.cupti.gpu_activities import RUNTIME_CALLS, RUNTIME_MEMORY_CALLS, CuptiSource
from kineto_agent.sources.interface import DEVICE_GRAPHS, SourceError
from kineto_agent.sources.registry import choose
from support.agent.collector import LONG_MS, calling, fake_cuda, maps_with, own_warnings, recording, request, source
from support.machine.native import FAKES


def test_without_cuda_there_are_no_activity_types() -> None:
    assert CuptiSource(environ={}, maps="/dev/null").activity_types() == []


def test_with_a_libcupti_there_are_kinetos_activity_types() -> None:
    assert source().activity_types() == [
        "cuda_driver", "cuda_runtime", "cuda_sync", "gpu_memcpy", "gpu_memset", "kernel", "overhead",
    ]  # fmt: skip


def test_importing_the_source_does_not_import_ctypes() -> None:
    check = "import sys, kineto_agent.sources.cupti.gpu_activities; print('ctypes' in sys.modules)"
    done = subprocess.run([sys.executable, "-S", "-c", check], capture_output=True, text=True, check=True,
                          env={"PYTHONPATH": str(FAKES.parents[1] / "agent")})  # fmt: skip
    assert done.stdout == "False\n"


def test_an_unknown_version_is_refused_by_name() -> None:
    fake_cuda(version=139999)
    with pytest.raises(SourceError) as caught:
        source().prepare(request())
    assert caught.value.reason_code == "CUPTI_UNKNOWN_VERSION"
    assert "fake-cupti-in-process.so is CUPTI version 139999" in caught.value.reason
    assert "26 (CUDA 12.8)" in caught.value.reason
    assert "Update kineto-agent" in caught.value.reason


def test_graphs_that_change_all_the_time_are_refused_where_cupti_may_crash_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_cuda()
    monkeypatch.setattr("os.uname", lambda: SimpleNamespace(machine="aarch64"))
    jax = CuptiSource(maps=maps_with(tmp_path, "xla_cuda_plugin.so", "libcuda.so.1", str(fake_cuda().path.name)))
    with pytest.raises(SourceError, match=r"xla_cuda_plugin\.so changes CUDA graphs while they run") as caught:
        jax.prepare(request())
    assert caught.value.reason_code == "CUPTI_CHANGES_GRAPHS"


def test_a_missing_library_is_named() -> None:
    missing = CuptiSource(environ={"KINETO_CUPTI_LIBRARY": "/nowhere/libcupti.so"})
    with pytest.raises(SourceError, match=r"cannot open /nowhere/libcupti\.so") as caught:
        missing.prepare(request())
    assert caught.value.reason_code == "CUPTI_LIBRARY"


def test_a_library_that_is_not_cupti_is_refused_with_the_missing_symbol() -> None:
    other = CuptiSource(environ={"KINETO_CUPTI_LIBRARY": "libm.so.6"})
    with pytest.raises(SourceError, match=r"libm.so.6 has no symbol cuptiGetVersion") as caught:
        other.prepare(request())
    assert caught.value.reason_code == "CUPTI_LIBRARY"


def test_a_second_session_is_refused_while_one_is_open() -> None:
    fake_cuda()
    with recording(), pytest.raises(SourceError, match="a recording is still open") as caught:
        source().prepare(request())
    assert caught.value.reason_code == "CUPTI_BUSY"


def test_the_metadata_names_version_and_library() -> None:
    cuda = fake_cuda(version=26)
    session = source().prepare(request())
    session.close()
    assert session.format == "cupti/1"
    assert session.metadata["cupti_version"] == 26
    assert session.metadata["cupti_library"] == str(cuda.path)


def test_another_tool_in_the_way_is_busy() -> None:
    fake_cuda(refuse_result=39)
    session = source().prepare(request(["kernel"]))
    with pytest.raises(SourceError) as caught:
        session.start()
    session.close()
    assert caught.value.reason_code == "CUPTI_BUSY"
    assert "kernel: CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED (39)" in caught.value.reason


def test_any_other_refusal_of_everything_is_a_failure() -> None:
    fake_cuda(refuse_result=35)
    session = source().prepare(request(["kernel", "gpu_memset"]))
    with pytest.raises(SourceError, match=r"gpu_memset: CUPTI_ERROR_INSUFFICIENT_PRIVILEGES \(35\)") as caught:
        session.start()
    session.close()
    assert caught.value.reason_code == "CUPTI_FAILED"


def test_a_device_without_memory_is_named_with_what_is_needed() -> None:
    fake_cuda(refuse_result=15)
    session = source().prepare(request(["kernel"]))
    with pytest.raises(SourceError, match="needs about 16 MiB of memory on each GPU") as caught:
        session.start()
    session.close()
    assert caught.value.reason_code == "CUPTI_NOT_INITIALIZED"
    assert "kernel: CUPTI_ERROR_NOT_INITIALIZED (15)" in caught.value.reason


def test_one_refused_kind_is_a_warning_and_the_others_record() -> None:
    cuda = fake_cuda(refuse_kind=2, refuse_result=35)
    with recording(detach_limit_ms=LONG_MS) as (session, _), calling(cuda):
        cuda.launch()
        outcome = session.stop()
    assert outcome.counts.records > 0
    assert own_warnings(outcome.warnings) == [
        "CUPTI refused to record gpu_memset: CUPTI_ERROR_INSUFFICIENT_PRIVILEGES (35)"
    ]


def test_calls_without_names_are_refused_rather_than_recorded_all() -> None:
    cuda = fake_cuda(names_result=15)
    with recording(["kernel", "cuda_runtime"], detach_limit_ms=LONG_MS) as (session, reader), calling(cuda):
        cuda.launch()
        warnings = own_warnings(session.stop().warnings)
        sizes = reader.record_bytes()
    assert warnings[0] == "CUDA calls are not recorded: CUPTI refused: CUPTI_ERROR_NOT_INITIALIZED (15)"
    assert warnings[1].startswith("stays attached because of CUDA graphs that may have been launched")
    assert 5 not in sizes


def test_allocations_that_stop_the_device_are_recorded() -> None:
    fake_cuda()
    with recording(["cuda_runtime"]) as (session, reader):
        session.stop()
        assert "cudaMalloc_v3020" in reader.strings().values()


def test_allocations_in_stream_order_are_recorded_on_request_only() -> None:
    name = "cudaMallocAsync_v11020"
    assert not any(fnmatchcase(name, pattern) for pattern in RUNTIME_CALLS)
    assert any(fnmatchcase(name, pattern) for pattern in RUNTIME_MEMORY_CALLS)


def test_the_kinds_that_serialise_or_hide_kernels_are_never_enabled() -> None:
    assert not {3, 49} & {kind for kinds in KINDS.values() for kind in kinds}


def test_synchronizations_are_recorded_on_request_only() -> None:
    (choice,) = choose([source()], []).choices
    assert sorted(choice.activity_types) == [
        "cuda_driver", "cuda_runtime", "gpu_memcpy", "gpu_memset", "kernel", "overhead",
    ]  # fmt: skip


def test_beside_torchs_subscriber_calls_are_left_out_by_default(tmp_path: Path) -> None:
    cuda = fake_cuda(subscribe_result=39)
    runtime = cuda.written(5)
    with recording(named=False, maps=maps_with(tmp_path, "libtorch_cpu.so")) as (session, reader):
        cuda.launch(count=3)
        outcome = session.stop()
        records = reader.records()
    assert {kind: len(found) for kind, found in records.items()} == {10: 3}
    assert cuda.written(5) == runtime
    assert own_warnings(outcome.warnings)[0].startswith(
        "CUDA calls are not recorded, so kernels have no launches: another tool"
    )


def test_beside_torchs_subscriber_named_calls_are_said_to_be_missing(tmp_path: Path) -> None:
    cuda = fake_cuda(subscribe_result=39)
    beside = maps_with(tmp_path, "libtorch_cpu.so")
    with recording(["cuda_runtime", "kernel"], maps=beside) as (session, reader):
        cuda.launch(count=3)
        outcome = session.stop()
        records = reader.records()
    assert {kind: len(found) for kind, found in records.items()} == {10: 3}
    assert outcome.incomplete.startswith("CUDA calls are not recorded")


def test_beside_torchs_subscriber_calls_alone_are_refused(tmp_path: Path) -> None:
    fake_cuda(subscribe_result=39)
    beside = recording(["cuda_runtime"], maps=maps_with(tmp_path, "libtorch_cpu.so"))
    with pytest.raises(SourceError, match="CUDA calls are not recorded") as caught, beside:
        raise AssertionError
    assert caught.value.reason_code == "CUPTI_BUSY"


@pytest.mark.parametrize("types", [["kernel"], ["cuda_runtime", "cuda_driver"]])
def test_beside_graphs_launched_from_the_device_cupti_is_left_alone(types: list[str]) -> None:
    cuda = fake_cuda()
    with pytest.raises(SourceError, match=r"device code in /opt/server launches CUDA graphs") as caught:
        source().prepare(request(types, options={DEVICE_GRAPHS: "/opt/server"}))
    assert caught.value.reason_code == "CUDA_DEVICE_GRAPHS"
    assert not cuda.attached
