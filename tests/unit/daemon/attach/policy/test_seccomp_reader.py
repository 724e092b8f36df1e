"""Filters are read from real processes, which do not notice."""

import os
import subprocess
from pathlib import Path

import pytest
from kinetod.attach.attach_types import AttachCode, AttachError
from kinetod.attach.inject.thread_policy import NativeThreadPolicy, PendingCallPolicy
from kinetod.attach.inspect.process_inspection import Seccomp, read_own, read_process, thread_seccomp
from kinetod.attach.inspect.target_image import TargetImage
from kinetod.attach.policy.seccomp_reader import read_filters
from support.machine.seccomp_host import ALLOW, ERRNO, KILL_PROCESS, Host, all_but
from support.waiting import until

NANOSLEEP, CLOCK_NANOSLEEP, RESTART_SYSCALL = 35, 230, 219
own = read_own()
pytestmark = pytest.mark.skipif(
    "CAP_SYS_ADMIN" not in own.capabilities or own.seccomp.mode != 0 or own.machine != "x86-64",
    reason="reading seccomp filters takes CAP_SYS_ADMIN and no filter of one's own",
)


def read(pid: int) -> list[int]:
    """Lengths of the filters, oldest first."""
    return [len(each) for each in read_filters(pid, read_process(pid).seccomp)]


def test_a_process_without_filters_is_not_stopped() -> None:
    assert read_filters(os.getpid(), Seccomp(mode=0, filters=0)) == []  # nobody can trace himself


def test_all_filters_are_read_oldest_first_and_the_process_goes_on() -> None:
    with Host() as host:
        host.ask("install", program=all_but({1000: ERRNO | 1}).hex())
        host.ask("install", program=all_but({1000: ERRNO | 2, 1001: ERRNO | 3}).hex())
        assert read(host.pid) == [4, 6]
        assert host.ask("nothing") is True


def test_a_sleep_goes_on() -> None:
    with Host() as host:
        host.ask("install", program=all_but({}).hex())
        host.ask("sleep")
        asleep(host.pid)
        assert read(host.pid) == [2]
        asleep(host.pid)


def asleep(pid: int) -> None:
    call = Path(f"/proc/{pid}/syscall")
    until(
        lambda: call.read_text().split()[0] in map(str, (NANOSLEEP, CLOCK_NANOSLEEP, RESTART_SYSCALL)),
        f"process {pid} sleeps",
        state=call.read_text,
    )


def test_a_filter_that_kills_for_restart_syscall_does_not_kill_the_sleeper_that_is_read() -> None:
    with Host() as host:
        host.ask("install", program=all_but({RESTART_SYSCALL: KILL_PROCESS}).hex())
        host.ask("sleep")
        asleep(host.pid)
        for _ in range(20):
            assert read(host.pid) == [4]
        asleep(host.pid)
        assert host.process.poll() is None


def test_a_thread_may_have_filters_of_its_own() -> None:
    with Host() as host:
        tid = host.ask("thread", program=all_but({}).hex())
        assert thread_seccomp(host.pid, tid) == Seccomp(mode=2, filters=1)
        assert read_process(host.pid).seccomp == Seccomp(mode=0, filters=0)
        assert thread_seccomp(host.pid, 2**22) is None


def test_a_process_that_has_ended_is_gone() -> None:
    with Host() as host:
        host.ask("install", program=all_but({}, ALLOW).hex())
        seccomp = read_process(host.pid).seccomp
    with pytest.raises(AttachError) as caught:
        read_filters(host.pid, seccomp)
    assert caught.value.code is AttachCode.GONE


def test_a_thread_that_another_tool_traces_is_not_stopped() -> None:
    with Host() as host:
        host.ask("install", program=all_but({}).hex())
        tracer = subprocess.Popen(["strace", "-q", "-o", "/dev/null", "-p", str(host.pid)])
        try:
            until(lambda: read_process(host.pid).tracer_pid == tracer.pid, "strace has it")
            with pytest.raises(AttachError, match="strace") as caught:
                read(host.pid)
            assert caught.value.code is AttachCode.TRACED
        finally:
            tracer.terminate()
            tracer.wait()
        assert host.ask("nothing") is True


def test_a_thread_with_filters_of_its_own_is_not_redirected() -> None:
    with Host() as host:
        alike = host.ask("thread", program="")
        different = host.ask("thread", program=all_but({}).hex())
        image = TargetImage(host.pid)
        until(lambda: alike in list(PendingCallPolicy(image).candidates()), "the first thread waits")
        assert different not in list(PendingCallPolicy(image).candidates())
        assert different not in list(NativeThreadPolicy(image).candidates())
