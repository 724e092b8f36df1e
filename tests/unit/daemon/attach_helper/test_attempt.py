"""The order of the methods, with methods that hand over, fail or need more time, and a channel that comes or not."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from kinetod.attach.attach_types import AttachCode, AttachError, Bootstrap, Deadline, Stop
from kinetod.attach.channel import bootstrap
from kinetod.attach.inspect import standstill
from kinetod.attach.inspect.target_image import TargetImage
from kinetod.attach_helper import attempt
from kinetod.attach_helper.attempt import bring_in, first_number
from support.service.approvals import PLAIN

BOOTSTRAP = Bootstrap(token=1, source=b"")
DEADLINE_S = 20.0


class Image:
    """As much of a target as the order needs: the test's own pid."""

    pid = os.getpid()
    approved = PLAIN
    python = None


class Turn(Deadline):
    """Notes how long it was at first."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.whole_s = seconds


class FakeMethod:
    def __init__(self, name: str, *outcomes: "AttachCode | int") -> None:
        self.name = name
        self.turns_s: list[float] = []
        self.trouble: AttachError | None = None
        self.thread = False
        self.nameless_looks = 0
        self._outcomes = list(outcomes)

    def hand_over(self, target: object, bootstrap: Bootstrap, deadline: Deadline) -> Stop:
        del target, bootstrap
        assert isinstance(deadline, Turn)
        self.turns_s.append(deadline.whole_s)
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, AttachCode):
            raise AttachError(outcome, f"{self.name}: {outcome}")
        return Stop(tid=1, stopped_ns=outcome)

    def begun(self) -> bool:
        return self.thread

    def nameless(self) -> bool:
        self.nameless_looks -= 1
        return self.nameless_looks >= 0

    def problem(self) -> AttachError | None:
        return self.trouble

    def finish(self) -> None: ...


@pytest.fixture(autouse=True)
def noted_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "Deadline", Turn)


class Channels:
    """Appears after so many of the patient looks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
        self.channel, self._other = socket.socketpair()
        self._left = after
        monkeypatch.setattr(attempt, "_patiently", self._look)
        monkeypatch.setattr(attempt, "await_channel", self._look)

    def _look(self, *_arguments: Any) -> socket.socket | None:
        self._left -= 1
        return self.channel if self._left < 0 else None

    def close(self) -> None:
        self.channel.close()
        self._other.close()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[Channels]:
    channels = Channels(monkeypatch, 0)
    yield channels
    channels.close()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[Channels]:
    channels = Channels(monkeypatch, 1)
    yield channels
    channels.close()


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> Iterator[Channels]:
    channels = Channels(monkeypatch, 1_000_000)
    yield channels
    channels.close()


def run(*methods: FakeMethod, deadline_s: float = DEADLINE_S) -> attempt.Taken:
    return bring_in(cast(TargetImage, Image()), methods, BOOTSTRAP, Deadline(deadline_s))


def test_the_first_method_that_brings_the_channel_is_the_last_one_tried(at_once: Channels) -> None:
    first, second = FakeMethod("pending_call", 250), FakeMethod("native_thread", 1)
    taken = run(first, second)
    assert (taken.method, taken.stopped_ns, taken.channel) == ("pending_call", 250, at_once.channel)
    assert second.turns_s == []


def test_a_method_whose_code_does_not_run_is_followed_by_the_next(late: Channels) -> None:
    taken = run(FakeMethod("pending_call", 250), FakeMethod("native_thread", 100))
    assert (taken.method, taken.stopped_ns, taken.channel) == ("native_thread", 250, late.channel)


def test_a_method_whose_thread_waits_for_the_gil_is_followed_by_none(late: Channels) -> None:
    first, second = FakeMethod("pending_call", 250), FakeMethod("native_thread", 100)
    first.thread = True
    assert run(first, second).channel is late.channel
    assert second.turns_s == []


def test_what_was_begun_in_a_process_that_is_refused_after_all_is_let_go(at_once: Channels) -> None:
    with pytest.raises(AttachError, match="pending_call"):
        run(FakeMethod("pending_call", AttachCode.REPLACED))
    assert at_once.channel.fileno() == -1


def test_code_that_was_handed_over_is_awaited_when_the_next_method_cannot_be_used(late: Channels) -> None:
    taken = run(FakeMethod("pending_call", 250), FakeMethod("native_thread", AttachCode.FAILED))
    assert (taken.method, taken.channel) == ("pending_call", late.channel)


def test_a_method_that_found_no_moment_gets_a_longer_turn_after_the_others(at_once: Channels) -> None:
    slow = FakeMethod("pending_call", AttachCode.TIMEOUT, AttachCode.TIMEOUT, 250)
    unusable = FakeMethod("native_thread", AttachCode.FAILED)
    assert run(slow, unusable).channel is at_once.channel
    assert (slow.turns_s, unusable.turns_s) == ([0.25, 0.5, 1.0], [0.25])


def test_where_forks_would_warn_no_thread_is_begun_before_a_pending_call(
    late: Channels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "would_be_warned", lambda _image: True)
    slow = FakeMethod("pending_call", *[AttachCode.TIMEOUT] * 3, 250)
    other = FakeMethod("native_thread", 250)
    assert run(slow, other).channel is late.channel
    assert (slow.turns_s, other.turns_s) == ([0.25, 0.5, 1.0, 2.0], [2.0])


def test_the_agent_comes_once_every_thread_of_the_attach_has_its_name(late: Channels) -> None:
    first, second = FakeMethod("pending_call", 250), FakeMethod("native_thread", 100)
    second.nameless_looks = 3
    assert run(first, second).channel is late.channel
    assert second.nameless_looks < 0


@pytest.mark.usefixtures("never")
def test_why_no_code_runs_is_told_by_the_method_that_came_first() -> None:
    overtaken = FakeMethod("pending_call", 1)

    class First(FakeMethod):
        def hand_over(self, target: object, bootstrap: Bootstrap, deadline: Deadline) -> Stop:
            overtaken.thread, overtaken.trouble = True, AttachError(AttachCode.UNSUITABLE, "it has ended")
            self.trouble = AttachError(AttachCode.UNSUPPORTED, "the cause")
            return super().hand_over(target, bootstrap, deadline)

    with pytest.raises(AttachError, match="the cause"):
        run(overtaken, First("native_thread", 1))


@pytest.mark.usefixtures("never")
def test_after_a_final_refusal_nothing_else_is_tried() -> None:
    second = FakeMethod("native_thread", 1)
    with pytest.raises(AttachError, match="pending_call: ATTACH_GONE"):
        run(FakeMethod("pending_call", AttachCode.GONE), second)
    assert second.turns_s == []


@pytest.mark.usefixtures("never")
def test_when_no_method_can_be_used_the_reason_is_not_the_want_of_time() -> None:
    with pytest.raises(AttachError) as caught:
        run(FakeMethod("pending_call", AttachCode.UNSUPPORTED), FakeMethod("native_thread", AttachCode.FAILED))
    assert caught.value.reason == "native_thread: ATTACH_FAILED"


@pytest.mark.usefixtures("never")
def test_code_that_never_runs_is_a_timeout() -> None:
    with pytest.raises(AttachError, match="did not run the injected code") as caught:
        run(FakeMethod("pending_call", 250), FakeMethod("native_thread", 1), deadline_s=0.2)
    assert caught.value.code is AttachCode.TIMEOUT


@pytest.mark.usefixtures("never")
def test_code_that_cannot_run_says_why_at_once() -> None:
    method = FakeMethod("pending_call", 250)
    method.trouble = AttachError(AttachCode.UNSUITABLE, "no thread")
    with pytest.raises(AttachError, match="no thread"):
        run(method)


def test_a_channel_is_taken_whatever_became_of_the_code_that_was_handed_over_last(late: Channels) -> None:
    method = FakeMethod("pending_call", AttachCode.TIMEOUT, 250)  # the first one came through all the same
    method.trouble = AttachError(AttachCode.UNSUITABLE, "its token was taken")
    assert run(method).channel is late.channel


def test_code_that_cannot_run_does_not_matter_where_other_code_may(late: Channels) -> None:
    first = FakeMethod("pending_call", 250)
    first.trouble = AttachError(AttachCode.UNSUITABLE, "no thread")
    assert run(first, FakeMethod("native_thread", 100)).channel is late.channel


@pytest.mark.usefixtures("never")
def test_a_process_that_is_stopped_meanwhile_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(pid: int) -> None:
        raise AttachError(AttachCode.UNSUITABLE, f"process {pid} is stopped")

    monkeypatch.setattr(standstill, "check", stopped)
    second = FakeMethod("native_thread", 1)
    with pytest.raises(AttachError, match="is stopped"):
        run(FakeMethod("pending_call", 250), second)
    assert second.turns_s == []


@pytest.mark.usefixtures("never")
def test_a_limit_that_a_method_meets_is_the_reason_at_once() -> None:
    with pytest.raises(AttachError) as caught:
        run(FakeMethod("pending_call", 250), FakeMethod("native_thread", AttachCode.LIMIT))
    assert (caught.value.code, caught.value.reason) == (AttachCode.LIMIT, "native_thread: ATTACH_LIMIT")


@pytest.mark.parametrize("status", ["Name:\tgone\nState:\tZ (zombie)\n", None], ids=["zombie", "ended"])
def test_descriptors_of_a_process_that_has_ended_begin_where_those_of_the_smallest_table_do(
    tmp_path: Path, status: str | None
) -> None:
    (tmp_path / "7").mkdir()
    if status is not None:
        (tmp_path / "7/status").write_text(status)
    assert first_number(7, tmp_path) == bootstrap.FIRST_NUMBER


def test_descriptors_begin_near_the_end_of_the_table(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7/status").write_text("Name:\tbusy\nFDSize:\t256\nGroups:\t0\n")
    assert first_number(7, tmp_path) == 256 - bootstrap.AT_THE_END
