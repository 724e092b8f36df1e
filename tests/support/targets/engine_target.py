"""A Python process for hand-overs: it checks its own results, and says at its end how it was."""

import json
import os
import platform
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kinetod.attach.attach_types import Bootstrap

from support.waiting import scaled, until

DEADLINE_S = 30.0
PYENV = Path.home() / ".pyenv" / "versions"
needs_ptrace = pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="no trampoline for it")

_POLL = ("7", "73")  # x86-64; aarch64
# The main thread works until the stop file is there; it is never told by a system call of its own.
_SCRIPT = """
import json, os, signal, sys, threading, time
stop, kind = sys.argv[1:]
interrupted = []
signal.signal(signal.SIGUSR1, lambda *_: interrupted.append(1))
done = threading.Event()
def park():
    while not done.wait(3600): pass
threads = [threading.Thread(target=park) for _ in range(kind.count("bystander"))]
def churn():
    while not done.is_set(): check()
def check():
    global rounds
    total = 0.0
    for i in range(300):
        total += i * 0.5
    assert total == 22425.0, total
    if "malloc" in kind:
        data = [bytes(n) for n in range(500, 900)]
        assert sum(map(len, data)) == 279800
        assert sorted(map(str, range(200)))[-1] == "99"
    rounds += 1
rounds = 0
threads += [threading.Thread(target=churn) for _ in range(kind.count("worker"))]
for thread in threads: thread.start()
import select
while len(done._cond._waiters) < kind.count("bystander"): time.sleep(0.001)
print("up", flush=True)
if "asleep" in kind:
    slept = time.monotonic()
    select.poll().poll(1500)
    slept = time.monotonic() - slept
    while not os.path.exists(stop): check()
elif "joined" in kind:
    slept = 0
    while not os.path.exists(stop): done.wait(0.2)
else:
    slept = 0
    while not os.path.exists(stop): check()
done.set()
for thread in threads: thread.join()
print(json.dumps({"rounds": rounds, "slept": slept, "interrupted": len(interrupted),
    "mask": len(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "threads": len(threading.enumerate())}))
"""


class EngineTarget:
    """The running process. `kind`: words of bystander, worker (each may come again), malloc, asleep, joined."""

    def __init__(self, folder: Path, kind: str = "", executable: str = sys.executable) -> None:
        self._stop, self.mark = folder / "stop", folder / "mark"
        self.mark.write_bytes(b"")
        environ = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "KINETO_"))}
        self.process = subprocess.Popen(
            [executable, "-c", _SCRIPT, str(self._stop), kind],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environ,
        )
        self.pid = self.process.pid
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], scaled(DEADLINE_S))[0], "it did not come up"
        assert self.process.stdout.readline() == b"up\n"
        if "asleep" in kind:
            until(self._main_thread_polls, "its main thread is asleep", state=self.state)

    def _main_thread_polls(self) -> bool:
        return Path(f"/proc/{self.pid}/syscall").read_text().partition(" ")[0] in _POLL

    def bootstrap(self, text: bytes = b"x") -> Bootstrap:
        """Appends `text` to the mark file."""
        # One expression, no names: two of them may overlap, and they run in the target's __main__.
        opened = f"p.open({str(self.mark)!r}, p.O_WRONLY | p.O_APPEND)"
        source = f"(lambda p: (lambda d: (p.write(d, {text!r}), p.close(d)))({opened}))(__import__('posix'))"
        return Bootstrap(time.time_ns(), source.encode())

    def until_marked(self, times: int = 1) -> None:
        """Waits until the bootstrap has run that many times."""

        def marked() -> bool:
            assert self.process.poll() is None, self.state()
            return self.mark.stat().st_size >= times

        until(marked, f"the bootstrap has run {times} times", state=self.state)

    def state(self) -> str:
        """State of the target, for messages."""
        return f"{self.mark.stat().st_size} marks, exit status {self.process.poll()}"

    def finish(self) -> dict[str, Any]:
        """Lets the target end and reads its report. Raises AssertionError if it did not end well."""
        self._stop.touch()
        output, errors = self.process.communicate(timeout=scaled(DEADLINE_S))
        assert self.process.returncode == 0, (self.process.returncode, errors.decode())
        assert errors == b"", errors.decode()
        report: dict[str, Any] = json.loads(output)
        return report

    def end(self) -> None:
        """Kills the target if it is alive."""
        self.process.kill()
        self.process.communicate(timeout=scaled(DEADLINE_S))


@contextmanager
def engine_target(folder: Path, kind: str = "", executable: str = sys.executable) -> Iterator[EngineTarget]:
    """A running target, which is ended in any case."""
    target = EngineTarget(folder, kind, executable)
    try:
        yield target
    finally:
        target.end()


def pythons() -> Sequence[str]:
    """Interpreters of this machine from 3.9 on, one of each minor version."""
    found: dict[str, str] = {}
    for path in sorted(PYENV.glob("3.*/bin/python")):
        minor = path.parts[-3].rsplit(".", 1)[0]
        if int(minor.split(".")[1]) >= 9:
            found[minor] = str(path)
    return list(found.values()) or [sys.executable]


def version_of(executable: str) -> str:
    """Version of an interpreter, for the names of tests."""
    return Path(executable).parts[-3] if executable != sys.executable else "this"
