"""For how long a capture has recorded, and of how long."""

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl.output.capture_progress import Lines, StateTimes, extent, time_text
from support.service import captures

TIMED = pb.CaptureSpec(duration_ns=5 * 10**9)
STEPS = pb.CaptureSpec(iterations=pb.IterationWindow(count=20))


def collected(recorded_s: float, iterations: int = 0) -> pb.Target:
    target = captures.done_target()
    target.collecting_ns, target.collected_ns = 10**9, int((1 + recorded_s) * 1e9)
    target.summary.iterations = iterations
    return target


def test_a_target_that_records_says_how_long_of_how_long() -> None:
    recording = captures.target(state=pb.TARGET_STATE_COLLECT)
    assert time_text(recording, TIMED, 3.21) == "3.2 s of 5 s"
    assert time_text(recording, STEPS, 3.21) == "3.2 s, 20 iterations"
    assert time_text(recording, pb.CaptureSpec(duration_ns=600 * 10**9), 312.2) == "5 min 12 s of 10 min"
    assert time_text(recording, pb.CaptureSpec(), 3.21) == "3.2 s"


def test_before_and_after_it_says_how_long_the_state_lasts() -> None:
    for state in (pb.TARGET_STATE_PENDING, pb.TARGET_STATE_WARMUP, pb.TARGET_STATE_PROCESS, pb.TARGET_STATE_STORE):
        assert time_text(captures.target(state=state), TIMED, 0.44) == "0.4 s"


def test_an_ended_target_says_what_the_daemon_saw_it_record() -> None:
    assert time_text(collected(1.25), TIMED, 99) == "1.2 s of 5 s"
    assert time_text(collected(8, iterations=12), STEPS, 99) == "8.0 s, 12 of 20 iterations"
    assert time_text(captures.done_target(), TIMED, 99) == ""


def test_one_iteration_is_one() -> None:
    assert extent(pb.CaptureSpec(iterations=pb.IterationWindow(count=1))) == "1 iteration"


def test_a_state_counts_from_when_it_was_seen_or_if_it_was_older_from_what_the_daemon_says() -> None:
    now_s = 100.0
    times = StateTimes(clock=lambda: now_s, wall_ns=lambda: 50 * 10**9)
    target = captures.target(state=pb.TARGET_STATE_COLLECT)
    target.state_since_ns = 20 * 10**9
    times.see("a", target)
    assert times.seconds("a") == 30
    target.state, target.state_since_ns = pb.TARGET_STATE_STORE, 40 * 10**9
    times.see("a", target)
    now_s += 2
    times.see("a", target)
    assert times.seconds("a") == 2
    assert times.seconds("never seen") == 0


def test_a_log_has_the_extent_when_recording_begins_and_the_figures_when_it_has_ended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines, done = Lines(), collected(5.012)
    done.counts.add(source="torch_ops", records=12_345, bytes=3 << 20, dropped=7)
    for target in (captures.target(), captures.target(state=pb.TARGET_STATE_COLLECT), done):
        capture = captures.capture(target)
        capture.spec.CopyFrom(TIMED)
        lines.update(capture)
    assert capsys.readouterr().err.splitlines() == [
        "pid 4242, rank 0: PENDING",
        "pid 4242, rank 0: COLLECT for 5 s",
        "pid 4242, rank 0: DONE, 5.0 s of 5 s, 12,345 records, 3.0 MiB, 7 dropped",
    ]
