"""How a capture ends whose process has become another one."""

import asyncio
from dataclasses import replace

import pytest
from kinetod.captures.result.verdict import DONE, Ending, EndState
from kinetod.captures.target.exec_detection import after_exec, nobody
from kinetod.processes.credentials import Credentials
from kinetod.processes.identity import ProcessKey
from support.service.approvals import PLAIN

KEY = ProcessKey(7, 1)
BEFORE = replace(PLAIN, program="before")
LOST = Ending(EndState.PARTIAL, "AGENT_LOST", "the link was lost")
CANCELLED = Ending(EndState.CANCELLED, "CANCELLED", "cancelled")


def ended(now: Credentials | None, ending: Ending, approved: Credentials | None = BEFORE) -> Ending:
    async def whose(_key: ProcessKey) -> Credentials | None:
        return now

    return asyncio.run(after_exec(whose, KEY, approved, ending))


@pytest.mark.parametrize("ending", [DONE, LOST, CANCELLED])
def test_an_end_stays_what_it_was_where_the_process_does(ending: Ending) -> None:
    assert ended(BEFORE, ending) == ended(None, ending) == ended(PLAIN, ending) == ending
    assert ended(BEFORE, ending, approved=None) == ending
    assert asyncio.run(after_exec(nobody, KEY, BEFORE, ending)) == ending


def test_an_exec_during_a_capture_is_said_and_what_was_recorded_is_kept() -> None:
    found = ended(replace(BEFORE, program="after"), LOST)
    assert (found.outcome, found.code) == (EndState.PARTIAL, "TARGET_REPLACED")
    assert "process 7 now runs another program: the process replaced itself with another program (exec)" in found.reason


def test_an_exec_after_the_window_leaves_a_whole_trace_whole() -> None:
    assert ended(replace(BEFORE, program="after"), DONE) == DONE


@pytest.mark.parametrize("ending", [DONE, LOST])
def test_nothing_is_kept_of_what_is_another_users_now(ending: Ending) -> None:
    found = ended(replace(BEFORE, uids=(1001,) * 4), ending)
    assert (found.outcome, found.code) == (EndState.FAILED, "TARGET_REPLACED")
    assert "its user ids were 1000 and are 1001" in found.reason


def test_who_cancelled_is_told_that() -> None:
    assert ended(replace(BEFORE, uids=(1001,) * 4), CANCELLED) == CANCELLED
