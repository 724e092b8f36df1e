"""Starts interpreters with an agent and talks to them by lines. Runs wherever the agent runs."""

import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Dict, List, Optional, Sequence

import kineto_agent

from support.waiting import scaled

AGENT_ROOT = Path(kineto_agent.__file__).parent.parent
INJECT = AGENT_ROOT / "kineto_agent" / "bootstrap" / "inject"
DEADLINE_S = 30.0


def environment(**variables: str) -> Dict[str, str]:
    """This process's environment without what concerns agents, then the given variables."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("KINETO_", "PYTHON"))}
    return {**kept, "PYTHONPATH": str(AGENT_ROOT), **variables}


def run_python(
    arguments: Sequence[str],
    env: Optional[Dict[str, str]] = None,
    executable: str = sys.executable,
    cwd: Optional[Path] = None,
) -> "subprocess.CompletedProcess[str]":
    """Run to the end, within the deadline."""
    return subprocess.run(
        [executable, *arguments],
        env=environment() if env is None else env,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=scaled(DEADLINE_S),
        check=False,
    )


class Child:
    """A running interpreter; its standard input and output are pipes."""

    def __init__(self, arguments: Sequence[str], env: Dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._heard = b""

    def say(self, line: str) -> None:
        """Write one line to the child's standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        """The next line of its standard output."""
        assert self.process.stdout is not None
        while b"\n" not in self._heard:
            ready, _write, _error = select.select([self.process.stdout], [], [], scaled(DEADLINE_S))
            assert ready, "no line came within %.0f s" % DEADLINE_S
            data = os.read(self.process.stdout.fileno(), 4096)
            assert data, "it ended after saying %r" % self._heard
            self._heard += data
        line, _newline, self._heard = self._heard.partition(b"\n")
        return line.decode()

    def has_said(self) -> bool:
        """Whether there is something to hear."""
        assert self.process.stdout is not None
        return bool(self._heard or select.select([self.process.stdout], [], [], 0)[0])

    def end(self) -> "List[str]":
        """Wait for the end of the child. Returns the rest of its standard output and error."""
        output, errors = self.process.communicate(timeout=scaled(DEADLINE_S))
        return [output.decode(), errors.decode()]

    def kill(self) -> None:
        """Kill the child if it is alive, and close the pipes."""
        self.process.kill()
        self.process.communicate(timeout=scaled(DEADLINE_S))
