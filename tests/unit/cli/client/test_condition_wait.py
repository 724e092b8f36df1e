"""Waiting until a GPU does something, by samples of the host."""

from collections.abc import Iterator

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl.client.condition_wait import Met, wait_for
from kinetoctl.errors import ConditionNotMet
from kinetoctl.options.capture_spec import parse_gpu_condition

S = 10**9
IDLE = parse_gpu_condition("sm_active<30% for 3s")


def sample(second: float, *shares: float | None, uses: tuple[int, ...] = (0,), processes: int = 1) -> pb.HostSample:
    """shares: sm_active by GPU. uses: which of them the processes use."""
    found = pb.HostSample(time_ns=int(second * S))
    for index, share in enumerate(shares):
        found.gpus.add(gpu=pb.Gpu(index=index), vendor="nvidia", sm_active=share)
    for pid in range(processes):
        process = found.processes.add(process=pb.Process(pid=pid + 1))
        for index in uses:
            process.gpus.add(gpu=index, vendor="nvidia")
    return found


def waited(*samples: pb.HostSample, within_s: float | None = None) -> Met | None:
    """As long as the clock, which is that of the samples, allows."""
    now = iter([0.0, *(each.time_ns / S for each in samples)])
    return wait_for(iter(samples), IDLE, None if within_s is None else int(within_s * S), clock=lambda: next(now))


def series(*shares: float | None) -> Iterator[pb.HostSample]:
    return (sample(second, share) for second, share in enumerate(shares))


def test_it_is_met_once_every_sample_of_that_time_met_it() -> None:
    assert waited(*series(0.9, 0.2, 0.1, 0.2, 0.15)) == Met(0, 0.15)


@pytest.mark.parametrize("between", [0.9, 0.3, None], ids=["busy", "at the limit", "without a value"])
def test_a_sample_that_does_not_meet_it_begins_the_time_anew(between: float | None) -> None:
    with pytest.raises(ConditionNotMet, match="the daemon stopped sampling the GPUs"):
        waited(*series(0.1, 0.1, 0.1, between, 0.1, 0.1, 0.1))
    assert waited(*series(0.1, 0.1, 0.1, between, 0.1, 0.1, 0.1, 0.1)) is not None


def test_it_has_to_be_one_and_the_same_gpu() -> None:
    taking_turns = [sample(second, 0.1 if second % 2 else 0.9, 0.9 if second % 2 else 0.1, uses=(0, 1))
                    for second in range(9)]  # fmt: skip
    with pytest.raises(ConditionNotMet):
        waited(*taking_turns)
    assert waited(*(sample(second, 0.9, 0.1, uses=(0, 1)) for second in range(9))) == Met(1, 0.1)


def test_a_gpu_that_the_processes_do_not_use_does_not_count() -> None:
    with pytest.raises(ConditionNotMet):
        waited(*(sample(second, 0.9, 0.1, uses=(0,)) for second in range(9)))


def test_a_figure_that_no_gpu_has_is_told_soon_but_not_by_the_first_sample() -> None:
    with pytest.raises(ConditionNotMet, match="no GPU of the processes reports sm_active"):
        waited(*series(*[None] * 9))
    assert waited(*series(None, 0.1, 0.1, 0.1, 0.1)) is not None


def test_processes_without_a_gpu_are_told() -> None:
    with pytest.raises(ConditionNotMet, match="none of the processes is using a GPU"):
        waited(*(sample(second, 0.1, uses=()) for second in range(9)))


def test_without_processes_there_is_nothing_to_wait_for() -> None:
    assert waited(sample(0, 0.1, processes=0)) is None


def test_the_time_that_is_given_ends_it_with_what_was_seen_last() -> None:
    with pytest.raises(ConditionNotMet, match="not met within 2 s; last values: GPU 0 90 %"):
        waited(*series(0.9, 0.9, 0.9, 0.9), within_s=2)
