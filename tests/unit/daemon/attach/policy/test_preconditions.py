"""What is refused, with which code and in which words; and what is not."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from kinetod.attach.attach_types import AttachCode, AttachError, Deadline, Finding, Status
from kinetod.attach.inject.thread_policy import standing_call, thread_ids
from kinetod.attach.inspect import standstill
from kinetod.attach.inspect.process_inspection import (
    Access,
    InspectedProcess,
    OwnFacts,
    Seccomp,
    read_own,
    read_process,
)
from kinetod.attach.inspect.target_image import TargetImage
from kinetod.attach.policy import preconditions
from kinetod.attach.policy.preconditions import await_quiet, check, find, suitable_image
from kinetod.attach.policy.seccomp_check import Filter
from kinetod.processes.budgets import BUDGETS, BudgetRoom, Room
from support.machine import native
from support.machine.seccomp_host import ERRNO, KILL_PROCESS, Host, all_but
from support.service import subjects
from support.service.daemon import IMPORT_PATH, as_user
from support.service.subjects import executable, own_facts, process_facts, subject
from support.targets.live_target import pythons
from support.targets.python_versions import other_versions_slow
from support.waiting import scaled, until

SOCKETPAIR, MADVISE = 53, 28
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
reads_filters = pytest.mark.skipif(
    "CAP_SYS_ADMIN" not in read_own().capabilities or read_own().seccomp.mode != 0 or read_own().machine != "x86-64",
    reason="reading seccomp filters takes CAP_SYS_ADMIN and no filter of one's own",
)
PROGRAM = """
import faulthandler, itertools, sys
file = open(sys.argv[1], "w")
for line in itertools.chain(["dump_traceback_later(%s, file=file)" % sys.argv[2]], sys.stdin):
    eval("faulthandler." + line)
    print("done", flush=True)
"""
each_python = pytest.mark.parametrize("python", other_versions_slow(pythons()))


@contextmanager
def watched(
    arguments: str, file: Path = Path("/dev/null"), python: str = sys.executable
) -> Iterator["subprocess.Popen[str]"]:
    command = [python, "-c", PROGRAM, str(file), arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "done\n"
            yield process
        finally:
            process.kill()


@each_python
def test_a_process_that_dumps_often_is_refused_untouched(python: str) -> None:
    with watched("0.002, repeat=True", python=python) as process, pytest.raises(AttachError) as caught:
        suitable_image(process.pid)
    assert caught.value.code is AttachCode.UNSUITABLE
    assert "dump_traceback_later() is active with a period of 0.002 s" in caught.value.reason
    assert caught.value.reason.endswith("; raise that period to at least 1 s, or call cancel_dump_traceback_later()")


@each_python
def test_one_that_dumps_seldom_is_known_and_may_be_entered(python: str) -> None:
    with watched("3700.25", python=python) as process:
        until(lambda: (found := find(TargetImage(process.pid))) and found.left_s > 0, "it waits")
        image = suitable_image(process.pid)
        found = find(image)
        assert found is not None
        assert found.period_s == 3700.25
        assert 1800 < found.left_s <= 3700.25
        await_quiet(image, Deadline(scaled(60)))


@each_python
def test_one_is_still_known_after_a_stop(python: str) -> None:
    with watched("3700.25", python=python) as process:
        image = TargetImage(process.pid)
        until(lambda: find(image), "its watchdog waits")
        process.send_signal(signal.SIGSTOP)
        until(lambda: subjects.state(process.pid) == "T", "it is stopped")
        process.send_signal(signal.SIGCONT)
        until(lambda: (found := find(image)) is not None and found.left_s > 1800, "its watchdog waits on")


@each_python
def test_one_that_was_cancelled_is_gone(python: str) -> None:
    with watched("0.002, repeat=True", python=python) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("cancel_dump_traceback_later()\n")
        process.stdin.flush()
        assert process.stdout.readline() == "done\n"
        assert find(suitable_image(process.pid)) is None


def test_an_attach_waits_until_a_dump_that_is_due_has_been_written(tmp_path: Path) -> None:
    file = tmp_path / "dump"
    with watched("0.4", file) as process:
        image = TargetImage(process.pid)
        until(lambda: find(image) is not None or "Timeout" in file.read_text(), "its watchdog runs")
        await_quiet(image, Deadline(scaled(60)))
        assert "Timeout" in file.read_text()


def test_a_dump_that_stands_in_the_write_to_a_slow_file_is_one_that_is_due(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    ends = [os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)]
    try:
        with pytest.raises(BlockingIOError):
            while True:
                os.write(ends[1], bytes(4096))
        with watched("0.1", pipe) as process:
            image, write = TargetImage(process.pid), {"x86_64": 1, "aarch64": 64}[os.uname().machine]
            calls = map(standing_call, itertools.repeat(image), itertools.cycle(thread_ids(image)))
            until(lambda: (call := next(calls)) is not None and call.number == write, "it waits for the pipe")
            found = find(image)
            assert found is not None
            assert found.left_s == 0
    finally:
        for end in ends:
            os.close(end)


def refusal(pid: int) -> AttachError:
    with pytest.raises(AttachError) as caught:
        suitable_image(pid)
    return caught.value


def test_a_python_process_is_suitable() -> None:
    with subjects.python() as pid:
        image = suitable_image(pid)
        assert image.python is not None
        assert image.python.version[:2] == sys.version_info[:2]


def test_a_cuda_program_without_python_is_suitable(tmp_path: Path) -> None:
    source, program, cuda = tmp_path / "app.c", tmp_path / "app", native.fake_cuda()
    source.write_text("#include <unistd.h>\nint main(void) { for (;;) pause(); }\n")
    subprocess.run(
        [native.compiler(), source, "-o", program, "-Wl,--no-as-needed", cuda, f"-Wl,-rpath,{cuda.parent}"], check=True
    )
    with subjects.running(str(program)) as pid:
        until(lambda: subjects.state(pid) == "S", "it pauses: its libraries are loaded")
        assert suitable_image(pid).python is None


def test_a_process_whose_main_thread_has_ended_is_not_called_a_zombie() -> None:
    with subjects.without_main_thread() as pid:
        error = refusal(pid)
        assert error.code is AttachCode.UNSUITABLE
        assert error.reason.endswith(
            "cannot be attached to: its main thread ended before its other threads, so /proc shows neither its memory "
            "nor its files; make the main thread wait for the others (join) instead of ending"
        )


def test_a_zombie_is_refused() -> None:
    with subjects.zombie() as pid:
        error = refusal(pid)
        assert error.code is AttachCode.UNSUITABLE
        assert error.reason == (
            f"process {pid} (sleep) cannot be attached to: it has ended, but its parent has not reaped it "
            "(zombie); `kinetoctl ps --all` lists running processes"
        )


def test_a_stopped_process_is_refused() -> None:
    with subjects.stopped() as pid:
        error = refusal(pid)
        assert error.code is AttachCode.UNSUITABLE
        assert f"it is stopped (SIGSTOP or Ctrl-Z); resume it: kill -CONT {pid}" in error.reason


def test_a_process_in_uninterruptible_sleep_is_refused(tmp_path: Path) -> None:
    with subjects.uninterruptible(tmp_path) as pid:
        error = refusal(pid)
        assert error.code is AttachCode.UNSUITABLE
        assert "blocked in the kernel (state D) by a device or a network file system and cannot be" in error.reason


def test_a_traced_process_is_refused_and_the_tracer_named() -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    with subjects.traced() as (pid, tracer):
        error = refusal(pid)
        assert error.code is AttachCode.TRACED
        assert f"it is being traced by strace (pid {tracer}); end that tool or let it detach" in error.reason


@root_only
def test_a_process_without_proc_in_its_root_is_refused(tmp_path: Path) -> None:
    code = f"import os; os.chroot({str(tmp_path)!r}); os.write(1, b'.'); os.read(0, 1)"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.read(1) == b"."
        error = refusal(program.pid)
        assert error.code is AttachCode.UNSUITABLE
        assert "its root directory (chroot) has no /proc, which the agent needs to load its library" in error.reason
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc" / "self").touch()
        assert read_process(program.pid).sees_proc
        program.communicate()
        assert program.returncode == 0


def test_a_kernel_thread_is_refused() -> None:
    if not Path("/proc/2/comm").exists() or Path("/proc/2/comm").read_text() != "kthreadd\n":
        pytest.skip("kernel threads are not visible here")
    error = refusal(2)
    assert error.code is AttachCode.UNSUITABLE
    assert "it is a kernel thread" in error.reason


@pytest.mark.parametrize("pid", [os.getpid(), os.getppid()], ids=["daemon", "helper"])
def test_the_daemon_and_its_helper_are_refused(pid: int) -> None:
    error = refusal(pid)
    assert error.code is AttachCode.UNSUITABLE
    assert "it is the daemon itself or one of its processes" in error.reason


def test_the_hosts_init_is_refused_but_not_that_of_our_container() -> None:
    init = process_facts(pid=1, process_pid=1)
    found = preconditions.process(subject(init))
    assert (found.status, found.code) == (Status.PROBLEM, AttachCode.UNSUITABLE)
    assert found.detail == "it is the host's init process"
    assert preconditions.process(subject(init, own_facts(host_pid_namespace=False))).status is Status.OK


def test_the_number_of_a_thread_is_refused_with_the_process_that_is_meant() -> None:
    with Host() as host:
        tid = host.ask("thread", program=all_but({}).hex())
        said = refusal(tid).reason
        assert f"{tid} is the id of a thread of process {host.pid}; use process {host.pid} instead" in said


def test_a_process_that_is_not_there_is_gone() -> None:
    assert refusal(2**22).code is AttachCode.GONE


def test_a_program_without_python_and_cuda_is_refused() -> None:
    with subjects.running(subjects.SLEEP, "1000") as pid:
        error = refusal(pid)
        assert error.code is AttachCode.UNSUPPORTED
        assert "it has neither a Python interpreter (CPython 3.9 or later) nor CUDA" in error.reason


def test_pypy_is_refused_by_its_name(tmp_path: Path) -> None:
    program = tmp_path / "pypy3.10"
    shutil.copy(subjects.SLEEP, program)
    with subjects.running(str(program), "1000") as pid:
        assert "it runs PyPy; only CPython is supported; run the program with CPython" in refusal(pid).reason


@pytest.mark.parametrize(
    ("found", "detail"),
    [
        (executable(bits=32, machine="i386"), "/usr/bin/python3.11 is a 32-bit program"),
        (executable(machine="aarch64"), "/usr/bin/python3.11 is built for aarch64"),
        (
            executable(path="/opt/app", frozen="PyInstaller"),
            "/opt/app was packed with PyInstaller: its standard library is incomplete",
        ),
    ],
)
def test_programs_that_we_cannot_enter_are_refused(found: object, detail: str) -> None:
    finding = preconditions.executable(subject(process_facts(executable=found)))
    assert (finding.status, finding.code, finding.detail) == (Status.PROBLEM, AttachCode.UNSUPPORTED, detail)
    assert finding.advice


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/usr/libexec/valgrind/memcheck-amd64-linux", "Valgrind"),
        ("/usr/lib/valgrind/callgrind-arm64-linux", "Valgrind"),
        ("/usr/bin/qemu-x86_64", "QEMU"),
        ("/usr/bin/qemu-x86_64-static", "QEMU"),
        ("/opt/pin/intel64/bin/pinbin", "Pin"),
    ],
)
def test_a_program_that_is_run_translated_is_refused(path: str, name: str) -> None:
    finding = preconditions.executable(subject(process_facts(executable=executable(path=path))))
    assert (finding.status, finding.code) == (Status.PROBLEM, AttachCode.UNSUPPORTED)
    assert finding.detail == f"it runs under {name}, and code cannot be injected into translated programs"


@pytest.mark.parametrize(
    "path", ["/usr/bin/python3.11-x86_64", "/opt/box/bin/python3", "/usr/bin/x86_64-linux-gnu-python"]
)
def test_a_program_of_a_similar_name_is_not_refused(path: str) -> None:
    assert preconditions.executable(subject(process_facts(executable=executable(path=path)))).status is Status.OK


def test_a_user_shadow_stack_is_refused() -> None:
    finding = preconditions.executable(subject(process_facts(shadow_stack=True)))
    assert (finding.status, finding.code) == (Status.PROBLEM, AttachCode.UNSUPPORTED)


@pytest.mark.parametrize("version", ["3.8", "2.7"])
def test_an_old_python_is_refused(version: str) -> None:
    path = next(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"), None)
    if path is None:
        pytest.skip(f"no Python {version} here")
    with subjects.python(executable=str(path)) as pid:
        error = refusal(pid)
        assert error.code is AttachCode.UNSUPPORTED
        assert version in error.reason


def free_threaded(flag: int) -> Finding:
    class Memory:
        writes = True

        def read(self, _address: int, size: int) -> bytes:
            return (b"xdebugpy" + bytes(8) + bytes([flag]) + bytes(7))[:size]

    python = SimpleNamespace(path="/usr/bin/python3.13t", version=(3, 13, 0), symbol=lambda _name: (4096, 8))
    image = SimpleNamespace(python=python, exe="/usr/bin/python3.13t", memory=Memory(), modules={})
    return preconditions.interpreter(subject(image=image))


def test_a_free_threaded_build_is_refused() -> None:
    assert free_threaded(0).status is Status.OK
    finding = free_threaded(1)
    assert (finding.status, finding.code) == (Status.PROBLEM, AttachCode.UNSUPPORTED)
    assert finding.detail == "/usr/bin/python3.13t is a free-threaded build of Python"


# permission


def refused(**changes: object) -> InspectedProcess:
    return process_facts(access=Access.REFUSED, **changes)


@pytest.mark.parametrize(
    ("process", "own", "detail", "advice"),
    [
        (
            refused(uids=(7, 7, 7, 7)),
            own_facts(),
            "it runs as uid 7, the daemon as uid 1000",
            "use a daemon that runs as uid 7, or the system's daemon, which runs as root",
        ),
        (
            refused(dumpable=False),
            own_facts(),
            "it runs as uid 1000 like the daemon, but is not dumpable (it changed its ids or called prctl)",
            "run kinetod as root, or with CAP_SYS_PTRACE",
        ),
        (
            refused(),
            own_facts(ptrace_scope=1),
            "ptrace_scope is 1: only one of its ancestors can trace it",
            "run kinetod as root, or with CAP_SYS_PTRACE, or set kernel.yama.ptrace_scope to 0",
        ),
        (
            refused(),
            own_facts(ptrace_scope=2),
            "ptrace_scope is 2: only an administrator can trace it",
            "run kinetod as root, or with CAP_SYS_PTRACE",
        ),
        (
            refused(),
            own_facts(ptrace_scope=3, uid=0, capabilities=frozenset(("CAP_SYS_PTRACE",))),
            "ptrace_scope is 3: no process can be traced",
            "set kernel.yama.ptrace_scope to a lower value, which requires a reboot",
        ),
        (
            refused(),
            own_facts(),
            "the kernel does not let the daemon trace it",
            "run kinetod as root, or with CAP_SYS_PTRACE",
        ),
    ],
)
def test_a_refusal_of_the_kernel_is_explained(
    process: InspectedProcess, own: OwnFacts, detail: str, advice: str
) -> None:
    finding = preconditions.permission(subject(process, own))
    assert finding == Finding("permission", Status.PROBLEM, detail, advice, AttachCode.NOT_PERMITTED)


def test_what_the_kernel_allows_is_no_problem_whatever_the_rules_say() -> None:
    strange = subject(process_facts(uids=(7, 7, 7, 7), dumpable=False), own_facts(ptrace_scope=1))
    for rule in (preconditions.permission, preconditions.owner, preconditions.ptrace_scope):
        assert rule(strange).status is Status.OK


@root_only
def test_another_users_process_is_refused_by_the_kernel() -> None:
    program = textwrap.dedent(
        """
        import sys
        from kinetod.attach.attach_types import AttachError
        from kinetod.attach.policy.preconditions import suitable_image
        try:
            suitable_image(int(sys.argv[1]))
        except AttachError as exc:
            print(exc.code, exc.reason)
        """
    )
    with subjects.python() as pid:
        said = subprocess.run(
            [*as_user(12345), sys.executable, "-c", program, str(pid)],
            env={**os.environ, "PYTHONPATH": IMPORT_PATH},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    assert said.startswith(f"ATTACH_NOT_PERMITTED process {pid} (python")
    assert "it runs as uid 0, the daemon as uid 12345" in said


def test_a_process_whose_files_cannot_be_seen_is_refused() -> None:
    finding = preconditions.capabilities(subject(process_facts(files_visible=False)))
    assert (finding.status, finding.code) == (Status.PROBLEM, AttachCode.NOT_PERMITTED)
    assert finding.advice == "run kinetod as root, or with CAP_DAC_READ_SEARCH"


def test_lacking_capabilities_are_told_but_no_problem_by_themselves() -> None:
    finding = preconditions.capabilities(subject())
    assert finding.status is Status.OK
    assert "without CAP_SYS_ADMIN: cannot attach to processes with a seccomp filter" in finding.detail


# seccomp


@reads_filters
def test_a_filter_that_kills_for_a_call_of_ours_is_refused_and_the_process_goes_on() -> None:
    with Host() as host:
        host.ask("install", program=all_but({SOCKETPAIR: KILL_PROCESS}).hex())
        error = refusal(host.pid)
        assert error.code is AttachCode.SECCOMP
        assert "blocking calls that the agent makes by killing the process: socketpair (KILL_PROCESS)" in error.reason
        assert host.ask("nothing") is True


@reads_filters
def test_a_filter_that_is_not_in_the_way_is_none() -> None:
    with Host() as host:
        host.ask("install", program=all_but({1000: KILL_PROCESS, MADVISE: ERRNO | 1}).hex())
        check(host.pid, suitable_image(host.pid))
        assert host.ask("nothing") is True


FILTERED = process_facts(seccomp=Seccomp(mode=2, filters=1))
PRIVILEGED = own_facts(uid=0, capabilities=frozenset(("CAP_SYS_PTRACE", "CAP_SYS_ADMIN")))


def test_without_filters_there_is_no_problem() -> None:
    assert preconditions.seccomp(subject()) == Finding("seccomp", Status.OK, "no filter")


def test_filters_that_may_not_be_read_are_refused() -> None:
    finding = preconditions.seccomp(subject(FILTERED))
    assert (finding.status, finding.code) == (Status.PROBLEM, AttachCode.SECCOMP)
    assert finding.detail.startswith("1 filter that the daemon is not allowed to read")
    assert finding.advice.startswith("run kinetod with CAP_SYS_ADMIN and without a seccomp filter of its own")


def test_filters_that_will_be_read_are_a_note() -> None:
    assert preconditions.seccomp(subject(FILTERED, PRIVILEGED)).status is Status.NOTE


def test_filters_that_the_daemon_has_too_are_no_problem() -> None:
    own = own_facts(seccomp=FILTERED.seccomp, init_seccomp=FILTERED.seccomp, host_pid_namespace=False)
    assert preconditions.seccomp(subject(FILTERED, own)).status is Status.OK
    more = process_facts(seccomp=Seccomp(mode=2, filters=2))
    assert preconditions.seccomp(subject(more, own)).status is Status.PROBLEM
    elsewhere = process_facts(seccomp=FILTERED.seccomp, foreign_namespaces=("pid",))
    assert preconditions.seccomp(subject(elsewhere, own)).status is Status.PROBLEM


def test_strict_mode_is_refused() -> None:
    strict = process_facts(seccomp=Seccomp(mode=1, filters=0))
    assert preconditions.seccomp(subject(strict, PRIVILEGED)).code is AttachCode.SECCOMP


def test_a_filter_that_looks_at_the_caller_is_refused() -> None:
    looks = Filter(bytes.fromhex("2000000008000000" + "060000000000ff7f"))
    finding = preconditions.seccomp(subject(FILTERED, PRIVILEGED, filters=(looks,)))
    assert "checks where in the program a call comes from" in finding.detail


# what it may take


def left(check: str, place: int = 0, **amounts: int) -> InspectedProcess:
    """A process with one limit. place: of the row among those of the check."""
    row = [each for each in BUDGETS if each.check == check][place]
    needed = row.needed(amounts.get("stack", 8 << 20), attached=False, locked=bool(amounts.get("locked")))
    return process_facts(budgets=(BudgetRoom(row, Room(amounts["left"], "its limit", "raise it"), needed),))


@pytest.mark.parametrize(
    ("check", "place", "amounts", "needs"),
    [
        ("descriptors", 0, {"left": 15}, "needs 16"),
        ("mappings", 0, {"left": 127}, "needs 128"),
        ("threads", 0, {"left": 7}, "needs 8"),
        ("memory", 0, {"left": 11 << 20}, "needs 12 MiB of memory"),
        ("memory", 0, {"left": 95 << 20, "locked": 1}, "needs 96 MiB of memory"),
        ("memory", 1, {"left": 535 << 20}, "needs 536 MiB of address space, mostly reserved and unused"),
        ("memory", 2, {"left": 95 << 20}, "needs 96 MiB of data segments"),
        ("memory", 3, {"left": 514 << 20, "stack": 1 << 20}, "needs 515 MiB of locked memory"),
    ],
)
def test_a_process_with_too_little_left_is_refused(check: str, place: int, amounts: dict[str, int], needs: str) -> None:
    short, enough = amounts, {**amounts, "left": amounts["left"] + (1 << 20)}
    finding = preconditions.budget(check)(subject(left(check, place, **short)))
    assert (finding.status, finding.code, finding.advice) == (Status.PROBLEM, AttachCode.LIMIT, "raise it")
    assert f"left within its limit; an attach with a small trace {needs}" in finding.detail
    assert preconditions.budget(check)(subject(left(check, place, **enough))).status is not Status.PROBLEM


def test_every_budget_is_checked_before_the_first_touch() -> None:
    for row in BUDGETS:
        nothing = BudgetRoom(row, Room(-1, "its limit", "raise it"), row.needed(0, attached=False, locked=False))
        found = subject(process_facts(budgets=(nothing,)))
        assert AttachCode.LIMIT in [rule(found).code for rule in preconditions.RULES], row


@pytest.mark.parametrize(
    ("found", "status"),
    [
        (process_facts(), Status.UNKNOWN),
        (left("memory", left=12 << 20), Status.NOTE),
        (left("memory", left=1 << 30), Status.OK),
    ],
)
def test_a_process_with_enough_left_is_no_problem(found: InspectedProcess, status: Status) -> None:
    assert preconditions.budget("memory")(subject(found)).status is status


# standing still


def test_a_frozen_process_is_refused_with_the_file_that_thaws_it() -> None:
    finding = preconditions.process(subject(process_facts(state="D", frozen_by="/sys/fs/cgroup/x/freezer.state")))
    assert finding.detail == "its control group is frozen"
    assert "`echo THAWED > /sys/fs/cgroup/x/freezer.state`" in finding.advice


def test_a_process_that_waits_in_the_kernel_but_runs_in_between_is_suitable() -> None:
    waits = process_facts(state="D")
    assert preconditions.process(subject(waits)).status is Status.PROBLEM
    assert preconditions.process(subject(waits, moves=True)).status is Status.OK


def test_a_process_that_stands_still_later_is_told(tmp_path: Path) -> None:
    with subjects.stopped() as pid:
        with pytest.raises(AttachError, match=r"Ctrl-Z\); resume it: kill -CONT"):
            standstill.check(pid)
        os.kill(pid, signal.SIGCONT)
        until(lambda: subjects.state(pid) != "T", "it goes on")
        standstill.check(pid)
    standstill.check(7, tmp_path)  # gone: others say so
