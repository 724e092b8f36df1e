"""Runs programs that need torch in processes of their own, without the 3 s that each would need to import it.

Theory of operation
    One server process imports torch, with what an optimizer and the profiler import at their first use, and nothing
    of ours. It has one thread and never runs an operator. For each run it forks a child, which takes over the
    environment, the arguments and the output pipes of the request and then is the program: it runs as __main__ and
    comes to its end as an interpreter does. Requests come one at a time over a socket.

    Not for tests about how a process begins.
"""

from __future__ import annotations  # the agent's tests run under 3.9

import gc
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from json import dumps, loads
from pathlib import Path
from types import ModuleType
from typing import Any

TESTS = Path(__file__).resolve().parents[2]
START_S = 100.0
_MAX_REQUEST_BYTES = 1 << 17
_server: _Server | None = None


def run(*arguments: str, env: dict[str, str], timeout_s: float = 250.0) -> subprocess.CompletedProcess[str]:
    """As `python arguments` (-m MODULE or -c CODE, then the program's), run to its end in the folder of the tests."""
    global _server
    if _server is None:
        _server = _Server()
    return _server.run(arguments, env, timeout_s)


def end() -> None:
    """Ends the server if there is one."""
    global _server
    server, _server = _server, None
    if server is not None:
        server.end()


class _Server:
    """The client's side."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _MAX_REQUEST_BYTES)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "support.targets.torch_forks", str(theirs.fileno())],
                cwd=TESTS,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # numpy's has threads from the beginning
                stdin=subprocess.DEVNULL,
            )
        self._answer(START_S)

    def _answer(self, timeout_s: float) -> int:
        self._socket.settimeout(timeout_s)
        answer = self._socket.recv(100)
        assert answer, "the server of torch processes has ended"
        return int(answer)

    def run(
        self, arguments: tuple[str, ...], env: dict[str, str], timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """Runs one program. Raises TimeoutError once it has been killed."""
        request = dumps([arguments, env]).encode()
        assert len(request) <= _MAX_REQUEST_BYTES
        with _Output() as output, _Output() as errors:
            socket.send_fds(self._socket, [request], [output.write_end, errors.write_end])
            output.read_on()
            errors.read_on()
            pid = self._answer(START_S)
            try:
                status = self._answer(timeout_s)
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                self._answer(START_S)
                raise
            return subprocess.CompletedProcess(arguments, status, output.text(), errors.text())

    def end(self) -> None:
        """Tells the server to end and waits for it."""
        self._socket.close()
        self._process.wait(START_S)


class _Output:
    """A pipe that a thread empties."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        self._text = ""
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, *_error: object) -> None:
        os.close(self._read_end)

    def read_on(self) -> None:
        """The write end is somebody else's now."""
        os.close(self.write_end)
        self._thread.start()

    def _read(self) -> None:
        with os.fdopen(os.dup(self._read_end), encoding="utf-8", errors="replace") as stream:
            self._text = stream.read()

    def text(self) -> str:
        """The whole output, once every process that could write to it has ended."""
        self._thread.join()
        return self._text


# ---------------------------------------------------------------- the server


def _serve(channel: socket.socket) -> Any:
    """Forks a child for each request. Gives a child its request, None at the end."""
    channel.send(b"0")
    while True:
        data, descriptors, _flags, _address = socket.recv_fds(channel, _MAX_REQUEST_BYTES, 2)
        if not data:
            return None
        pid = os.fork()
        if pid == 0:
            channel.close()
            for standard, descriptor in zip((1, 2), descriptors):
                os.dup2(descriptor, standard)
                os.close(descriptor)
            return loads(data)
        for descriptor in descriptors:
            os.close(descriptor)
        channel.send(b"%d" % pid)
        _pid, status = os.waitpid(pid, 0)
        channel.send(b"%d" % os.waitstatus_to_exitcode(status))


def _become(arguments: list[str], env: dict[str, str]) -> None:
    import tempfile

    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # it may have been asked for
    sys.path[1:1] = env.get("PYTHONPATH", "").split(":")
    kind, program, *rest = arguments
    sys.argv[:] = [kind, *rest]
    if kind == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), main.__dict__)


def _import_torch() -> None:
    import torch
    import torch._dynamo
    import torch.profiler
    import torch.utils.data

    assert torch
    threads = list(Path("/proc/self/task").iterdir())
    assert len(threads) == 1, "a fork would lose threads"
    gc.collect()
    gc.freeze()  # or each child goes through everything at its end: 1 s


def _main(descriptor: int) -> None:
    _import_torch()
    request = _serve(socket.socket(fileno=descriptor))
    if request is not None:
        _become(*request)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
