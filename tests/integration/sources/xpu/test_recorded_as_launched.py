"""Intel GPUs end to end without a GPU: an unprepared program, the real libpti_view, the real Level Zero loader."""

import gzip
import json
from pathlib import Path

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from support.machine.kernel import allowed_to_trace
from support.service.daemon import Daemon
from support.waiting import scaled
from support.xpu import level_zero
from support.xpu.level_zero_program import DONE, SECOND_NS, STOPPED, capture, counts, differences, running

WORK = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("xpu_driver", "xpu_sync", "overhead")

pytestmark = pytest.mark.skipif(not allowed_to_trace(), reason="the kernel does not let us trace (ptrace_scope?)")


@pytest.mark.parametrize("version", level_zero.RECORDED)
def test_what_is_recorded_is_what_the_driver_has_run(version: str, daemon: Daemon, tmp_path: Path) -> None:
    with running(level_zero.required(version), tmp_path) as program:
        before = len(program.launched())
        found = capture(daemon, program.pid, WORK, during=lambda: program.tell("steps 200 10 3"))
        assert (found.verdict, list(found.target.warnings)) == (STOPPED, [])
        assert counts(found.trace) == {"kernel": 6000, "gpu_memcpy": 1200, "gpu_memset": 600}
        assert differences(found.trace, program.launched()[before:]) == []
        assert program.end() == (0, "")


def test_a_capture_of_some_time_is_done(daemon: Daemon, tmp_path: Path) -> None:
    with running(level_zero.required("1.2.0"), tmp_path, "--forever") as program:
        found = capture(daemon, program.pid, duration_ns=SECOND_NS)
        assert found.verdict == DONE
        assert counts(found.trace)["kernel"] > 0
        assert program.end() == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("version", level_zero.RECORDED)
def test_a_hundred_thousand_launches_are_all_recorded(version: str, daemon: Daemon, tmp_path: Path) -> None:
    with running(level_zero.required(version), tmp_path, entries=250_000) as program:
        before = len(program.launched())
        found = capture(daemon, program.pid, WORK, during=lambda: program.tell("launch 100000"))
        assert found.verdict == STOPPED
        assert differences(found.trace, program.launched()[before:]) == []
        assert program.end() == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("version", level_zero.RECORDED)
def test_captures_leave_nothing_behind(version: str, daemon: Daemon, tmp_path: Path) -> None:
    with running(level_zero.required(version), tmp_path) as program:
        used = []
        for _ in range(8):
            found = capture(daemon, program.pid, WORK, during=lambda: program.tell("steps 5 5"))
            assert found.verdict == STOPPED
            assert counts(found.trace) == {"kernel": 25, "gpu_memcpy": 10, "gpu_memset": 5}
            used.append(program.tell("usage"))
        assert {(each["descriptors"], each["threads"]) for each in used[1:]} == {
            (used[1]["descriptors"], used[1]["threads"])
        }
        assert used[-1]["own_kib"] - used[1]["own_kib"] < 512
        assert program.end() == (0, "")


@pytest.mark.parametrize("version", ["0.17.0", "1.2.0"])
def test_calls_waits_and_overhead_are_recorded_where_they_are_named(
    version: str, daemon: Daemon, tmp_path: Path
) -> None:
    with running(level_zero.required(version), tmp_path) as program:
        found = capture(daemon, program.pid, (*WORK, *CALLS), during=lambda: program.tell("steps 10 5"))
        assert found.verdict == STOPPED
        rows, trace = counts(found.trace), found.trace
        assert rows.pop("overhead") > 0
        # A wait for each piece of work; PTI's own waits are not recorded.
        assert rows == {"kernel": 50, "gpu_memcpy": 20, "gpu_memset": 10, "cuda_driver": 80, "cuda_sync": 80}
        called = {trace.strings[name] for name in trace.tables["cuda_driver"]["name"].tolist()}
        assert called == {"zeEventHostSynchronize"}
        assert {trace.strings[name] for name in trace.tables["cuda_sync"]["name"].tolist()} == {
            "zeEventHostSynchronize"
        }
        assert program.end() == (0, "")


def test_devices_are_numbered_as_the_driver_has_them_and_copies_between_them_have_both(
    daemon: Daemon, tmp_path: Path
) -> None:
    with running(level_zero.required("1.2.0"), tmp_path, devices=2) as program:
        before = len(program.launched())

        def work() -> None:
            program.tell("steps 20 5 2")
            program.tell("peer 3")

        found = capture(daemon, program.pid, WORK, during=work)
        assert found.verdict == STOPPED
        launched = [each for each in program.launched()[before:] if each.bytes != 1 << 20]  # copies share a size
        trace = found.trace
        assert [device["name"] for device in trace.devices] == ["Fake XPU 0", "Fake XPU 1"]
        assert sorted(trace.tables["kernel"]["device"].tolist()) == sorted(
            each.device for each in launched if each.kind == level_zero.KERNEL
        )
        copies = trace.tables["gpu_memcpy"]
        between = copies["peer"] == 1
        assert copies["src_device"][between].tolist() == [0, 0, 0]
        assert copies["dst_device"][between].tolist() == [1, 1, 1]
        names = {trace.strings[name] for name in copies["name"].tolist()}
        assert names == {
            "Memcpy D2D (Device -> Device)",
            "Memcpy H2D (Host (Driver Allocated) -> Device)",
            "Memcpy D2H (Device -> Host (Driver Allocated))",
        }


def test_a_trace_file_has_kinetos_names_for_intels_activities(daemon: Daemon, tmp_path: Path) -> None:
    with running(level_zero.required("1.1.0"), tmp_path) as program:
        found = capture(
            daemon, program.pid, (*WORK, "xpu_driver", "xpu_sync"), during=lambda: program.tell("steps 5 5")
        )
        assert found.verdict == STOPPED
    chunks = daemon.stub().FetchTrace(pb.FetchTraceRequest(capture_id=found.id), timeout=scaled(10))
    events = json.loads(gzip.decompress(b"".join(chunk.data for chunk in chunks)))["traceEvents"]
    categories = {event.get("cat") for event in events if event["ph"] == "X"}
    assert {"kernel", "gpu_memcpy", "gpu_memset", "xpu_driver", "xpu_sync"} <= categories
    assert not {category for category in categories if category and category.startswith("cuda_")}
    memset = next(event["name"] for event in events if event.get("cat") == "gpu_memset")
    assert memset == "Memset (0 -> Device)"
