"""Stragglers: who began collectives last, what that cost, and whom HTA blames."""

from typing import Any

import pytest
from kineto_trace.analysis.distributed.distributed_views import stragglers
from kineto_trace.errors import ViewError
from kineto_trace.view_api.result import Result
from kineto_trace.view_api.view import Compat
from support.trace_files.ranks import Event, context, launched, nccl, step
from support.trace_files.simulated.training_job import SimulatedJob, SimulatedRun, ddp, fsdp, simulate


def over(*ranks: list[Event], compat: Compat = Compat.NONE, **options: Any) -> Result:
    partials = [
        (rank, stragglers.partial(context(events, rank=rank, size=len(ranks)), compat=compat, **options))
        for rank, events in enumerate(ranks)
    ]
    return stragglers.combine(partials, compat=compat, **options)


def rank(*starts: float, kernel: str = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)") -> list[Event]:
    """Steps of 100 us; each launches one all_reduce, which ends at its 90th us on every rank."""
    events: list[Event] = []
    for number, start in enumerate(starts):
        base = 100 * number
        events.append(step(number + 1, base, 99))
        arguments = nccl("allreduce", 100, [0, 1, 2], number)
        events += launched(kernel, base + 1, base + start, 90 - start, number, stream=20, **arguments)
    return events


RANKS = (rank(10, 10, 12), rank(40, 15, 12), rank(12, 35, 12))


def test_who_begins_a_collective_last_costs_the_others_its_distance_to_the_last_but_one() -> None:
    found = over(*RANKS).rows()
    # step 1: rank 1 is 28 us after rank 2; step 2: rank 2 is 20 us after rank 1; step 3: nobody is late
    assert [tuple(row.values()) for row in found] == [
        (1, True, 1, 1, 28.0, pytest.approx(35 / 3), 2.0),
        (2, True, 1, 1, 20.0, 9.0, 2.0),
        (0, False, 0, 0, 0.0, 0.0, 2.0),
    ]


def test_only_the_wanted_steps_count() -> None:
    found = over(*RANKS, steps="2", num_candidates=1).rows()
    assert [(row["rank"], row["candidate"], row["caused_us"]) for row in found] == [
        (2, True, 20.0),
        (0, False, 0.0),
        (1, False, 0.0),
    ]
    with pytest.raises(ViewError, match=r"in the steps \[7\]; available: \[1, 2, 3\]"):
        over(*RANKS, steps=7)
    with pytest.raises(ViewError, match="'x' is not a list of numbers"):
        over(*RANKS, steps="x")


def test_a_rank_alone_waits_for_nobody() -> None:
    found = over(RANKS[0])
    assert found.values("candidate") == [False]
    assert "no collective appears on more than one rank, so who waits for whom is unknown" in found.notes[-1]


def simulated(job: SimulatedJob) -> tuple[SimulatedRun, Result]:
    run = simulate(job)
    partials = [(rank, stragglers.partial(run.context(rank))) for rank in range(job.ranks)]
    return run, stragglers.combine(partials)


@pytest.mark.parametrize("begin", [{}, {1: 0.1}, {0: 0.23}])
def test_only_the_rank_that_sleeps_is_a_candidate_and_it_causes_no_more_than_was_waited(
    begin: dict[int, float],
) -> None:
    run, found = simulated(fsdp(late={1: 15_000.0}, begin=begin))
    by_rank = {row["rank"]: row for row in found.rows()}
    assert [by_rank[rank]["candidate"] for rank in (0, 1)] == [False, True]
    assert by_rank[1]["caused_us"] <= run.waits_us[0] < run.total_us
    share = 1 - max([*begin.values(), 0.0])
    assert by_rank[1]["caused_us"] == pytest.approx(share * run.waits_us[0], rel=0.12)


@pytest.mark.parametrize("job", [fsdp(ranks=4), ddp(ranks=4), fsdp(ranks=2, begin={1: 0.2})])
def test_a_job_of_equal_ranks_has_no_candidates(job: SimulatedJob) -> None:
    _, found = simulated(job)
    assert not any(found.values("candidate"))


def test_two_ranks_that_are_late_by_turns_are_no_candidates() -> None:
    found = over(rank(10, 40, 10, 40, 10), rank(40, 10, 40, 10, 40))
    assert found.values("caused_us") == [90.0, 60.0]
    assert found.values("candidate") == [False, False]


OLD = [
    rank(10, 10, 60, kernel="ncclKernel_AllReduce"),
    rank(40, 15, 60, kernel="ncclKernel_AllReduce"),
    rank(12, 14, 10, kernel="ncclKernel_AllReduce"),
]


def test_hta_blames_who_is_late_in_most_iterations_but_not_the_last() -> None:
    found = over(*OLD, compat=Compat.HTA, num_candidates=1)
    # late: rank 1 in steps 1 and 2; step 3 is left out
    assert [(row["rank"], row["candidate"], row["late_steps"]) for row in found.rows()] == [
        (1, True, 2),
        (0, False, 0),
        (2, False, 0),
    ]
    assert found.notes == ("by the starts of ncclKernel_AllReduce on stream 20",)


def test_hta_does_not_know_the_kernels_of_newer_versions() -> None:
    found = over(*RANKS, compat=Compat.HTA)
    assert len(found) == 0
    assert "kernels called ncclKernel" in found.notes[0]


def test_hta_refuses_steps_that_it_has_not() -> None:
    with pytest.raises(ViewError, match=r"none of the steps \[3\]"):
        over(*OLD, compat=Compat.HTA, steps=3)
