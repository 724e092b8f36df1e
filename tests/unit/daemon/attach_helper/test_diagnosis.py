"""What `kinetoctl doctor` is told of real processes, and that looking at them hurts neither them nor the daemon."""

import asyncio
import os
import sys
from pathlib import Path

import pytest
from kinetod.attach.attach_types import AttachCode, AttachError, Finding, Status
from kinetod.attach.inspect.process_inspection import MappedFacts, read_own
from kinetod.attach.policy import preconditions
from kinetod.attach.policy.preconditions import examine
from kinetod.attach_helper import diagnosis
from kinetod.attach_helper.diagnosis import Diagnosis, KnownAgent, decode, diagnose, encode
from kinetod.attach_helper.diagnosis_runner import DiagnosisProcess
from kinetod.base.fair_slots import fair_share_key
from support.machine import native
from support.machine.seccomp_host import KILL_PROCESS, Host, all_but
from support.service import subjects
from support.waiting import scaled, until

READY = KnownAgent(state="READY", version="1.2")
NAMES = [
    *("process", "owner", "permission", "ptrace_scope", "capabilities", "tracer", "namespaces", "/proc"),
    *("descriptors", "mappings", "memory", "threads"),
    *("executable", "interpreter", "faulthandler", "seccomp", "libc", "agent", "method"),
    *("cuda", "cupti", "cuda_graphs", "profilers", "torch"),
]


def finding(found: Diagnosis, name: str) -> Finding:
    (one,) = (each for each in found.findings if each.name == name)
    return one


def problems(found: Diagnosis) -> list[str]:
    return [each.name for each in found.findings if each.status is Status.PROBLEM]


def test_a_python_process_gets_a_pending_call() -> None:
    with subjects.python() as pid:
        found = diagnose(pid)
    assert [each.name for each in found.findings] == NAMES
    assert found.method == "pending-call"
    assert problems(found) == []
    assert finding(found, "interpreter").detail.startswith(f"CPython {sys.version.split()[0]} in /")
    assert finding(found, "libc").detail == "glibc"
    assert finding(found, "cuda").status is Status.NOTE


def test_a_main_thread_that_waits_is_told() -> None:
    with subjects.python() as pid:
        until(lambda: subjects.state(pid) == "S", "it waits")
        assert "the main thread is waiting in a system call" in finding(diagnose(pid), "method").detail


def test_cuda_and_the_version_of_cupti_are_told(tmp_path: Path) -> None:
    source = tmp_path / "cupti.c"
    for version, status in ((130001, Status.OK), (999999, Status.NOTE)):
        source.write_text(f"unsigned cuptiGetVersion(unsigned *version) {{ *version = {version}; return 0; }}\n")
        cupti = native.build("libcupti.so.13", [source], ["-O2", "-fPIC", "-shared"])
        program = f"import ctypes; ctypes.CDLL({str(native.fake_cuda())!r}); ctypes.CDLL({str(cupti)!r})"
        with subjects.python(program) as pid:
            found = diagnose(pid)
        assert finding(found, "cuda").status is Status.OK
        assert finding(found, "cupti").status is status
        assert f"version {version}" in finding(found, "cupti").detail


def test_a_cupti_that_is_not_loaded_is_found_in_the_environment(tmp_path: Path) -> None:
    source = tmp_path / "cupti.c"
    source.write_text("unsigned cuptiGetVersion(unsigned *version) { *version = 28; return 0; }\n")
    cupti = native.build("libcupti.so.12", [source], ["-O2", "-fPIC", "-shared"])
    prefix = ("env", f"KINETO_CUPTI_LIBRARY={cupti}")
    with subjects.python(f"import ctypes; ctypes.CDLL({str(native.fake_cuda())!r})", prefix=prefix) as pid:
        found = finding(diagnose(pid), "cupti")
    assert found.status is Status.OK
    assert found.detail == f"{cupti}, not loaded yet, from CUDA 12.9 (version 28)"


def test_cupti_that_had_to_stay_because_of_graphs_is_told() -> None:
    mark = (
        "import os, mmap; fd = os.memfd_create('kineto-cupti-stays-1'); os.ftruncate(fd, 4096); m = mmap.mmap(fd, 4096)"
    )
    program = f"import ctypes; ctypes.CDLL({str(native.fake_cuda())!r})"
    for text, status in ((program, Status.OK), (f"{program}; {mark}", Status.NOTE)):
        with subjects.python(text) as pid:
            assert finding(diagnose(pid), "cuda_graphs").status is status


def test_whether_torchs_profiler_is_at_work_cannot_be_seen() -> None:
    usual = {"libc": "glibc", "libpython": "", "other_python": "", "cuda": (), "cupti": "", "gpu_files": ()}
    mapped = MappedFacts(**usual, torch="/v/torch/lib/libtorch_python.so")  # type: ignore[arg-type]
    found = diagnosis._torch(mapped)
    assert found.status is Status.NOTE
    assert "whether its profiler is recording cannot be seen from outside" in found.detail


@pytest.mark.parametrize("state", ["zombie", "stopped"])
def test_a_process_that_cannot_run_is_a_problem_even_with_an_agent(state: str) -> None:
    with getattr(subjects, state)() as pid:
        for agent in (None, READY):
            found = diagnose(pid, agent)
            assert found.method == ""
            assert "process" in problems(found)


def test_a_process_that_is_not_there_is_gone() -> None:
    with pytest.raises(AttachError) as caught:
        diagnose(2**22)
    assert caught.value.code is AttachCode.GONE


def test_a_kernel_thread_is_looked_at_without_an_error() -> None:
    if not Path("/proc/2").exists():
        pytest.skip("kernel threads are not visible here")
    assert diagnose(2).method == ""


def test_with_an_agent_nothing_that_concerns_attaching_is_a_problem() -> None:
    with subjects.running(subjects.SLEEP, "1000") as pid:
        assert problems(diagnose(pid)) == ["interpreter", "method"]
        found = diagnose(pid, READY)
        assert problems(found) == []
        assert found.method == "agent"
        assert finding(found, "interpreter").status is Status.NOTE
        assert finding(found, "agent").detail == "kineto-agent 1.2, started by the process itself"


@pytest.mark.parametrize(
    ("agent", "status", "method"),
    [
        (KnownAgent(), Status.OK, "pending-call"),
        (KnownAgent(attaching=False), Status.PROBLEM, ""),
        (KnownAgent(state="BUSY", version="1.2", capture_id="c0ffee"), Status.NOTE, "agent"),
        (KnownAgent(state="READY", version="1.2", attached=True, attaching=False), Status.OK, "agent"),
        (KnownAgent(state="INCOMPATIBLE"), Status.PROBLEM, ""),
    ],
)
def test_the_agent_that_is_there_or_is_not(agent: KnownAgent, status: Status, method: str) -> None:
    with subjects.python() as pid:
        found = diagnose(pid, agent)
    assert finding(found, "agent").status is status
    assert found.method == method


def test_a_process_is_not_touched_even_if_its_filter_would_kill_it() -> None:
    with Host() as host:
        host.ask("install", program=all_but(dict.fromkeys((9, 53, 219, 319), KILL_PROCESS)).hex())
        until(lambda: Path(f"/proc/{host.pid}/syscall").read_text().startswith("0 "), "it waits for a question")
        before = Path(f"/proc/{host.pid}/status").read_text()
        found = diagnose(host.pid)
        assert finding(found, "seccomp").status in (Status.NOTE, Status.PROBLEM)
        switches = [line for line in before.splitlines() if "ctxt_switches" in line]
        assert all(line in Path(f"/proc/{host.pid}/status").read_text() for line in switches)  # it has not run


def test_every_rule_of_an_attach_is_shown() -> None:
    with subjects.python() as pid:
        subject = examine(pid)
        shown = {each.name for each in diagnose(pid).findings}
    rules = (*preconditions.RULES, *preconditions.IMAGE_RULES, preconditions.seccomp)
    assert {rule(subject).name for rule in rules} <= shown


def test_a_diagnosis_travels_as_json() -> None:
    found = Diagnosis(method="", findings=(Finding("owner", Status.PROBLEM, "d", "a", AttachCode.NOT_PERMITTED),))
    assert decode(encode(found)) == found
    for junk in (b"", b"[]", b"{}", b'{"method": "", "findings": [{}]}'):
        with pytest.raises(ValueError):
            decode(junk)


# the process that looks


def ask(process: DiagnosisProcess, pid: int) -> Diagnosis:
    return asyncio.run(process.diagnose(pid, KnownAgent()))


def test_a_process_of_its_own_looks() -> None:
    with subjects.python() as pid:
        found = ask(DiagnosisProcess(deadline_s=scaled(30)), pid)
        assert found.method == "pending-call"
    with pytest.raises(ProcessLookupError):
        ask(DiagnosisProcess(deadline_s=scaled(30)), 2**22)


@pytest.mark.parametrize(
    ("program", "detail"),
    [
        (
            "import time; time.sleep(1000)",
            "inspecting it took longer than 0.3 s: a file that it has mapped may be on a file system that is not "
            "responding",
        ),
        ("import os; os.abort()", "inspecting it failed; the daemon's log has the details"),
        ("print('junk')", "inspecting it failed; the daemon's log has the details"),
    ],
)
def test_whatever_happens_to_it_the_daemon_goes_on(program: str, detail: str) -> None:
    deadline_s = 0.3 if "sleep" in program else 30.0
    found = ask(DiagnosisProcess(command=(sys.executable, "-c", program), deadline_s=deadline_s), os.getpid())
    assert found.method == ""
    assert [each.detail for each in found.findings] == [detail]


def test_who_has_many_processes_inspected_that_do_not_answer_keeps_no_other_user_waiting() -> None:
    program = "import sys, time; time.sleep(1000 * ('\"pid\": 1,' in sys.stdin.read())); sys.exit(3)"

    async def run() -> None:
        process = DiagnosisProcess(command=(sys.executable, "-c", program), deadline_s=scaled(60))
        fair_share_key.set("hog")
        silent = [asyncio.create_task(process.diagnose(1, KnownAgent())) for _ in range(10)]
        await asyncio.sleep(0)
        fair_share_key.set("ada")
        with pytest.raises(ProcessLookupError):
            await process.diagnose(2, KnownAgent())
        assert not any(each.done() for each in silent)
        for each in silent:
            each.cancel()
        await asyncio.gather(*silent, return_exceptions=True)

    asyncio.run(run())


def test_what_the_daemon_may_do_is_its_own_matter() -> None:
    assert os.getpid() in read_own().pids
