"""The daemon's side of a reading: whatever happens to the process that reads, there is an answer."""

import asyncio
import sys

import pytest
from kinetod.processes.identity import ProcessKey
from kinetod.stacks.stack_reader import StackReader
from kinetod.stacks.thread_stacks import StackReading
from support.waiting import scaled

KEY = ProcessKey(7, 1)
FIRST = "import sys; sys.stdin.read(); print('{\"time_ns\": 1}', flush=True); "


def read(program: str, deadline_s: float = 30.0) -> StackReading:
    reader = StackReader(command=(sys.executable, "-c", program), deadline_s=deadline_s)
    return asyncio.run(reader.read(KEY, 1000))


def test_the_last_line_counts() -> None:
    assert read(FIRST + "print('{\"time_ns\": 2}')").time_ns == 2


def test_what_was_told_before_it_blocked_stays() -> None:
    assert read(FIRST + "import time; time.sleep(1000)", scaled(1.0)).time_ns == 1


def test_what_was_told_before_it_crashed_stays_and_the_crash_is_told() -> None:
    found = read(FIRST + "import os; os.abort()")
    assert (found.time_ns, found.reason) == (1, "reading its Python frames failed; the daemon's log has the details")


def test_a_line_that_was_cut_short_does_not_replace_a_whole_one() -> None:
    assert read(FIRST + "sys.stdout.write('{\"time_ns\": ')").time_ns == 1


def test_a_program_that_cannot_be_started_is_a_reason() -> None:
    reader = StackReader(command=("/nonexistent",), deadline_s=30.0)
    assert asyncio.run(reader.read(KEY, 1000)).reason == "reading its stacks failed; the daemon's log has the details"


@pytest.mark.parametrize("program", ["print('junk')", "import os; os.abort()", "print('{\"time_ns\": -1}')"])
def test_no_answer_is_a_reason(program: str) -> None:
    assert read(program).reason == "reading its stacks failed; the daemon's log has the details"


def test_no_answer_in_time_is_a_reason_of_its_own() -> None:
    assert read("import time; time.sleep(1000)", 0.1).reason == "its stacks could not be read in time"


def test_a_process_that_has_ended_is_an_error() -> None:
    with pytest.raises(ProcessLookupError, match="gone"):
        read("import sys; sys.stderr.write('gone'); sys.exit(3)")
