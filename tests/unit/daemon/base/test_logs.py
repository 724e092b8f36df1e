import asyncio
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]
from kinetod.base import logs as tally_module
from kinetod.base.logs import JournalFormatter, Tally, VisibleFormatter, is_of_the_daemon, to_journal


@pytest.mark.parametrize(
    ("level", "line"),
    [
        (logging.CRITICAL, "<2>part: text"),
        (logging.ERROR, "<3>part: text"),
        (logging.WARNING, "<4>part: text"),
        (logging.INFO, "<6>part: text"),
        (logging.DEBUG, "<7>part: text"),
    ],
)
def test_each_level_is_a_priority_of_the_journal(level: int, line: str) -> None:
    assert JournalFormatter().format(logging.LogRecord("part", level, "", 0, "text", None, None)) == line


def test_every_line_of_a_traceback_has_the_priority() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        record = logging.LogRecord("part", logging.ERROR, "", 0, "failed", None, sys.exc_info())
    lines = JournalFormatter().format(record).splitlines()
    assert (lines[0], lines[-1]) == ("<3>part: failed", "<3>  ValueError: broken")
    assert all(line.startswith("<3>") for line in lines)


def test_the_journal_is_known_by_its_stream(tmp_path: Path) -> None:
    with (tmp_path / "stream").open("w") as stream:
        status = os.fstat(stream.fileno())
        environ = {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}
        assert to_journal(environ, stream.fileno())
        assert not to_journal({}, stream.fileno())
    with (tmp_path / "redirected").open("w") as other:
        assert not to_journal(environ, other.fileno())


@pytest.mark.parametrize("formatter", [JournalFormatter(), VisibleFormatter("%(message)s")])
def test_a_name_of_others_neither_begins_a_line_nor_steers_a_terminal(formatter: logging.Formatter) -> None:
    name = "x\r\n<0>kernel: FAKE\x1b[2J\x9b\u202e"
    line = formatter.format(logging.LogRecord("part", logging.INFO, "", 0, "pid 7 (%s) ended", (name,), None))
    assert line.removeprefix("<6>part: ") == r"pid 7 (x\x0d\x0a<0>kernel: FAKE\x1b[2J\x9b\u202e) ended"
    try:
        raise ValueError(name)
    except ValueError:
        record = logging.LogRecord("part", logging.ERROR, "", 0, "failed", None, sys.exc_info())
    text = formatter.format(record)
    assert "\x1b" not in text and "\x9b" not in text and "\u202e" not in text
    assert not any(line.startswith("<0>") for line in text.splitlines())


def _raised_in(logger: str, error: BaseException) -> logging.LogRecord:
    return logging.LogRecord(logger, logging.ERROR, "", 0, "raised in core", None, (type(error), error, None))


def test_a_client_that_hangs_up_as_it_is_answered_leaves_no_traceback_of_grpc() -> None:
    grpc_logger = "grpc._cython.cygrpc"
    assert not is_of_the_daemon(_raised_in(grpc_logger, cygrpc.ExecuteBatchError("failed")))
    assert not is_of_the_daemon(_raised_in(grpc_logger, asyncio.CancelledError()))
    assert is_of_the_daemon(_raised_in(grpc_logger, ValueError("a handler's own")))
    assert is_of_the_daemon(_raised_in("kinetod.rpc.error_status", asyncio.CancelledError()))
    assert is_of_the_daemon(logging.LogRecord(grpc_logger, logging.WARNING, "", 0, "text", None, None))


FIRST = {"call": "GetHost", "decision": "refused"}


def test_the_first_line_of_a_kind_is_written_and_the_others_are_counted() -> None:
    async def run() -> list[Mapping[str, Any]]:
        written: list[Mapping[str, Any]] = []
        done = asyncio.Event()

        def write(line: Mapping[str, Any]) -> None:
            written.append(line)
            if "count" in line:
                done.set()

        tally = Tally(write, period_s=0.05)
        for _ in range(1000):
            tally.note("ada", FIRST)
        tally.note("bob", {"call": "other"})
        await done.wait()
        return written

    assert asyncio.run(run()) == [FIRST, {"call": "other"}, {**FIRST, "count": 999}]


def test_what_is_counted_at_the_end_is_written() -> None:
    async def run() -> list[Mapping[str, Any]]:
        written: list[Mapping[str, Any]] = []
        tally = Tally(written.append)
        for _ in range(3):
            tally.note("ada", FIRST)
        tally.flush()
        return written

    assert asyncio.run(run()) == [FIRST, {**FIRST, "count": 2}]


def test_however_many_kinds_there_are_the_lines_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally_module, "MAX_KINDS", 5)

    async def run() -> list[Mapping[str, Any]]:
        written: list[Mapping[str, Any]] = []
        tally = Tally(written.append)
        for number in range(100):
            tally.note(number, {"number": number})
        return written

    assert len(asyncio.run(run())) == 6


def test_the_first_lines_of_a_burst_are_written() -> None:
    async def run() -> list[Mapping[str, Any]]:
        written: list[Mapping[str, Any]] = []
        tally = Tally(written.append, burst=3)
        for _ in range(10):
            tally.note("ada", FIRST)
        tally.flush()
        return written

    assert asyncio.run(run()) == [FIRST, FIRST, FIRST, {**FIRST, "count": 7}]
