"""Processes that send datagrams as libkineto does, or nearly: a new one for each case, as root of another user.

They are forked by a process of their own, `python -m fuzz.doors.poll_senders FOLDER`, since whoever speaks gRPC
should not fork. A line on its standard input is a case in JSON, a line on its standard output what became of it.
"""

import array
import base64
import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Self

from support.peers import libkineto
from support.peers.libkineto import Libkineto
from support.service.daemon import child_environ

from fuzz.doors.loop import Case, Failure

OTHER_UID = 64993
NAMED, UNNAMED, ELSEWHERE, ABSTRACT, LINKED, DESCRIPTORS = b"N", b"U", b"E", b"A", b"L", b"D"
WAIT_S = 2.0


class Senders:
    """The process that forks. Send cases between `with` and its end."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "fuzz.doors.poll_senders", str(folder)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=child_environ(), stdin=pipe, stdout=pipe, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._process.communicate()

    def send(self, case: Case) -> str:
        """Has a new process send the datagrams; says what became of them. Raises Failure."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([base64.b64encode(step).decode() for step in case]) + "\n")
        self._process.stdin.flush()
        said = json.loads(self._process.stdout.readline() or '""')
        if not said or said.startswith("failed"):
            raise Failure(f"the sender {said or 'crashed'}")
        return str(said)


def _child(folder: Path, case: Case) -> str:
    """What became of it, in a word. Runs in a process that ends."""
    try:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(OTHER_UID)
            os.setuid(OTHER_UID)
        client = Libkineto(folder)
        answers = sum(_send(client, folder, step[:1], step[1:]) for step in case)
        client.send(libkineto.poll())
        last = _well_formed(client, WAIT_S)
        client.close()
        return "limited" if not last else "only the last answered" if last == 1 and not answers else "several answered"
    except Exception:  # the campaign raises it
        return "failed: " + traceback.format_exc()


def _send(client: Libkineto, folder: Path, kind: bytes, datagram: bytes) -> int:
    """The number of answers that have come meanwhile."""
    to = str(folder / "dynolog")
    with contextlib.suppress(OSError) if len(datagram) > 4096 else contextlib.nullcontext():
        if kind == NAMED:
            client.sock.sendto(datagram, to)
        elif kind == DESCRIPTORS:
            rights = array.array("i", [client.sock.fileno()] * 3)
            with contextlib.suppress(PermissionError):  # from Linux 6.16 on the kernel refuses them
                client.sock.sendmsg([datagram], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)], 0, to)
        else:
            _from_elsewhere(kind, folder, datagram, to)
    return _well_formed(client, 0.0)


def _from_elsewhere(kind: bytes, folder: Path, datagram: bytes, to: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        if kind == ABSTRACT:
            sock.bind(f"\0fuzz{os.getpid()}{time.monotonic_ns()}")
        elif kind != UNNAMED:
            name = "dynoconfigclient" if kind == LINKED else "other"
            path = folder / f"{name}{os.getpid()}-{time.monotonic_ns()}"
            sock.bind(str(path))
            path.unlink()
            if kind == LINKED:
                path.symlink_to("/dev/log")
                sock.sendto(datagram, to)
                path.unlink()
                return
        sock.sendto(datagram, to)


def _well_formed(client: Libkineto, patience_s: float) -> int:
    """Takes what has come. Raises ValueError for an answer that no libkineto would understand."""
    answers = 0
    while (answer := client.receive(patience_s) if patience_s else _now(client)) is not None:
        size, kind = struct.unpack_from("<Q32s", answer)
        if size != len(answer) - 40 or kind.rstrip(b"\0") not in (b"req", b"ctxt"):
            raise ValueError(f"an answer that is none: {answer!r}")
        answers, patience_s = answers + 1, 0.0
    return answers


def _now(client: Libkineto) -> bytes | None:
    client.sock.settimeout(None)
    with contextlib.suppress(BlockingIOError):
        return client.sock.recv(1 << 16, socket.MSG_DONTWAIT)
    return None


def main() -> int:
    """Forks for each line."""
    folder = Path(sys.argv[1])
    for line in sys.stdin:
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            case = [base64.b64decode(step) for step in json.loads(line)]
            os.write(theirs, json.dumps(_child(folder, case)).encode())
            os._exit(0)
        os.close(theirs)
        said = b"".join(iter(lambda end=ours: os.read(end, 4096), b""))  # type: ignore[misc]
        os.close(ours)
        os.waitpid(pid, 0)
        print(said.decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
