"""When iterations began, as records: however many there are, and told if one is missing."""

import os
from typing import Iterator, List, Tuple

import pytest
from kineto_agent.protocol.records import STEP_MARK
from kineto_agent.steps.counting import RING_ITERATIONS, StepCounter
from kineto_agent.steps.step_marks import StepMarkSession
from support.agent.agent_daemon import ArenaReader

MS = 1_000_000


class Recording:
    """A recording whose agent is woken by `wake`, and whose daemon copies at once."""

    def __init__(self, step_ns: int) -> None:
        self.now_ns = 0
        self.step_ns = step_ns
        self.counter = StepCounter(self._clock)
        self.woken = 0
        self.found: List[Tuple[int, int]] = []

    def _clock(self) -> int:
        self.now_ns += self.step_ns
        return self.now_ns

    def begin(self) -> None:
        self.marks = StepMarkSession(self.counter, max(self.counter.count, 1), self._wake, 1 << 20)
        self.reader = ArenaReader(os.dup(self.marks.arena_fd))
        self.marks.start()

    def _wake(self) -> None:
        self.woken += 1
        self.marks.copy()
        self.take()

    def take(self) -> None:
        for number, time_ns in ((r[1], r[0]) for r in STEP_MARK.iter_unpack(b"".join(self.reader.take()))):
            self.found.append((number, time_ns))

    def step(self, count: int) -> None:
        for _ in range(count):
            self.counter.step()


@pytest.fixture(params=[20 * MS, MS // 100])
def recording(request: pytest.FixtureRequest) -> Iterator[Recording]:
    found = Recording(request.param)
    yield found
    found.reader.close()
    found.marks.close()


def test_a_recording_has_every_iteration_from_the_running_one_on(recording: Recording) -> None:
    recording.step(7)
    recording.begin()
    recording.step(3 * RING_ITERATIONS)
    outcome = recording.marks.stop()
    recording.take()
    last = 7 + 3 * RING_ITERATIONS
    assert recording.found == [(number, number * recording.step_ns) for number in range(7, last + 1)]
    assert (outcome.counts.records, outcome.counts.dropped) == (last - 6, 0)


def test_the_agent_is_woken_about_once_a_second_or_before_the_ring_is_full() -> None:
    for step_ns, steps, woken in ((20 * MS, 1000, 20), (5000 * MS, 10, 10), (MS // 100, 5120, 10)):
        recording = Recording(step_ns)
        recording.counter.step()
        recording.begin()
        recording.step(steps)
        assert abs(recording.woken - woken) <= 2
        recording.reader.close()
        recording.marks.close()


def test_an_agent_that_copied_just_before_it_was_woken_is_woken_again(recording: Recording) -> None:
    """It has nothing to copy then, and the training thread has forgotten that it is to wake it."""
    recording.step(1)
    recording.begin()
    recording.counter.copy_after(None)
    recording.marks.copy()
    recording.step(3 * RING_ITERATIONS)
    assert recording.marks.stop().counts.dropped == 0


def test_nobody_is_woken_once_the_recording_has_stopped(recording: Recording) -> None:
    recording.begin()
    recording.step(10)
    recording.marks.stop()
    woken = recording.woken
    recording.step(2 * RING_ITERATIONS)
    assert recording.woken == woken


def test_iterations_that_were_overwritten_before_they_were_copied_are_counted(recording: Recording) -> None:
    recording.begin()
    recording.counter.copy_after(None)  # the agent's thread does not get to run
    recording.step(RING_ITERATIONS + 99)
    outcome = recording.marks.stop()
    recording.take()
    assert recording.found[0][0] == outcome.counts.dropped + 1 == 101


def test_an_agent_that_is_awake_often_loses_nothing_while_the_daemon_is_slow(recording: Recording) -> None:
    recording.begin()
    for _ in range(300):  # far more often than there are buffers
        recording.counter.step()
        recording.marks.copy()
    outcome = recording.marks.stop()
    recording.take()
    assert [number for number, _ in recording.found] == list(range(1, 301))
    assert outcome.counts.dropped == 0


def test_iterations_wait_in_the_ring_while_the_daemon_leaves_no_room(recording: Recording) -> None:
    recording.begin()
    recording.counter.copy_after(None)
    for _ in range(24):
        recording.step(500)
        recording.marks.copy()
    assert recording.marks.counts().dropped == 0  # 10,922 fit into the buffers, the others are in the ring
    recording.take()
    outcome = recording.marks.stop()
    recording.take()
    assert [number for number, _ in recording.found] == list(range(1, 12_001))
    assert outcome.counts.dropped == 0


def test_iterations_that_the_daemon_leaves_no_room_for_are_counted(recording: Recording) -> None:
    recording.begin()
    recording.take = lambda: None  # type: ignore[method-assign]
    recording.step(20_000)
    counts = recording.marks.stop().counts
    assert counts.records + counts.dropped == 20_000
    assert counts.dropped > 0
