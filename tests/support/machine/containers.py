"""Processes in namespaces and root file systems of their own, as container runtimes make them.

Theory of operation
    unshare(1) makes the namespaces; support.machine.container_init, started in them, makes the root file system with
    pivot_root, gives up rights and becomes the program. The program's pid, as we see it, is found through its
    parents. It lives until the Container is left: the namespaces die with it.
"""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Optional, Sequence, Tuple

import pytest

from support.waiting import scaled, until

INIT = Path(__file__).with_name("container_init.py")
ALL = ("pid", "mount", "net", "uts", "ipc")
SYSTEM_PYTHON = Path("/usr/bin/python3")  # one that every user can read
_PIPE = subprocess.PIPE


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Which namespaces are separate, and as whom the program runs."""

    namespaces: Tuple[str, ...] = ()  # of unshare; "user" maps the starter to root
    root: Optional[Path] = None  # takes the mount namespace
    proc: bool = True  # whether that root has /proc
    share: Tuple[Path, ...] = ()  # folders of ours at /run/0, /run/1, ... of that root
    starter: Optional[int] = None  # the user who makes the namespaces; None: this process's
    user: Optional[int] = None  # the program's in the end, in its namespace
    no_new_privs: bool = False

    def command(self) -> Sequence[str]:
        """The command that is put before the program's."""
        before = []
        if self.starter is not None:
            before += ["setpriv", f"--reuid={self.starter}", f"--regid={self.starter}", "--clear-groups"]
        if self.namespaces:
            before += ["unshare", *(f"--{name}" for name in self.namespaces)]
            before += ["--map-root-user"] if "user" in self.namespaces else []
            before += ["--fork", "--kill-child"] if "pid" in self.namespaces else []
        options = [f"--root={self.root}"] if self.root else []
        options += ["--proc"] if self.root and self.proc and "pid" in self.namespaces else []
        options += [f"--share={folder}" for folder in self.share]
        options += [f"--user={self.user}"] if self.user is not None else []
        options += ["--no-new-privs"] if self.no_new_privs else []
        python = sys.executable if self.starter is None else str(SYSTEM_PYTHON)
        return [*before, python, "-S", str(INIT), *options, "--"]


class Contained:
    """A program that runs in a container, after its first line, "ready". A context manager."""

    def __init__(self, kind: Kind, program: Sequence[str]) -> None:
        self.process = subprocess.Popen([*kind.command(), *program], stdin=_PIPE, stdout=_PIPE, stderr=_PIPE)
        self.pid = self.process.pid
        first = self.hear()
        if first != "ready":
            _output, errors = self.process.communicate()
            raise RuntimeError(f"the container cannot be made: {first} {errors.decode()[-300:]}")
        self.pid = until(self._innermost, "the program's pid is known")

    def __enter__(self) -> "Contained":
        return self

    def __exit__(self, *_exc: object) -> None:
        if self.process.poll() is None:  # so the program's pid is still its own
            os.kill(self.pid, signal.SIGKILL)  # --kill-child does not outlast a change of the user
            self.process.kill()
        self.process.communicate()

    def _innermost(self) -> int:
        pid = self.process.pid
        while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            if Path(f"/proc/{pid}/comm").read_text() != "unshare\n":
                break
            pid = int(children[0])
        return pid

    def say(self) -> None:
        """Writes an empty line to the program."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        """The next line of its output."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().rstrip("\n")

    def end(self) -> Tuple[bytes, bytes]:
        """Say the line that ends it; what it still had to say on its output and error output."""
        output, errors = self.process.communicate(b"\n", timeout=scaled(20))
        return output, errors


def need(kind: Kind) -> Kind:
    """Skip the test where this machine or this user cannot make such a container."""
    if os.geteuid() != 0 and (kind.starter is not None or "user" not in kind.namespaces):
        pytest.skip("such a container takes root")
    for tool in ("unshare", "setpriv"):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool}")
    tried = subprocess.run(
        [*Kind(namespaces=kind.namespaces, starter=kind.starter).command(), "/bin/true"],
        capture_output=True,
        check=False,
    )
    if tried.returncode != 0:
        pytest.skip(f"such namespaces cannot be made: {tried.stderr.decode().strip()[-200:]}")
    return kind
