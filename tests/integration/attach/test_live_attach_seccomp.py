"""Processes that are killed for any system call that attaching is not said to make: the table of calls is complete."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kinetod.attach.inspect.process_inspection import read_own
from kinetod.attach.policy.seccomp_check import CALLS
from support.machine import native
from support.machine.descriptors import open_files
from support.machine.seccomp_host import ALLOW, ERRNO, KILL_PROCESS, all_but
from support.service.cli import run_process
from support.service.daemon import Daemon, running_daemon
from support.service.subjects import state
from support.waiting import until

own = read_own()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "CAP_SYS_ADMIN" not in own.capabilities or own.seccomp.mode != 0 or own.machine != "x86-64",
        reason="reading seccomp filters takes CAP_SYS_ADMIN and no filter of one's own",
    ),
]
TESTS = Path(__file__).parents[2]
START = f"""
import ctypes, os, sys, threading, time
sys.path.insert(0, {str(TESTS)!r})
from support.machine.seccomp_host import install
"""
LOADS_CUDA = f"""
for library in ({str(native.fake_cuda())!r}, {str(native.fake_cupti())!r}):
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
"""
INSTALL = """
install(bytes.fromhex({program!r}))
os.write(1, b"ready\\n")
"""
RUNS = "while True: sum(range(20000))\n"
RUNNING = {"pending-call", "native-thread"}  # the latter on a machine so busy that it does not come round
SLEEPS = "while True: time.sleep(1000)\n"


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon("--keep-agent", "100ms") as started:
        yield started


def strict() -> bytes:
    """Allows what the table says, and kills for all else."""
    return all_but({call.x86_64: ALLOW for call in CALLS if call.x86_64 is not None}, KILL_PROCESS)


def files(pid: int) -> list[str]:
    return sorted(f"{number} {name}" for number, name in open_files(pid).items())


@pytest.mark.parametrize(
    ("before", "after", "methods"),
    [("", RUNS, RUNNING), ("", SLEEPS, {"native-thread"}), (LOADS_CUDA, RUNS, RUNNING)],
    ids=["running", "asleep", "cuda"],
)
def test_a_strict_filter_that_allows_the_calls_of_the_table_is_survived(
    daemon: Daemon, tmp_path: Path, before: str, after: str, methods: set[str]
) -> None:
    program = START + before + INSTALL.format(program=strict().hex()) + after
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as target:
        try:
            assert target.stdout is not None
            assert target.stdout.readline() == b"ready\n"
            if after == SLEEPS:
                until(lambda: state(target.pid) == "S", "it sleeps")
            at_first = files(target.pid)
            arguments = ["trace", "--pid", str(target.pid), "--duration", "200ms", "--with-stack", "-o", "json"]
            result = run_process([*arguments, "--output-dir", str(tmp_path)], daemon.client_environ())
            assert target.poll() is None, f"it was killed: the kernel's log names the system call\n{result.stderr}"
            (traced,) = result.json()["targets"]
            assert traced["attach"]["method"] in methods
            until(lambda: files(target.pid) == at_first, "the agent has left")
            assert target.poll() is None
        finally:
            target.kill()


def test_a_filter_that_is_in_the_way_is_refused_by_name_and_survived(daemon: Daemon) -> None:
    program = START + INSTALL.format(program=all_but({53: ERRNO | 1}).hex()) + RUNS
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as target:
        try:
            assert target.stdout is not None
            assert target.stdout.readline() == b"ready\n"
            result = run_process(["trace", "--pid", str(target.pid)], daemon.client_environ())
            assert result.code == 5
            assert "[ATTACH_SECCOMP]" in result.stderr
            assert "socketpair (ERRNO(1))" in result.stderr
            assert target.poll() is None
        finally:
            target.kill()
