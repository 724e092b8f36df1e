import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from kinetod.base.errors import VerdictReason
from kinetod.captures.result.verdict import DONE, Ending, EndState
from kinetod.captures.target import endings
from kinetod.captures.target.endings import after_clock, after_exec, ending_of_disk, nobody, with_plugins
from kinetod.captures.target.record_spool import DiskFull, StoreLost
from kinetod.plugins.plugin_loader import KnownPlugins, LoadedPlugin
from kinetod.processes.credentials import Credentials
from kinetod.processes.identity import ProcessKey
from support.service.approvals import PLAIN

SECOND_NS = 10**9
CANCELLED = Ending(EndState.CANCELLED, VerdictReason.CANCELLED, "cancelled")
GONE = Ending(EndState.PARTIAL, VerdictReason.TARGET_EXITED, "gone")
PLUGINS = KnownPlugins(known=(LoadedPlugin(name="tin", refused="it is broken"), LoadedPlugin(name="toy")))
TIN = "; the plug-in tin is not used: it is broken"
KEY = ProcessKey(7, 1)
BEFORE = replace(PLAIN, program="before")
LOST = Ending(EndState.PARTIAL, "AGENT_LOST", "the link was lost")
CANCELLED_ENDING = Ending(EndState.CANCELLED, "CANCELLED", "cancelled")


@pytest.mark.parametrize(("set_by_ns", "how"), [(3600 * SECOND_NS, "forward by 1 h"), (-2 * SECOND_NS, "back by 2 s")])
def test_a_trace_over_a_clock_that_was_set_is_partial(set_by_ns: int, how: str) -> None:
    ending = after_clock(DONE, set_by_ns)
    assert (ending.outcome, ending.code) == (EndState.PARTIAL, VerdictReason.CLOCK_SET)
    assert ending.reason.startswith(f"this host's clock was set {how} during the capture, ")


@pytest.mark.parametrize("set_by_ns", [0, 200_000_000, -200_000_000])
def test_a_clock_that_is_adjusted_a_little_changes_nothing(set_by_ns: int) -> None:
    assert after_clock(DONE, set_by_ns) is DONE


@pytest.mark.parametrize("ending", [CANCELLED, GONE])
def test_what_went_wrong_before_stays_the_reason(ending: Ending) -> None:
    assert after_clock(ending, 3600 * SECOND_NS) is ending


def test_two_readings_of_a_clock_that_nobody_sets_agree() -> None:
    assert abs(endings.clock_offset_ns() - endings.clock_offset_ns()) < endings.CLOCK_SET_NS


def test_only_a_full_disk_is_called_full() -> None:
    assert ending_of_disk(DiskFull("the disk is full: /x")).code == VerdictReason.DISK_FULL
    lost = ending_of_disk(StoreLost("writing failed (No such file or directory): /x"))
    assert (lost.code, lost.reason) == (VerdictReason.STORE_IO, "writing failed (No such file or directory): /x")


@pytest.mark.parametrize(
    ("code", "missing", "more"),
    [
        ("NOTHING_TO_RECORD", [], TIN),
        ("NOTHING_TO_RECORD", ["kernel"], TIN),
        ("ACTIVITY_TYPE_UNAVAILABLE", ["cpu_op", "tin_runtime"], TIN),
        ("ACTIVITY_TYPE_UNAVAILABLE", ["cpu_op"], ""),
        ("ACTIVITY_TYPE_UNAVAILABLE", ["tinder_runtime"], ""),
        ("UNKNOWN_ACTIVITY_TYPE", ["kernel", "tin_zzz"], TIN),
        ("UNKNOWN_ACTIVITY_TYPE", ["kernel", "kernl"], ""),
        ("CUPTI_BUSY", ["kernel"], ""),
    ],
)
def test_a_verdict_names_the_plug_ins_that_might_have_recorded_what_is_missing(
    code: str, missing: Sequence[str], more: str
) -> None:
    ending = with_plugins(Ending(EndState.FAILED, code, "it offers nothing"), PLUGINS, missing)
    assert ending.reason == "it offers nothing" + more


def test_other_verdicts_stay() -> None:
    assert with_plugins(DONE, PLUGINS, ["kernel"]) == DONE
    nothing = Ending(EndState.FAILED, "NOTHING_TO_RECORD", "no source")
    assert with_plugins(nothing, KnownPlugins(), []) == nothing


def ended(now: Credentials | None, ending: Ending, approved: Credentials | None = BEFORE) -> Ending:
    async def whose(_key: ProcessKey) -> Credentials | None:
        return now

    return asyncio.run(after_exec(whose, KEY, approved, ending))


@pytest.mark.parametrize("ending", [DONE, LOST, CANCELLED_ENDING])
def test_an_end_stays_what_it_was_where_the_process_does(ending: Ending) -> None:
    assert ended(BEFORE, ending) == ended(None, ending) == ended(PLAIN, ending) == ending
    assert ended(BEFORE, ending, approved=None) == ending
    assert asyncio.run(after_exec(nobody, KEY, BEFORE, ending)) == ending


def test_an_exec_during_a_capture_is_said_and_what_was_recorded_is_kept() -> None:
    found = ended(replace(BEFORE, program="after"), LOST)
    assert (found.outcome, found.code) == (EndState.PARTIAL, "TARGET_REPLACED")
    assert "process 7 replaced itself with another program (exec) during the capture" in found.reason


def test_an_exec_after_the_window_leaves_a_whole_trace_whole() -> None:
    assert ended(replace(BEFORE, program="after"), DONE) == DONE


@pytest.mark.parametrize("ending", [DONE, LOST])
def test_nothing_is_kept_of_what_is_another_users_now(ending: Ending, caplog: pytest.LogCaptureFixture) -> None:
    found = ended(replace(BEFORE, uids=(1001,) * 4), ending)
    assert (found.outcome, found.code) == (EndState.FAILED, "TARGET_REPLACED")
    assert "1001" not in found.reason  # only the log names its new owner
    assert "its user ids changed from 1000 to 1001" in caplog.text


def test_who_cancelled_is_told_that() -> None:
    assert ended(replace(BEFORE, uids=(1001,) * 4), CANCELLED_ENDING) == CANCELLED_ENDING
