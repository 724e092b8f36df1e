"""What a filter does to a call: our evaluation against the kernel's, and what follows for attaching."""

import ctypes
import ctypes.util
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from kinetod.attach.attach_types import AttachCode, AttachError
from kinetod.attach.inject.thread_policy import NativeThreadPolicy, PendingCallPolicy
from kinetod.attach.inspect.process_inspection import AARCH64, X86_64, Seccomp, read_own, read_process, thread_seccomp
from kinetod.attach.inspect.target_image import TargetImage
from kinetod.attach.policy.seccomp_check import (
    CALLS,
    ActionKind,
    Filter,
    SeccompError,
    evaluate,
    forbidden,
    read_filters,
)
from support.machine import seccomp_host
from support.machine.seccomp_host import (
    ALLOW,
    ERRNO,
    KILL_PROCESS,
    LOG,
    TRAP,
    Host,
    Instruction,
    all_but,
    assemble,
    returns,
)
from support.waiting import until

NO_SUCH_CALL = 1000  # on every machine: what the filter lets through fails with ENOSYS
ENOSYS = 38
MACHINE = X86_64
SECCOMP_DATA_WORDS = 16
NANOSLEEP, CLOCK_NANOSLEEP, RESTART_SYSCALL = 35, 230, 219
own = read_own()
pytestmark = pytest.mark.skipif(
    "CAP_SYS_ADMIN" not in own.capabilities or own.seccomp.mode != 0 or own.machine != "x86-64",
    reason="reading seccomp filters takes CAP_SYS_ADMIN and no filter of one's own",
)


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with Host() as running:
        yield running


def number(name: str) -> int:
    found = next(call.x86_64 for call in CALLS if call.name == name)
    assert found is not None
    return found


def random_program(rng: random.Random) -> bytes:
    """Computes something of the arguments of NO_SUCH_CALL and returns it as the error number."""
    alu = [0x04, 0x14, 0x24, 0x34, 0x44, 0x54, 0x64, 0x74, 0xA4]
    body: list[Instruction] = []
    for _ in range(rng.randint(3, 25)):
        kind = rng.randrange(8)
        k = rng.choice([0, 1, 2, 7, 31, 0xFFFF, 0x80000000, 0xFFFFFFFF, rng.getrandbits(32)])
        slot = rng.randrange(16)
        if kind == 0:
            body.append((0x20, 0, 0, 4 * rng.choice([0, *range(4, SECCOMP_DATA_WORDS)])))  # not the pointer's words
        elif kind == 1:
            code = rng.choice(alu)
            body.append((code, 0, 0, k % 31 + 1 if code in (0x64, 0x74, 0x34) else k))
        elif kind == 2:
            code = rng.choice([each for each in alu if each not in (0x64, 0x74)])
            body += [(0x01, 0, 0, k), (code | 0x08, 0, 0, 0)]  # X = k; A op X: also a division by 0
        elif kind == 3:
            body += [(0x02, 0, 0, slot), (0x61, 0, 0, slot)]
        elif kind == 4:
            body += [(0x03, 0, 0, slot), (0x60, 0, 0, slot)]
        elif kind == 5:
            body += [(0x07, 0, 0, 0), (0x80, 0, 0, 0), (0x0C, 0, 0, 0)]
        elif kind == 6:
            test = rng.choice([0x15, 0x25, 0x35, 0x45, 0x1D, 0x2D, 0x3D, 0x4D])
            body += [(test, rng.randrange(2), rng.randrange(2), k), (0x84, 0, 0, 0), (0x87, 0, 0, 0)]
        else:
            body += [(0x05, 0, 0, 1), (0x00, 0, 0, k), (0xA4, 0, 0, k)]
    clear = [(0x02, 0, 0, 0), (0x00, 0, 0, 0), *((0x02, 0, 0, slot) for slot in range(16)), (0x01, 0, 0, 0)]
    ends = [(0x54, 0, 0, 0x0FFF), (0x44, 0, 0, ERRNO), (0x16, 0, 0, 0)]
    return assemble([seccomp_host.LOAD_NUMBER, (0x15, 1, 0, NO_SUCH_CALL), returns(ALLOW), *clear, *body, *ends])


@pytest.mark.parametrize("seed", range(40))
def test_random_filters_give_what_the_kernel_gives(host: Host, seed: int) -> None:
    rng = random.Random(seed)
    program = random_program(rng)
    arguments = [[rng.choice([0, 1, rng.getrandbits(64)]) for _ in range(6)] for _ in range(5)]
    calls = [[NO_SUCH_CALL, *each] for each in arguments]
    kernel = host.ask("try", program=program.hex(), calls=calls)
    ours = [evaluate([Filter(program)], NO_SUCH_CALL, each, MACHINE) for each in arguments]
    if kernel["killed"]:  # a division by zero, whose result is KILL_THREAD
        assert kernel["killed"] == signal.SIGSYS
        assert ActionKind.KILL_THREAD in [action.kind for action in ours]
    else:
        assert [action.data for action in ours] == kernel["results"]
        assert {action.kind for action in ours} == {ActionKind.ERRNO}


@pytest.mark.parametrize(
    ("action", "kind", "killed", "error"),
    [
        (ALLOW, ActionKind.ALLOW, 0, ENOSYS),
        (LOG, ActionKind.LOG, 0, ENOSYS),
        (ERRNO | 13, ActionKind.ERRNO, 0, 13),
        (ERRNO, ActionKind.ERRNO, 0, 0),
        (0x7FF00000, ActionKind.TRACE, 0, ENOSYS),
        (TRAP, ActionKind.TRAP, signal.SIGSYS, None),
        (KILL_PROCESS, ActionKind.KILL_PROCESS, signal.SIGSYS, None),
        (0, ActionKind.KILL_THREAD, signal.SIGSYS, None),
        (0x12340000, ActionKind.KILL_PROCESS, signal.SIGSYS, None),  # no action that anybody knows
    ],
)
def test_every_action_is_understood_as_the_kernel_does(
    host: Host, action: int, kind: ActionKind, killed: int, error: int | None
) -> None:
    program = all_but({NO_SUCH_CALL: action})
    assert evaluate([Filter(program)], NO_SUCH_CALL, (), MACHINE).kind is kind
    kernel = host.ask("try", program=program.hex(), calls=[[NO_SUCH_CALL]])
    assert kernel["killed"] == killed
    assert kernel["results"] == ([] if error is None else [error])


def test_of_several_filters_the_strictest_action_counts_and_the_newest_error_number() -> None:
    filters = [Filter(all_but({1: ERRNO | 1})), Filter(all_but({1: ERRNO | 2})), Filter(all_but({1: LOG}))]
    assert str(evaluate(filters, 1, (), MACHINE)) == "ERRNO(2)"
    assert evaluate([*filters, Filter(all_but({1: TRAP}))], 1, (), MACHINE).kind is ActionKind.TRAP


@pytest.mark.parametrize(
    "program",
    [
        b"",
        b"\x06",
        assemble([seccomp_host.LOAD_NUMBER]),  # runs off the end
        assemble([(0x20, 0, 0, 64), returns(ALLOW)]),  # behind the data
        assemble([(0x20, 0, 0, 2), returns(ALLOW)]),  # not aligned
        assemble([(0x94, 0, 0, 3), returns(ALLOW)]),  # modulo: not for filters
        assemble([(0x60, 0, 0, 16), returns(ALLOW)]),  # beyond the scratch memory
        assemble([(0xFFFF, 0, 0, 0), returns(ALLOW)]),
    ],
)
def test_a_program_that_the_kernel_would_refuse_is_not_guessed_at(program: bytes) -> None:
    with pytest.raises(SeccompError):
        Filter(program).run(bytes(64))


def test_no_filter_and_one_that_allows_all_forbid_nothing() -> None:
    assert forbidden([], MACHINE) == []
    assert forbidden([Filter(all_but({}))], MACHINE) == []


@pytest.mark.parametrize("name", [call.name for call in CALLS if call.x86_64 is not None])
def test_a_filter_that_kills_for_any_call_of_ours_is_in_the_way(name: str) -> None:
    for action in (KILL_PROCESS, TRAP, 0x7FC00000):
        found = forbidden([Filter(all_but({number(name): action}))], MACHINE)
        assert [each.name for each in found] == [name]


def test_a_call_that_fails_matters_only_where_it_is_needed() -> None:
    assert [str(each) for each in forbidden([Filter(all_but({number("mmap"): ERRNO | 1}))], MACHINE)] == [
        "mmap (ERRNO(1))"
    ]
    for name in ("madvise", "rseq", "prctl"):
        assert forbidden([Filter(all_but({number(name): ERRNO | 1}))], MACHINE) == []


def test_clone3_may_be_missing_but_not_forbidden() -> None:
    assert forbidden([Filter(all_but({number("clone3"): ERRNO | ENOSYS}))], MACHINE) == []
    assert forbidden([Filter(all_but({number("clone3"): ERRNO | 1}))], MACHINE) != []


def test_calls_that_would_end_the_process_are_named_first() -> None:
    program = all_but({number("socketpair"): ERRNO | 1, number("openat"): KILL_PROCESS})
    assert [each.name for each in forbidden([Filter(program)], MACHINE)] == ["openat", "socketpair"]


def test_arguments_are_looked_at() -> None:
    new_namespace = 0x10000000  # CLONE_NEWUSER
    program = assemble(
        [
            seccomp_host.LOAD_NUMBER,
            (0x15, 0, 3, number("clone")),
            (0x20, 0, 0, 16),
            (0x45, 0, 1, new_namespace),
            returns(KILL_PROCESS),
            returns(ALLOW),
        ]
    )
    assert forbidden([Filter(program)], MACHINE) == []


def test_a_filter_for_another_machine_only_is_seen_as_such() -> None:
    program = assemble([(0x20, 0, 0, 4), (0x15, 1, 0, 0xC00000B7), returns(KILL_PROCESS), returns(ALLOW)])
    assert forbidden([Filter(program)], AARCH64) == []
    assert forbidden([Filter(program)], X86_64) != []


def test_whether_the_instruction_pointer_matters_is_known() -> None:
    assert Filter(assemble([(0x20, 0, 0, 8), returns(ALLOW)])).looks_at_the_caller
    assert not Filter(all_but({})).looks_at_the_caller


def test_the_numbers_are_those_that_libseccomp_knows() -> None:
    path = ctypes.util.find_library("seccomp")
    if path is None:
        pytest.skip("libseccomp is not installed")
    resolve = ctypes.CDLL(path).seccomp_syscall_resolve_name_arch
    for call in CALLS:
        for token, known in ((0xC000003E, call.x86_64), (0xC00000B7, call.aarch64)):
            if known is not None and call.name not in ("rseq", "clone3"):  # newer than some libseccomp
                assert resolve(ctypes.c_uint32(token), call.name.encode()) == known, call.name


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
