"""A compiled program that uses the fake CUDA (tests/fakes/fake_cuda_program.c), as a process to record."""

from __future__ import annotations  # the agent's tests run under 3.9

import os
import socket
import subprocess
from types import TracebackType
from typing import TYPE_CHECKING, Optional

from support.machine import native
from support.machine.descriptors import open_files

if TYPE_CHECKING:
    from typing import Self


class FakeProgram:
    """The running program, after its first kernels.

    served: a thread of its own serves the collector, and `channel` is our end of its socket.
    device_graphs: its file has device code that launches CUDA graphs.
    """

    def __init__(
        self, *, served: bool = False, environ: Optional[dict[str, str]] = None, device_graphs: bool = False
    ) -> None:
        command = [str(native.fake_cuda_program(device_graphs=device_graphs))]
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if served:
            command += [str(theirs.fileno()), str(native.collector())]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[theirs.fileno()] if served else [],
            env={**os.environ, **(environ or {})},
        )
        theirs.close()
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    @property
    def pid(self) -> int:
        """Pid of the program."""
        return self.process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.channel.close()
        with self.process:
            self.process.kill()

    def ask(self, line: str) -> str:
        """Sends a command. Returns the program's answer; "" when it has ended."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def serves(self) -> bool:
        """Whether the collector's thread runs in the program."""
        return "kineto-agent" in self.ask("threads").split()


def sockets(pid: int) -> list[str]:
    """The sockets that a process has open."""
    return [name for name in open_files(pid).values() if name.startswith("socket:")]
