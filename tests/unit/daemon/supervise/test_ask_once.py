"""One question to a process: its lines, how it ended, and its end if it does not answer."""

import asyncio
import sys
import time
from collections.abc import Callable

import pytest
from kinetod.supervise import child
from kinetod.supervise.child import ProcessEnd


def ask(code: str, on_line: Callable[[], object] = lambda: None) -> tuple[list[bytes], ProcessEnd]:
    lines: list[bytes] = []
    command = (sys.executable, "-S", "-c", f"import os, signal, sys; {code}")

    def take(line: bytes) -> None:
        lines.append(line)
        on_line()

    return lines, asyncio.run(child.ask_once(command, b"ping", take, deadline_s=3600))


def test_the_lines_of_the_answer_the_status_and_the_last_words_are_told() -> None:
    lines, ended = ask("print(sys.stdin.read()); print('a rest', end=''); os.write(2, b'farewell\\n'); sys.exit(3)")
    assert (lines, ended) == ([b"ping\n", b"a rest"], ProcessEnd(status=3, errors="farewell "))


def test_what_came_before_the_deadline_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def pass_the_deadline() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: time.monotonic() + 3600)

    lines, ended = ask("print('early', flush=True); signal.pause()", pass_the_deadline)
    assert (lines, ended) == ([b"early\n"], ProcessEnd(status=None))


def test_a_line_that_is_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "MAX_LINE_BYTES", 100)
    with pytest.raises(ValueError):
        ask("os.write(1, bytes(1000)); signal.pause()")
