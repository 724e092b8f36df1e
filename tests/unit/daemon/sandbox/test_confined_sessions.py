"""Sessions of a stranger's function, forked from a real warm process."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kinetod.sandbox import landlock, seccomp_filter
from kinetod.sandbox.confined_sessions import ANSWER, READY
from support.waiting import scaled

pytestmark = pytest.mark.skipif(
    not (landlock.abi() and seccomp_filter.available()), reason="needs Landlock and seccomp"
)

# What a session that was taken over would try: each line of what it is sent is a path to read, or "connect PATH".
WORK = """
import os, socket
def serve(descriptor):
    with os.fdopen(descriptor, "r+b", buffering=0) as peer:
        for line in peer:
            word, _, path = line.decode().strip().partition(" ")
            try:
                if word == "connect":
                    socket.socket(socket.AF_UNIX).connect(path)
                elif word == "log":
                    os.write(1, b"forged")
                    os.write(2, b"forged")
                elif word == "link":
                    os.symlink(path, "link")
                else:
                    open(path, "rb").read(1)
                answer = "done"
            except OSError as exc:
                answer = type(exc).__name__
            peer.write(answer.encode() + b"\\n")
"""


@pytest.fixture
def control(tmp_path: Path) -> Iterator[socket.socket]:
    """The warm process, which is asked for sessions."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code/taken_over.py").write_text(WORK)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(scaled(60))
    command = [
        sys.executable,
        "-P",
        "-m",
        "kinetod.sandbox.confined_sessions",
        str(theirs.fileno()),
        "taken_over:serve",
    ]
    path = os.pathsep.join([str(tmp_path / "code"), *filter(None, sys.path)])
    with theirs, (tmp_path / "log").open("wb") as log:
        environ = {**os.environ, "PYTHONPATH": path}
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environ, stdout=log, stderr=log)
    with ours, process:
        assert ours.recv(64) == READY
        yield ours
        ours.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def session(control: socket.socket, folder: Path) -> Iterator[tuple[socket.socket, int]]:
    ours, theirs = socket.socketpair()
    ours.settimeout(scaled(60))
    with theirs:
        asked = {"folder": str(folder), "memory_bytes": 1 << 30, "cpu_s": 60}
        socket.send_fds(control, [json.dumps(asked).encode()], [theirs.fileno()])
    answer, descriptors, _, _ = socket.recv_fds(control, 64, 1)
    assert answer == ANSWER
    with ours, os.fdopen(descriptors[0]) as child:
        yield ours, child.fileno()


def told(peer: socket.socket, line: str) -> str:
    peer.sendall(line.encode() + b"\n")
    return peer.recv(100).decode().strip()


def test_a_session_reaches_its_folder_and_no_socket(control: socket.socket, tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    for folder in (own, other):
        folder.mkdir()
        (folder / "trace").write_text("x")
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(own / "daemon.sock"))
        daemon.listen()
        with session(control, own) as (peer, _):
            assert told(peer, f"read {own}/trace") == "done"
            assert told(peer, f"read {other}/trace") == "PermissionError"
            assert told(peer, f"connect {own}/daemon.sock") == "PermissionError"
            assert told(peer, f"link {other}/trace") == "PermissionError"
            assert told(peer, "read /etc/passwd") == "PermissionError"


def test_a_session_writes_nothing_into_the_log(control: socket.socket, tmp_path: Path) -> None:
    with session(control, tmp_path) as (peer, _):
        assert told(peer, "log") == "done"
    assert b"forged" not in (tmp_path / "log").read_bytes()


def test_a_session_can_be_ended_whatever_it_does(control: socket.socket, tmp_path: Path) -> None:
    with session(control, tmp_path) as (peer, child):
        signal.pidfd_send_signal(child, signal.SIGKILL)
        assert select.select([child], [], [], scaled(30))[0] == [child]
        assert peer.recv(1) == b""
    with session(control, tmp_path) as (peer, _):
        assert told(peer, f"read {tmp_path}/code/taken_over.py") == "done"
