"""The filter of decoders, run call by call as the kernel would, for both machines."""

import re
from pathlib import Path

import pytest
from kinetod.attach.inspect.process_inspection import AARCH64, X86_64
from kinetod.attach.policy.seccomp_check import ActionKind, Filter, FilterAction, evaluate
from kinetod.sandbox import seccomp_filter

MACHINES = {"x86_64": 0, "aarch64": 1}
KNOWN_AS = {"x86_64": X86_64, "aarch64": AARCH64}
PID = 4242
ALLOWED, DENIED = FilterAction(ActionKind.ALLOW), FilterAction(ActionKind.ERRNO, 1)
THREAD = 0x3D0F00  # what pthread_create asks for
HEADERS = {
    "x86_64": (Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), r"#define __NR_(\w+)\s+(\d+)"),
    "aarch64": (Path("/usr/include/asm-generic/unistd.h"), r"#define __NR(?:3264)?_(\w+)\s+(\d+)"),
}
OTHER_NAMES = {"newfstatat": "fstatat"}  # in asm-generic
X86_64_NUMBERS = {
    "socket": 41, "connect": 42, "socketpair": 53, "fork": 57, "vfork": 58, "execve": 59, "ptrace": 101, "chmod": 90,
    "fchmod": 91, "chown": 92, "link": 86, "symlink": 88, "mknod": 133, "truncate": 76, "ioctl": 16, "shmget": 29,
    "setpriority": 141, "rt_sigqueueinfo": 129, "unshare": 272, "mount": 165, "bpf": 321, "perf_event_open": 298,
    "io_uring_setup": 425, "pidfd_open": 434, "pidfd_send_signal": 424, "pidfd_getfd": 438, "process_vm_readv": 310,
    "keyctl": 250, "open_by_handle_at": 304, "memfd_create": 319, "setuid": 105, "setrlimit": 160, "userfaultfd": 323,
    "sendmsg": 46, "fchmodat2": 452, "setxattr": 188, "utimensat": 280, "inotify_init1": 294, "seccomp": 317,
}  # fmt: skip


def decide(machine: str, number: int, *arguments: int) -> FilterAction:
    return evaluate([Filter(seccomp_filter.program(PID, machine))], number, arguments, KNOWN_AS[machine])


@pytest.mark.parametrize("machine", MACHINES)
def test_the_calls_of_a_decoder_are_allowed(machine: str) -> None:
    numbers = [each[MACHINES[machine]] for each in seccomp_filter.ALWAYS.values()]
    assert {decide(machine, number) for number in numbers if number is not None} == {ALLOWED}


@pytest.mark.parametrize("name", X86_64_NUMBERS)
def test_what_reaches_others_is_denied(name: str) -> None:
    assert decide("x86_64", X86_64_NUMBERS[name]) == DENIED


def test_only_what_is_in_the_table_is_allowed_on_any_arguments() -> None:
    known = {number for number, _ in seccomp_filter.ALWAYS.values()}
    for number in (*range(500), 0x40000000, 2**31 - 1):
        if number not in known and number != seccomp_filter.CLONE3[0]:
            assert decide("x86_64", number, 2**64 - 1, 2**64 - 1) == DENIED


@pytest.mark.parametrize("machine", MACHINES)
def test_a_clone_may_make_a_thread_and_nothing_else(machine: str) -> None:
    clone, clone3 = seccomp_filter.CLONE[MACHINES[machine]], seccomp_filter.CLONE3[MACHINES[machine]]
    assert clone is not None and clone3 is not None
    assert decide(machine, clone, THREAD) == ALLOWED
    for flags in (0x11, 0x4111, THREAD | 0x10000000, THREAD | 0x20000, THREAD & ~0x10000):
        assert decide(machine, clone, flags) == DENIED
    assert decide(machine, clone3) == FilterAction(ActionKind.ERRNO, 38)


@pytest.mark.parametrize("machine", MACHINES)
def test_signals_and_limits_are_its_own(machine: str) -> None:
    column = MACHINES[machine]
    for row, own, other in (
        (seccomp_filter.KILL, PID, 1),
        (seccomp_filter.TGKILL, PID, 1),
        (seccomp_filter.PRLIMIT, 0, PID + 1),
    ):
        number = row[column]
        assert number is not None
        assert (decide(machine, number, own), decide(machine, number, other)) == (ALLOWED, DENIED)
    fcntl, prctl = seccomp_filter.FCNTL[column], seccomp_filter.PRCTL[column]
    assert fcntl is not None and prctl is not None
    assert decide(machine, fcntl, 3, 8, 1) == DENIED  # F_SETOWN
    assert decide(machine, prctl, 15) == ALLOWED
    assert decide(machine, prctl, 1) == DENIED  # PR_SET_PDEATHSIG


def test_another_instruction_set_ends_the_process() -> None:
    program = [Filter(seccomp_filter.program(PID, "x86_64"))]
    assert evaluate(program, 0, (), AARCH64).kind is ActionKind.KILL_PROCESS


@pytest.mark.parametrize("machine", MACHINES)
def test_the_numbers_are_those_of_the_kernels_headers(machine: str) -> None:
    path, pattern = HEADERS[machine]
    if not path.exists():
        pytest.skip(f"{path} is not installed")
    found = {name: int(number) for name, number in re.findall(pattern, path.read_text())}
    rows = {
        **seccomp_filter.ALWAYS,
        "clone": seccomp_filter.CLONE,
        "clone3": seccomp_filter.CLONE3,
        "fcntl": seccomp_filter.FCNTL,
        "prctl": seccomp_filter.PRCTL,
    }
    rows |= {"prlimit64": seccomp_filter.PRLIMIT, "kill": seccomp_filter.KILL, "tgkill": seccomp_filter.TGKILL}
    ours = {name: numbers[MACHINES[machine]] for name, numbers in rows.items()}
    for name, number in ours.items():
        if number is not None:
            assert number == found.get(name, found.get(OTHER_NAMES.get(name, name))), name
