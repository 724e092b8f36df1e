"""A Python program that nobody prepared, and the daemon's side of a live attach to it, without any ptrace.

The program runs the bootstrap on a thread of its own, with the globals that a method would give it. `native` does in
Python what opening_stub.c does without the GIL.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kineto_agent.protocol import wire
from kinetod.attach.attach_types import Bootstrap, Deadline
from kinetod.attach.channel import bootstrap, payload
from kinetod.attach.channel import private_channel as channel

from support.agent.agent_daemon import Connection
from support.agent.python_child import environment
from support.machine import newer_pythons
from support.machine.descriptors import open_files
from support.waiting import scaled, until

DEADLINE_S = 30.0
VERSIONS = ("3.9", "3.10", "3.11", "3.12", "3.13", *newer_pythons.VERSIONS)

# Lines on standard input: code to execute, or an expression whose value is answered in JSON. Everything is done in a
# dictionary of its own, so that __main__ is the program's. "boot" runs a bootstrap on a new thread.
PROGRAM = r"""
import _thread, ctypes, json, sys
start = _thread.start_new_thread
address = lambda name: ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value
calls = {name: address(name) for name in ("dlopen", "dlsym", "syscall")}
def native(path, symbol, address, size, number, spec=None, *more):
    if not path:
        return {}
    if symbol is None:
        with open(path, "rb") as file:
            data = file.read(size)
        ctypes.memmove(address + 8, data, len(data))
        ctypes.c_long.from_address(address).value = len(data)
        return {}
    known = {name: module for name, module in sys.modules.items() if name == spec.name}
    module = spec.loader.create_module(spec)
    spec.loader.exec_module(module)
    sys.modules.pop(spec.name, None)
    sys.modules.update(known)
    return module
def boot(source):
    ctypes.pythonapi.prctl(15, b"kineto-agent")
    exec(source, {"__builtins__": __builtins__, "modules": sys.modules, "native": native, "turns": 0, **calls})
def serve():
    kept = {}
    for line in sys.stdin:
        verb, _space, rest = line.rstrip("\n").partition(" ")
        rest = json.loads(rest)
        if verb == "do":
            exec(rest, kept)
            answer = None
        elif verb == "boot":
            answer = bool(start(boot, (rest,)))
        else:
            answer = eval(rest, kept)
        print(json.dumps(answer), flush=True)
if __name__ == "__main__":
    serve()
"""


@functools.cache  # each is started to see whether it has ctypes
def pythons() -> list[str]:
    """The executables of every CPython from the agent's floor on that this machine has."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found: dict[str, str] = {}
    for version in VERSIONS:
        own, newer = shutil.which(f"python{version}"), newer_pythons.find(version)
        candidates = [*sorted(root.glob(f"{version}.*/bin/python")), *([Path(own)] if own else []), newer]
        for path in candidates:
            if path and subprocess.run([path, "-c", "import ctypes"], capture_output=True, check=False).returncode == 0:
                found.setdefault(version, str(path))
    return list(found.values()) or [sys.executable]


class LiveTarget:
    """The program and what a daemon does with it."""

    def __init__(self, python: str = sys.executable, *options: str, program: str = PROGRAM) -> None:
        self.process = subprocess.Popen(
            [python, *options, "-c", program],
            env={key: value for key, value in environment().items() if key != "PYTHONPATH"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid
        self._connections: list[Connection] = []

    def ask(self, expression: str) -> Any:
        """The value of an expression there."""
        return self._command("eval", expression)

    def do(self, code: str) -> None:
        """Executes code in the target."""
        self._command("do", code)

    def run(self, boot: Bootstrap) -> None:
        """Run the bootstrap. It may not have begun when this returns."""
        payload.agent()  # packed once, which can take longer than the bootstrap waits
        assert self._command("boot", boot.source.decode())

    def _command(self, verb: str, text: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{verb} {json.dumps(text)}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"it ended: {self.process.stderr.read() if self.process.stderr else ''}"
        return json.loads(answer)

    # ------------------------------------------------------------ the daemon's side

    def attach(self) -> Connection:
        """Attach; the connection, before Hello."""
        boot = bootstrap.make(time.time_ns())
        self.run(boot)
        connection = self.channel(boot)
        payload.send(connection.socket, self.pid, Deadline(scaled(DEADLINE_S)))
        connection.socket.settimeout(scaled(DEADLINE_S))
        return connection

    def channel(self, boot: Bootstrap) -> Connection:
        """The channel that this bootstrap has opened."""
        found = channel.await_channel(self.pid, boot.token, Deadline(scaled(DEADLINE_S)))
        assert found is not None
        self._connections.append(Connection(found))
        return self._connections[-1]

    def welcome(self) -> tuple[Connection, wire.Hello]:
        """Attach; the connection after the handshake."""
        connection = self.attach()
        hello = connection.expect(wire.Hello)
        connection.send(wire.Welcome("0.0.0"))
        return connection, hello

    def threads(self) -> int:
        """Number of the target's threads, as the kernel counts them."""
        return len(list(Path(f"/proc/{self.pid}/task").iterdir()))

    def descriptors(self) -> dict[int, str]:
        """The target's open descriptors."""
        return open_files(self.pid)

    def until_alone(self) -> None:
        """Wait until the agent's thread is gone."""
        until(lambda: self.threads() == 1, "the agent's threads are gone")

    def end(self) -> tuple[int, str]:
        """Lets the target end. Returns its exit status and standard error."""
        _output, errors = self.process.communicate(timeout=scaled(DEADLINE_S))
        return self.process.returncode, errors

    def kill(self) -> None:
        """Kills the target if it is alive."""
        self.process.kill()
        self.process.communicate(timeout=scaled(DEADLINE_S))
        for connection in self._connections:
            connection.close()


Start = Callable[..., LiveTarget]  # what a fixture starts them with
