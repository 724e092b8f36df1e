"""What the kernel tells of threads: made-up folders of /proc, and real processes."""

import os
import socket
import subprocess
from pathlib import Path

import pytest
from kinetod.stacks.thread_facts import BlockingCall, read_process
from support.waiting import until

X86_64 = os.uname().machine == "x86_64"
READ, FUTEX = (0, 202) if X86_64 else (63, 98)


def task(proc: Path, tid: int, *, state: str = "S", call: str = "running", status: str = "", wchan: str = "0") -> None:
    folder = proc / "7/task" / str(tid)
    folder.mkdir(parents=True)
    (folder / "stat").write_text(f"{tid} (a (b) c) {state} {' '.join(map(str, range(1, 50)))}\n")
    (folder / "syscall").write_text(call + "\n")
    (folder / "status").write_text(status)
    (folder / "wchan").write_text(wchan)


def descriptor(proc: Path, number: int, target: str) -> None:
    folder = proc / "7/fd"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / str(number)).symlink_to(target)


def test_the_main_thread_comes_first_and_threads_beyond_the_limit_are_counted(tmp_path: Path) -> None:
    for tid in (3, 9, 7, 8):
        task(tmp_path, tid)
    found = read_process(7, 3, tmp_path)
    assert [thread.thread for thread in found.threads] == [7, 3, 8]
    assert found.left_out == 1


def test_names_with_brackets_states_and_times_are_read(tmp_path: Path) -> None:
    task(tmp_path, 7, state="D", wchan="folio_wait", status="NSpid:\t7\t1\n")
    (thread,) = read_process(7, 9, tmp_path).threads
    tick_ns = 10**9 // os.sysconf("SC_CLK_TCK")
    assert (thread.name, thread.state, thread.kernel_function) == ("a (b) c", "UNINTERRUPTIBLE", "folio_wait")
    assert (thread.inner, thread.cpu_ns) == (1, (11 + 12) * tick_ns)
    assert thread.call is None


def test_the_descriptor_of_a_call_is_named(tmp_path: Path) -> None:
    for number, target in enumerate(("/data/x.bin", "pipe:[5]", "socket:[77]", "socket:[78]", "/dev/nvidia0")):
        task(tmp_path, 7 + number, call=f"{READ} {number:#x} 0x0 0x0 0x0 0x0 0x0 0x7f 0x7f")
        descriptor(tmp_path, number, target)
    (tmp_path / "7/net").mkdir()
    line = "0: 0100007F:1F90 0200000A:7364 01 0:0 00:0 0 0 0 77 1"
    (tmp_path / "7/net/tcp").write_text(f"head\n{line}\n")
    found = read_process(7, 9, tmp_path)
    named = [thread.call.target for thread in found.threads if thread.call is not None]
    assert named == ["/data/x.bin", "a pipe", "10.0.0.2:29540", "a socket", "/dev/nvidia0"]
    assert found.uses_gpu


def test_names_of_unix_sockets_that_others_chose_spoil_nothing(tmp_path: Path) -> None:
    task(tmp_path, 7, call=f"{READ} 0x3 0x0 0x0 0x0 0x0 0x0 0x7f 0x7f")
    descriptor(tmp_path, 3, "socket:[5]")
    (tmp_path / "7/net").mkdir()
    head = b"Num RefCount Protocol Flags Type St Inode Path\n"
    forged = b"0: 2 0 0 1 1 6 @x\n0: 2 0 0 1 1 5\xff @y\nz\n"
    (tmp_path / "7/net/unix").write_bytes(head + forged + b"0: 00000002 0 0 0001 03 5 /run/real.sock\n")
    found = read_process(7, 9, tmp_path).threads[0].call
    assert found is not None
    assert found.target == "the Unix socket /run/real.sock"


def test_a_call_without_a_descriptor_has_no_target(tmp_path: Path) -> None:
    task(tmp_path, 7, call=f"{FUTEX} 0x1 0x80 0x0 0x0 0x0 0x0 0x7f 0x7f")
    descriptor(tmp_path, 1, "/data/x.bin")
    (thread,) = read_process(7, 9, tmp_path).threads
    assert thread.call == BlockingCall("futex", (1, 128, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("-1 0x7ffe10 0x400", 0x7FFE10), (f"{READ} 0x0 0x0 0x0 0x0 0x0 0x0 0x7ffe20 0x400", 0x7FFE20), ("running", 0)],
)
def test_the_stack_pointer_of_a_thread_in_the_kernel_is_known(tmp_path: Path, text: str, expected: int) -> None:
    task(tmp_path, 7, call=text)
    assert read_process(7, 9, tmp_path).threads[0].stack_pointer == expected


@pytest.mark.parametrize("text", ["", "-1 0x7f 0x7f", "99999 0x0 0x0", "junk"])
def test_a_call_that_is_none_or_unknown_is_left_out(tmp_path: Path, text: str) -> None:
    task(tmp_path, 7, call=text)
    assert read_process(7, 9, tmp_path).threads[0].call is None


def test_a_process_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ProcessLookupError, match="there is no process"):
        read_process(2**22, 9)


def reads_from(target: str, stdin: int) -> bool:
    """Whether a process whose input that is comes to wait for it."""
    expected = ("read", target)
    with subprocess.Popen(["cat"], stdin=stdin) as process:

        def as_expected() -> bool:
            call = read_process(process.pid, 9).threads[0].call
            return call is not None and (call.name, call.target) == expected

        try:
            return until(as_expected, f"it waits for {target}")
        finally:
            process.kill()


def test_a_real_thread_that_reads_names_its_pipe() -> None:
    assert reads_from("a pipe", subprocess.PIPE)


def test_the_peer_of_a_real_socket_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        assert reads_from(f"127.0.0.1:{listener.getsockname()[1]}", client.fileno())
