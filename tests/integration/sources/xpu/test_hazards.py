"""What PTI could do to a program, and does not: aborts, hangs, prints, variables, buffers of somebody else."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from support.machine import native
from support.machine.kernel import allowed_to_trace
from support.service.daemon import Daemon
from support.waiting import scaled
from support.xpu import level_zero
from support.xpu.level_zero_program import SECOND_NS, STOPPED, Captured, capture, counts, differences, running

WORK = ("kernel", "gpu_memcpy", "gpu_memset")
SOME = ("0.17.0", "1.0.1", "1.2.0")
VARIABLES = ("XPTI_SUBSCRIBERS", "XPTI_FRAMEWORK_DISPATCHER", "XPTI_TRACE_ENABLE", "UR_ENABLE_LAYERS")

pytestmark = pytest.mark.skipif(not allowed_to_trace(), reason="the kernel does not let us trace (ptrace_scope?)")


def refusal(found: Captured) -> str:
    """The reason code of a capture that could not begin."""
    verdict, code = found.verdict
    assert verdict == "FAILED", found
    return code


@pytest.mark.parametrize(
    ("options", "environ", "reason"),
    [
        (["--no-level-zero"], {}, "XPU_NOT_INITIALIZED"),
        (["--no-warm-up"], {"FAKE_LEVEL_ZERO_DEVICES": "0"}, "XPU_NO_DEVICE"),
        ([], {"FAKE_LEVEL_ZERO_NEW_HANDLES": "1"}, "XPU_NO_DEVICE"),
        ([], {"FAKE_LEVEL_ZERO_NO_INTROSPECTION": "1"}, "XPU_NO_INTROSPECTION"),
        ([], {"PTI_COLLECTION_MODE": "0"}, "XPU_NO_INTROSPECTION"),
        ([], {"KINETO_PTI_LIBRARY": "/nowhere/libpti_view.so.1"}, "PTI_LIBRARY"),
    ],
    ids=lambda each: str(each)[:40],
)
def test_where_pti_would_abort_or_stay_it_is_not_called(
    options: list[str], environ: dict[str, Any], reason: str, daemon: Daemon, tmp_path: Path
) -> None:
    with running(level_zero.required("1.0.1"), tmp_path, *options, **environ) as program:
        assert refusal(capture(daemon, program.pid, ["kernel"], duration_ns=SECOND_NS)) == reason
        assert program.tell("usage")["threads"] <= 3  # the program's and the agent's: none of PTI's
        assert program.end() == (0, "")


@pytest.mark.parametrize("version", ["0.17.0", "1.2.0"])
def test_a_front_without_its_core_is_refused(version: str, daemon: Daemon, tmp_path: Path) -> None:
    installed = level_zero.required(version)
    alone = tmp_path / installed.libpti_view.name
    shutil.copy(installed.libpti_view, alone)
    runtime = str(installed.folder / "pti" / "runtime")
    with running(installed, tmp_path, KINETO_PTI_LIBRARY=str(alone), LD_LIBRARY_PATH=runtime) as program:
        found = capture(daemon, program.pid, ["kernel"], duration_ns=SECOND_NS)
        assert refusal(found) == "PTI_CORE"
        assert "pip install intel-pti" in found.target.reason
        assert program.end() == (0, "")


def test_an_unknown_version_is_refused_before_anything_else_of_it_is_called(daemon: Daemon, tmp_path: Path) -> None:
    installed = level_zero.required("1.2.0")
    source = level_zero.SOURCES / "other_version.c"
    other = native.build("libpti_view.so.9", [source], ["-O2", "-fPIC", "-shared"])
    with running(installed, tmp_path, KINETO_PTI_LIBRARY=str(other)) as program:
        found = capture(daemon, program.pid, ["kernel"], duration_ns=SECOND_NS)
        assert refusal(found) == "PTI_UNKNOWN_VERSION"
        assert "PTI version 9.0.0" in found.target.reason
        assert program.end() == (0, "")


@pytest.mark.parametrize("version", level_zero.RECORDED)
def test_a_child_that_is_forked_after_a_capture_ends_by_exit(version: str, daemon: Daemon, tmp_path: Path) -> None:
    with running(level_zero.required(version), tmp_path) as program:
        assert capture(daemon, program.pid, WORK, during=lambda: program.tell("steps 5 5")).verdict == STOPPED
        assert program.tell("fork") == {"status": 7}
        assert program.end() == (0, "")


@pytest.mark.parametrize("version", SOME)
def test_a_child_that_is_forked_while_recording_ends_and_the_recording_goes_on(
    version: str, daemon: Daemon, tmp_path: Path
) -> None:
    with running(level_zero.required(version), tmp_path) as program:
        before = len(program.launched())
        answers = []

        def work() -> None:
            program.tell("steps 20 10")
            answers.append(program.tell("fork"))
            program.tell("steps 20 10")

        found = capture(daemon, program.pid, WORK, during=work)
        assert (found.verdict, answers) == (STOPPED, [{"status": 7}])
        assert differences(found.trace, program.launched()[before:]) == []
        assert program.end() == (0, "")


def test_a_forked_child_of_a_program_that_used_pti_is_refused(daemon: Daemon, tmp_path: Path) -> None:
    with running(level_zero.required("1.1.0"), tmp_path) as program:
        assert capture(daemon, program.pid, WORK, during=lambda: program.tell("steps 5 5")).verdict == STOPPED
        child = program.tell("child")["pid"]
        assert refusal(capture(daemon, child, ["kernel"], duration_ns=SECOND_NS)) == "PTI_FORKED"
        assert capture(daemon, program.pid, WORK, during=lambda: program.tell("steps 5 5")).verdict == STOPPED
        assert program.end() == (0, "")


@pytest.mark.parametrize("version", SOME)
def test_the_programs_own_profiler_gets_its_records_before_and_after_captures(
    version: str, daemon: Daemon, tmp_path: Path
) -> None:
    mapped = ["--torch", "--map", str(level_zero.required(version).libpti_view)]  # as torch does
    session = {"code": 0, "records": {"1": 100, "8": 20, "9": 10}, "foreign": 0}
    with running(level_zero.required(version), tmp_path, *mapped) as program:
        for _ in range(3):
            assert program.tell("kineto begin") == {"code": 0}
            program.tell("steps 5 10 2")
            assert program.tell("kineto end") == session
            found = capture(daemon, program.pid, WORK, during=lambda: program.tell("steps 5 10 3"))
            assert found.verdict == STOPPED
            assert counts(found.trace) == {"kernel": 150, "gpu_memcpy": 30, "gpu_memset": 15}
        assert program.tell("kineto begin") == {"code": 0}
        program.tell("steps 5 10 2")
        assert program.tell("kineto end") == session
        assert program.end() == (0, "")


@pytest.mark.parametrize("version", SOME)
def test_buffers_that_the_programs_profiler_has_left_behind_go_back_to_it(
    version: str, daemon: Daemon, tmp_path: Path
) -> None:
    mapped = ["--torch", "--map", str(level_zero.required(version).libpti_view)]
    with running(level_zero.required(version), tmp_path, *mapped) as program:
        program.tell("kineto begin")
        program.tell("steps 5 10 3")
        assert program.tell("kineto end now") == {"code": 0}
        assert program.tell("kineto lent")["lent"] > 0
        found = capture(daemon, program.pid, WORK, during=lambda: program.tell("steps 5 10 3"))
        assert found.verdict == STOPPED
        assert counts(found.trace) == {"kernel": 150, "gpu_memcpy": 30, "gpu_memset": 15}
        assert program.tell("kineto lent") == {"lent": 0}
        program.tell("kineto begin")
        assert program.tell("kineto end")["foreign"] == 0
        assert program.end() == (0, "")


@pytest.mark.parametrize("version", SOME)
def test_a_capture_gives_way_to_the_programs_own_profiler_which_gets_all(
    version: str, daemon: Daemon, tmp_path: Path
) -> None:
    mapped = ["--torch", "--map", str(level_zero.required(version).libpti_view)]
    answers = []
    with running(level_zero.required(version), tmp_path, *mapped) as program:

        def work() -> None:
            program.tell("steps 20 10 2")
            answers.append(program.tell("kineto begin"))
            program.tell("steps 20 10 2")

        found = capture(daemon, program.pid, WORK, during=work, duration_ns=60 * SECOND_NS)
        assert found.verdict == ("PARTIAL", "USER_PROFILER_STARTED")
        assert counts(found.trace) == {"kernel": 400, "gpu_memcpy": 80, "gpu_memset": 40}
        program.tell("steps 20 10 2")  # the end of the capture has switched nothing off
        answers.append(program.tell("kineto end"))
        assert answers == [{"code": 0}, {"code": 0, "records": {"1": 800, "8": 160, "9": 80}, "foreign": 0}]
        assert not program.is_traced()  # although one thread began to record and another one ended it
        assert program.end() == (0, "")


def test_no_capture_begins_while_the_programs_own_profiler_records(daemon: Daemon, tmp_path: Path) -> None:
    mapped = ["--torch", "--map", str(level_zero.required("1.2.0").libpti_view)]
    with running(level_zero.required("1.2.0"), tmp_path, *mapped) as program:
        program.tell("kineto begin")
        assert refusal(capture(daemon, program.pid, ["kernel"], duration_ns=SECOND_NS)) == "USER_PROFILER_ACTIVE"
        program.tell("steps 5 10 2")
        assert program.tell("kineto end") == {"code": 0, "records": {"1": 100, "8": 20, "9": 10}, "foreign": 0}
        assert program.end() == (0, "")


@pytest.mark.parametrize("version", SOME)
def test_records_beyond_the_limit_are_counted_and_the_program_goes_on(
    version: str, daemon: Daemon, tmp_path: Path
) -> None:
    with running(level_zero.required(version), tmp_path, entries=100_000) as program:
        before = len(program.launched())
        # Two buffers for three threads: one of them has to do without.
        found = capture(
            daemon, program.pid, ["kernel"], during=lambda: program.tell("steps 100 200 3"), limit_bytes=2 << 20
        )
        assert found.verdict[0] == "PARTIAL"
        (source,) = found.target.counts
        launched = [each for each in program.launched()[before:] if each.kind == level_zero.KERNEL]
        assert source.dropped > 0
        assert source.records + source.dropped == len(launched) == 60_000
        assert counts(found.trace)["kernel"] == source.records
        assert program.end() == (0, "")


@pytest.mark.parametrize("version", SOME)
def test_what_was_recorded_is_kept_when_the_program_ends(version: str, daemon: Daemon, tmp_path: Path) -> None:
    with running(level_zero.required(version), tmp_path) as program:
        before = len(program.launched())
        ends = []

        def work() -> None:
            program.tell("steps 20 10 2")
            ends.append(program.end())

        found = capture(daemon, program.pid, WORK, during=work, duration_ns=60 * SECOND_NS)
        assert (found.verdict, ends) == (("PARTIAL", "TARGET_EXITED"), [(0, "")])
        assert differences(found.trace, program.launched()[before:]) == []


def test_no_variable_of_ptis_stays_in_the_program(daemon: Daemon, tmp_path: Path) -> None:
    with running(level_zero.required("1.2.0"), tmp_path) as program:
        assert capture(daemon, program.pid, WORK, during=lambda: program.tell("steps 5 5")).verdict == STOPPED
        assert [program.tell(f"environ {name}")["value"] for name in VARIABLES] == [None] * len(VARIABLES)


def test_variables_of_the_programs_own_libpti_view_stay(daemon: Daemon, tmp_path: Path) -> None:
    library = level_zero.required("1.2.0").libpti_view
    with running(level_zero.required("1.2.0"), tmp_path, "--map", str(library)) as program:
        before = [program.tell(f"environ {name}")["value"] for name in VARIABLES]
        assert before[0] == str(library)
        assert capture(daemon, program.pid, WORK, during=lambda: program.tell("steps 5 5")).verdict == STOPPED
        assert [program.tell(f"environ {name}")["value"] for name in VARIABLES] == before


def test_the_offered_types_are_those_that_can_be_recorded(daemon: Daemon, tmp_path: Path) -> None:
    with running(level_zero.required("1.2.0"), tmp_path) as program:
        capture(daemon, program.pid, WORK, during=lambda: program.tell("steps 5 5"))
        listed = daemon.stub().ListProcesses(pb.ListProcessesRequest(), timeout=scaled(10)).processes
        (process,) = (each for each in listed if each.pid == program.pid)
        assert {"kernel", "gpu_memcpy", "gpu_memset", "xpu_driver", "xpu_sync"} <= set(process.activity_types)
        assert "xpu_runtime" not in process.activity_types  # SYCL was not there, let alone after PTI
