"""One question to a process: its lines, how it ended, and its end if it does not answer."""

import asyncio
import sys

import pytest
from kinetod.supervise import child
from kinetod.supervise.child import ProcessEnd
from support.waiting import scaled


def ask(code: str, deadline_s: float = 60) -> tuple[list[bytes], ProcessEnd]:
    lines: list[bytes] = []
    command = (sys.executable, "-S", "-c", f"import os, signal, sys; {code}")
    return lines, asyncio.run(child.ask_once(command, b"ping", lines.append, deadline_s=deadline_s))


def test_the_lines_of_the_answer_the_status_and_the_last_words_are_told() -> None:
    lines, ended = ask("print(sys.stdin.read()); print('a rest', end=''); os.write(2, b'farewell\\n'); sys.exit(3)")
    assert (lines, ended) == ([b"ping\n", b"a rest"], ProcessEnd(status=3, errors="farewell "))


def test_what_came_before_the_deadline_is_kept() -> None:
    lines, ended = ask("print('early', flush=True); signal.pause()", deadline_s=scaled(3))
    assert (lines, ended) == ([b"early\n"], ProcessEnd(status=None))


def test_a_line_that_is_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "MAX_LINE_BYTES", 100)
    with pytest.raises(ValueError):
        ask("os.write(1, bytes(1000)); signal.pause()")
