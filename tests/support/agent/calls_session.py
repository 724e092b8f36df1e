"""A recording of Python's calls as the agent has it, in a process of its own, with a daemon's side that copies.

Run with "python -m support.agent.calls_session PLAN", where PLAN is Python text that uses what is here.
"""

from __future__ import annotations  # the agent's tests run under 3.9

import os
import queue
import sys
import threading
import time
from typing import Any, NamedTuple

from kineto_agent.protocol.records import CALL_C_RETURN, CALL_CUT, CALL_RETURN, PYTHON_CALL, SPACE_PYTHON_CALL
from kineto_agent.sources.interface import SourceOutcome, SourceRequest
from kineto_agent.sources.python.call_tracing import PythonCallsSource
from kineto_agent.system.threads import start_thread

from support.agent.arenas import ArenaReader, Recycler
from support.waiting import scaled

COPY_PERIOD_S = 0.01
TYPES = ("python_function",)
USED = (os, threading, time)  # by plans


class Call(NamedTuple):
    """One call of a function on one thread."""

    name: str
    thread: int
    depth: int
    start_ns: int
    end_ns: int  # 0: it has not returned


class Agent:
    """A thread like the agent's, which the threading module does not know."""

    def __init__(self) -> None:
        self._actions: Any = queue.SimpleQueue()
        self._results: Any = queue.SimpleQueue()
        start_thread("kineto-agent", self._run)

    def _run(self) -> None:
        while True:
            try:
                self._results.put((self._actions.get()(), None))
            except Exception as exc:
                self._results.put((None, exc))

    def do(self, action: Any) -> Any:
        """Returns or raises what the action does on the agent's thread."""
        self._actions.put(action)
        value, error = self._results.get(timeout=scaled(25))
        if error is not None:
            raise error
        return value


class Recording:
    """Records from its making until `stop`."""

    def __init__(self, limit_bytes: int = 64 << 20, copies: bool = True, types: tuple[str, ...] = TYPES) -> None:
        source = PythonCallsSource()
        assert source.why_no_calls({}) == ""
        request = SourceRequest(frozenset(types), limit_bytes, {})
        self._agent = Agent()
        self.session: Any = self._agent.do(lambda: source.prepare(request))
        self._reader = ArenaReader(self.session.arena_fd)
        self._daemon = Recycler(self._reader, COPY_PERIOD_S)
        if copies:
            self._daemon.start()
        self._agent.do(self.session.start)

    def stop(self) -> tuple[SourceOutcome, bytes, dict[int, str]]:
        """End the session. Returns its outcome, the records, and the names by number."""
        outcome: SourceOutcome = self._agent.do(self.session.stop)
        data = b"".join(buffer.data for buffer in self._daemon.end())
        strings = self._reader.strings()
        names = {key: text for (space, key), text in strings.items() if space == SPACE_PYTHON_CALL}
        self._agent.do(self.session.close)
        return outcome, data, names


def calls(data: bytes, names: dict[int, str]) -> list[Call]:
    """Every call, in the order of the calls; the nesting is checked."""
    found: list[list[Any]] = []
    stacks: dict[int, list[tuple[int, bool]]] = {}
    for time_ns, thread, name in PYTHON_CALL.iter_unpack(data):
        stack = stacks.setdefault(thread, [])
        if name == CALL_CUT:
            stack.clear()
        elif name in (CALL_RETURN, CALL_C_RETURN):
            in_c = name == CALL_C_RETURN
            if stack and (stack[-1][1] or not in_c):
                at, was_c = stack.pop()
                assert was_c == in_c, names
                found[at][4] = time_ns
        else:
            found.append([names[name], thread, len(stack), time_ns, 0])
            stack.append((len(found) - 1, bool(name & 1)))
    return [Call(*row) for row in found]


def short(name: str) -> str:
    """The last part of a name."""
    return name.rpartition("\n")[2] if name[0] == "F" else name


if __name__ == "__main__":
    exec(compile(sys.argv[1], "<plan>", "exec"))
