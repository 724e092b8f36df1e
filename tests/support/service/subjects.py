"""Processes in states that an attach must tell apart, and plain values about processes that cannot be had."""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from kinetod.attach.inspect.process_inspection import Access, Executable, InspectedProcess, OwnFacts, Seccomp
from kinetod.attach.policy.preconditions import Subject

from support.waiting import scaled, until

SLEEP = shutil.which("sleep") or "/bin/sleep"
DEADLINE_S = 20.0
NO_SECCOMP = Seccomp(mode=0, filters=0)
# Stands still in vfork(), uninterruptibly, as long as its child waits.
VFORK = "#include <unistd.h>\nint main(void) { if (vfork() == 0) { pause(); _exit(0); } return 0; }\n"


def state(pid: int) -> str:
    """State of the process as one letter, as in ps; empty if there is no such process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[int]:
    """A process that has become the program; its pid."""
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    program = Path(shutil.which(arguments[0]) or arguments[0]).resolve()
    try:
        until(lambda: Path(f"/proc/{process.pid}/exe").resolve() == program, f"{arguments[0]} runs")
        yield process.pid
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def python(
    program: str = "import sys", *, prefix: tuple[str, ...] = (), executable: str = sys.executable
) -> Iterator[int]:
    """An interpreter that has run the program and waits; its pid, as itself sees it without a prefix."""
    text = f"{program}\nimport os, sys\nos.write(1, b'%d\\n' % os.getpid())\nsys.stdin.read()"
    process = subprocess.Popen([*prefix, executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        ready, _write, _error = select.select([process.stdout], [], [], scaled(DEADLINE_S))
        assert ready and process.stdout.readline().strip().isdigit()
        yield process.pid
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def zombie() -> Iterator[int]:
    """A process that has ended and that nobody waits for."""
    process = subprocess.Popen([SLEEP, "0"])
    until(lambda: state(process.pid) == "Z", "it has ended")
    yield process.pid
    process.wait()


@contextlib.contextmanager
def without_main_thread() -> Iterator[int]:
    """A process whose main thread has ended, and another one has not."""
    start = "threading.Thread(target=time.sleep, args=(3600,)).start()"
    code = f"import ctypes, threading, time\n{start}\nctypes.CDLL(None).pthread_exit(None)"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        until(lambda: state(process.pid) == "Z", "its main thread has ended")
        yield process.pid
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def stopped() -> Iterator[int]:
    """A process that is stopped by SIGSTOP."""
    with python() as pid:
        os.kill(pid, signal.SIGSTOP)
        until(lambda: state(pid) == "T", "it is stopped")
        yield pid


@contextlib.contextmanager
def traced() -> Iterator[tuple[int, int]]:
    """A process that strace traces. Yields both pids."""
    with python() as pid:
        tracer = subprocess.Popen(["strace", "-q", "-o", "/dev/null", "-p", str(pid)], stderr=subprocess.DEVNULL)
        try:
            line = f"TracerPid:\t{tracer.pid}\n"
            until(lambda: line in Path(f"/proc/{pid}/status").read_text(), "strace has it")
            yield pid, tracer.pid
        finally:
            tracer.terminate()
            tracer.wait()


@contextlib.contextmanager
def uninterruptible(folder: Path) -> Iterator[int]:
    """A process in state D."""
    source, program = folder / "vfork.c", folder / "vfork"
    source.write_text(VFORK)
    subprocess.run([os.environ.get("CC") or "cc", "-Wno-deprecated-declarations", source, "-o", program], check=True)
    process = subprocess.Popen([program], start_new_session=True)
    try:
        until(lambda: state(process.pid) == "D", "it waits for its child")
        yield process.pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def executable(**changes: object) -> Executable:
    """What a usual Python's executable looks like."""
    usual = {"path": "/usr/bin/python3.11", "deleted": False, "bits": 64, "machine": "x86-64", "frozen": ""}
    return Executable(**{**usual, **changes})  # type: ignore[arg-type]


def process_facts(**changes: object) -> InspectedProcess:
    """A usual process of the daemon's user."""
    usual = {
        "pid": 4242,
        "process_pid": 4242,
        "name": "python",
        "state": "S",
        "kernel_thread": False,
        "exiting": False,
        "tracer_pid": 0,
        "tracer_name": "",
        "uids": (1000, 1000, 1000, 1000),
        "namespace_pids": (4242,),
        "foreign_namespaces": (),
        "no_new_privs": False,
        "shadow_stack": False,
        "seccomp": NO_SECCOMP,
        "dumpable": True,
        "executable": executable(),
        "access": Access.ALLOWED,
        "files_visible": True,
    }
    return InspectedProcess(**{**usual, **changes})  # type: ignore[arg-type]


def own_facts(**changes: object) -> OwnFacts:
    """What a daemon of an ordinary user knows of itself."""
    usual = {
        "uid": 1000,
        "pids": frozenset((100, 99)),
        "capabilities": frozenset(),
        "ptrace_scope": None,
        "seccomp": NO_SECCOMP,
        "init_seccomp": NO_SECCOMP,
        "host_pid_namespace": True,
        "machine": "x86-64",
    }
    return OwnFacts(**{**usual, **changes})  # type: ignore[arg-type]


def subject(process: InspectedProcess | None = None, own: OwnFacts | None = None, **parts: object) -> Subject:
    """A process as the rules see it."""
    return Subject(process=process or process_facts(), own=own or own_facts(), **parts)  # type: ignore[arg-type]
