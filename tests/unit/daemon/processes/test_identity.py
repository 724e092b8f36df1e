import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kinetod.processes import identity as identities
from kinetod.processes.identity import Identity, ProcessKey, Unidentified, how_it_ended, identify, start_time_ns
from support.service import subjects
from support.waiting import scaled

CONNECT = """
import socket, sys
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect(sys.argv[1]); s.send(b"x"); sys.exit(s.recv(1)[0])
"""


@pytest.fixture
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[socket.socket, "subprocess.Popen[bytes]"]]:
    path = f"/tmp/kinetod-identity-{os.getpid()}.sock"
    Path(path).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        process = subprocess.Popen([sys.executable, "-S", "-c", CONNECT, path])
        accepted, _ = listener.accept()
        yield accepted, process
        accepted.close()
        process.kill()
        process.wait()
    Path(path).unlink()


def test_a_peer_is_who_the_kernel_says(peer: tuple[socket.socket, "subprocess.Popen[bytes]"]) -> None:
    sock, process = peer
    identity = identify(sock)
    assert identity.key == ProcessKey(process.pid, start_time_ns(process.pid))
    assert (identity.uid, identity.gid) == (os.getuid(), os.getgid())
    assert identity.alive()
    assert identity.pidfd is not None
    assert not os.get_inheritable(identity.pidfd)
    identity.close()


@pytest.mark.parametrize(
    ("end", "how"),
    [(b"\x03", "it exited with status 3"), (signal.SIGKILL, "it was killed by SIGKILL")],
)
def test_the_end_of_a_peer_is_noticed_and_explained(
    peer: tuple[socket.socket, "subprocess.Popen[bytes]"], end: bytes | signal.Signals, how: str
) -> None:
    sock, process = peer
    identity = identify(sock)
    assert identity.pidfd is not None
    assert how_it_ended(identity) == ""
    if isinstance(end, bytes):
        sock.send(end)
    else:
        process.send_signal(end)
    assert select.select([identity.pidfd], [], [], 10)[0]
    assert how_it_ended(identity) == how  # a zombie: nobody has waited for it
    assert not identity.alive()
    identity.close()


def test_what_is_closed_twice_closes_no_descriptor_that_has_got_the_number(
    peer: tuple[socket.socket, "subprocess.Popen[bytes]"],
) -> None:
    identity = identify(peer[0])
    number = identity.pidfd
    assert number is not None
    identity.close()
    other = os.open(os.devnull, os.O_RDONLY)
    os.dup2(other, number)
    identity.close()
    assert os.fstat(number).st_rdev == os.fstat(other).st_rdev
    assert identity.pidfd is None
    for each in {number, other}:
        os.close(each)


def test_a_peer_that_is_waited_for_between_two_looks_is_known_to_have_ended_so(
    peer: tuple[socket.socket, "subprocess.Popen[bytes]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    sock, process = peer
    found = identify(sock)
    look = identities._exit_status_of_zombie

    def late(*which: Any) -> int | None:
        process.wait()
        return look(*which)

    monkeypatch.setattr(identities, "_exit_status_of_zombie", late)
    process.kill()
    assert found.pidfd is not None and select.select([found.pidfd], [], [], scaled(10))[0]
    assert how_it_ended(found) == "it was killed by SIGKILL"
    found.close()


def test_a_peer_that_is_gone_is_not_identified(peer: tuple[socket.socket, "subprocess.Popen[bytes]"]) -> None:
    sock, process = peer
    process.kill()
    process.wait()
    with pytest.raises(Unidentified):
        identify(sock)


def test_a_process_whose_main_thread_alone_has_ended_is_alive() -> None:
    with subjects.without_main_thread() as pid:
        assert Identity(ProcessKey(pid, start_time_ns(pid)), 0, 0, None).alive()


def test_a_reused_pid_is_another_process() -> None:
    key = ProcessKey(os.getpid(), start_time_ns(os.getpid()))
    assert Identity(key, 0, 0, None).alive()
    assert not Identity(ProcessKey(key.pid, key.start_time_ns - 10**9), 0, 0, None).alive()


def test_a_process_name_cannot_forge_the_start_time(tmp_path: Path) -> None:
    folder = tmp_path / "7"
    folder.mkdir()
    fields = " ".join(["S", *("0" for _ in range(18)), "250", *("0" for _ in range(30))])
    (folder / "stat").write_text(f"7 (evil) S 1 2 3) {fields}\n")
    assert start_time_ns(7, tmp_path) % 10**9 == 250 * 10**9 // os.sysconf("SC_CLK_TCK") % 10**9


def test_there_is_no_start_time_without_a_process(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        start_time_ns(7, tmp_path)
