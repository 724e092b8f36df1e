"""Distributed training: overlap, waiting, operations and devices, right and as the TensorBoard plug-in counts."""

from typing import Any

import pytest
from kineto_trace.analysis.distributed.distributed_views import (
    distributed_devices,
    distributed_ops,
    distributed_overlap,
    distributed_wait,
    stragglers,
)
from kineto_trace.errors import ViewError
from kineto_trace.view_api.result import Result
from kineto_trace.view_api.view import Compat, View
from support.trace_files.ranks import FIRST_CORRELATION, Event, context, event, launched, nccl, step
from support.trace_files.simulated.training_job import SimulatedJob, SimulatedRun, ddp, fsdp, simulate

KERNEL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"


def over(view: View, *ranks: list[Event], compat: Compat = Compat.NONE, **options: Any) -> Result:
    partials = [
        (rank, view.partial(context(events, rank=rank, size=len(ranks)), compat=compat, **options))
        for rank, events in enumerate(ranks)
    ]
    return view.combine(partials, compat=compat, **options)


def modern(start: float, duration: float) -> list[Event]:
    """A step of 100 us: a kernel 10..60, an all_reduce on another stream."""
    return [
        step(1, 0, 100),
        *launched("gemm", 2, 10, 50, 1),
        *launched(KERNEL, 5, start, duration, 2, stream=20, **nccl("allreduce", 1000, [0, 1], 1)),
    ]


RANK0, RANK1 = modern(40, 50), modern(70, 20)


def test_overlap_is_told_by_the_kernels_names() -> None:
    keys = ("step", "rank", "computation_us", "overlapping_us", "communication_us", "other_us")
    found = [tuple(row[key] for key in keys) for row in over(distributed_overlap, RANK0, RANK1).rows()]
    # rank 0: gemm 10..60, all_reduce 40..90
    assert found == [
        ("all", 0, 30.0, 20.0, 30.0, 20.0),
        ("all", 1, 50.0, 0.0, 20.0, 30.0),
        ("1", 0, 30.0, 20.0, 30.0, 20.0),
        ("1", 1, 50.0, 0.0, 20.0, 30.0),
    ]


def test_the_shortest_duration_of_all_ranks_is_the_transfer_and_the_rest_is_waiting() -> None:
    found = over(distributed_wait, RANK0, RANK1).rows()
    assert [tuple(row.values()) for row in found] == [
        ("all", 0, 20.0, 30.0),
        ("all", 1, 20.0, 0.0),
        ("1", 0, 20.0, 30.0),
        ("1", 1, 20.0, 0.0),
    ]


def test_operations_have_the_sizes_of_the_kernels_arguments() -> None:
    found = over(distributed_ops, RANK0, RANK1).rows()
    assert [tuple(row.values()) for row in found] == [
        (0, "all_reduce", 1, 4000, 4000.0, 50.0, 50.0, 20.0, 20.0),
        (1, "all_reduce", 1, 4000, 4000.0, 20.0, 20.0, 20.0, 20.0),
    ]


def test_devices_are_those_that_the_ranks_used() -> None:
    row = over(distributed_devices, RANK0, RANK1).rows()[1]
    assert (row["rank"], row["host"], row["process"], row["device"]) == (1, "node0", 1, 0)
    assert (row["name"], row["memory_bytes"], row["compute_capability"]) == ("NVIDIA H200", 150_000_000_000, "9.0")


def legacy(kernel_start: float, kernel_duration: float) -> list[Event]:
    """As the plug-in wants it: an operator nccl:all_reduce, and its kernel with the same external id."""
    op = {"External id": 2, "Input Dims": [[10, 4], [3]], "Input type": ["float", "c10::Half"]}
    correlation = FIRST_CORRELATION
    place = {"pid": 0, "device": 0, "context": 1}
    return [
        step(1, 0, 100),
        event("cpu_op", "aten::mm", 1, 9, **{"External id": 1}),
        event("cuda_runtime", "cudaLaunchKernel", 2, 2, correlation=correlation, **{"External id": 1}),
        event("kernel", "gemm", 10, 50, tid=7, stream=7, correlation=correlation, **place, **{"External id": 1}),
        event("cpu_op", "nccl:all_reduce", 20, 5, **op),
        event("cuda_runtime", "cudaLaunchKernel", 21, 2, correlation=correlation + 1, **{"External id": 2}),
        event(
            "kernel",
            KERNEL,
            kernel_start,
            kernel_duration,
            tid=20,
            stream=20,
            correlation=correlation + 1,
            **place,
            **{"External id": 2},
        ),
    ]


PLUGIN0, PLUGIN1 = legacy(40, 50), legacy(70, 20)


def test_the_plugin_counts_the_operators_own_time_as_communication() -> None:
    found = over(distributed_overlap, PLUGIN0, PLUGIN1, compat=Compat.PLUGIN).rows()
    # rank 0: communication 20..25 and 40..90, computation 10..60
    assert [tuple(row.values())[2:] for row in found[2:]] == [(25.0, 25.0, 30.0, 20.0), (45.0, 5.0, 20.0, 30.0)]


def test_the_plugin_waits_by_order() -> None:
    found = over(distributed_wait, PLUGIN0, PLUGIN1, compat=Compat.PLUGIN).rows()
    # the operator's range, 5 us on both, is transfer as well
    assert [tuple(row.values()) for row in found] == [
        ("all", 0, 25.0, 30.0),
        ("all", 1, 25.0, 0.0),
        ("1", 0, 25.0, 30.0),
        ("1", 1, 25.0, 0.0),
    ]


def test_the_plugin_counts_bytes_by_the_shapes_of_the_inputs() -> None:
    found = over(distributed_ops, PLUGIN0, PLUGIN1, compat=Compat.PLUGIN).rows()
    # 10 x 4 floats and 3 halves
    assert [tuple(row.values()) for row in found] == [
        (0, "nccl:all_reduce", 1, 166, 166.0, 55.0, 55.0, 25.0, 25.0),
        (1, "nccl:all_reduce", 1, 166, 166.0, 25.0, 25.0, 25.0, 25.0),
    ]


def test_the_plugin_has_no_view_if_ranks_differ_in_their_operators() -> None:
    extra = event("cpu_op", "nccl:broadcast", 90, 1, **{"External id": 7})
    found = over(distributed_wait, PLUGIN0, [*PLUGIN1, extra], compat=Compat.PLUGIN)
    assert len(found) == 0
    assert found.notes == (
        "the plug-in would not show a distributed view: the ranks differ in the number of communication operators",
    )
    gloo = event("cpu_op", "gloo:broadcast", 90, 1, **{"External id": 7})
    found = over(distributed_ops, [*PLUGIN0, gloo], [*PLUGIN1, gloo], compat=Compat.PLUGIN)
    assert "more than one communication library" in found.notes[0]
    assert "no communication operator" in over(distributed_overlap, RANK0, compat=Compat.PLUGIN).notes[0]


def test_a_collective_outside_of_all_steps_is_told() -> None:
    outside = launched(KERNEL, 200, 210, 5, 9, stream=20, **nccl("allreduce", 10, [0, 1], 2))
    found = over(distributed_wait, [*RANK0, *outside], RANK1)
    assert found.notes[-1] == "collectives outside all measured steps are not counted: 1"


def test_a_collective_that_was_launched_before_the_first_step_counts_in_the_step_in_which_it_runs() -> None:
    # the host is ahead of the GPU: what runs in step 1 was launched before the recording began
    ahead = [step(1, 100, 100), *launched(KERNEL, 5, 110, 50, 2, stream=20, **nccl("allreduce", 1000, [0, 1], 1))]
    behind = [step(1, 100, 100), *launched(KERNEL, 5, 140, 20, 2, stream=20, **nccl("allreduce", 1000, [0, 1], 1))]
    found = over(distributed_wait, ahead, behind)
    assert [tuple(row.values()) for row in found.rows()[2:]] == [("1", 0, 20.0, 30.0), ("1", 1, 20.0, 0.0)]
    assert not any("outside" in note for note in found.notes)


def test_transfers_and_waiting_are_the_communication_of_the_overlap_view() -> None:
    # a kernel that reaches into the next step counts in both for what it does there
    both = [[*rank, *launched(KERNEL, 80, 95, 40, 3, stream=20, **nccl("allreduce", 10, [0, 1], 2)), step(2, 100, 100)]
            for rank in (RANK0, RANK1)]  # fmt: skip
    waits, overlaps = over(distributed_wait, *both).rows(), over(distributed_overlap, *both).rows()
    assert [(row["step"], row["rank"], row["transfer_us"] + row["synchronizing_us"]) for row in waits] == [
        (row["step"], row["rank"], row["overlapping_us"] + row["communication_us"]) for row in overlaps
    ]


def test_a_rank_without_a_complete_step_has_no_figures_per_step() -> None:
    first, *others = modern(70, 20)
    cut: list[Event] = [{**first, "args": {"finished": False}}, *others]
    note = "rank 1 has no row: none of its steps was recorded completely"
    for view in (distributed_overlap, distributed_wait):
        found = over(view, RANK0, cut)
        assert {row["rank"] for row in found.rows()} == {0}
        assert note in found.notes


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
    found = over(stragglers, *RANKS).rows()
    # step 1: rank 1 is 28 us after rank 2; step 2: rank 2 is 20 us after rank 1; step 3: nobody is late
    assert [tuple(row.values()) for row in found] == [
        (1, True, 1, 1, 28.0, pytest.approx(35 / 3), 2.0),
        (2, True, 1, 1, 20.0, 9.0, 2.0),
        (0, False, 0, 0, 0.0, 0.0, 2.0),
    ]


def test_only_the_wanted_steps_count() -> None:
    found = over(stragglers, *RANKS, steps="2", num_candidates=1).rows()
    assert [(row["rank"], row["candidate"], row["caused_us"]) for row in found] == [
        (2, True, 20.0),
        (0, False, 0.0),
        (1, False, 0.0),
    ]
    with pytest.raises(ViewError, match=r"in the steps \[7\]; steps with collectives: \[1, 2, 3\]"):
        over(stragglers, *RANKS, steps=7)
    with pytest.raises(ViewError, match="'x' is not a list of numbers"):
        over(stragglers, *RANKS, steps="x")


def test_a_rank_alone_waits_for_nobody() -> None:
    found = over(stragglers, RANKS[0])
    assert found.values("candidate") == [False]
    assert "no collective appears on more than one rank, so it is unknown which rank waits for which" in found.notes[-1]


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
    found = over(stragglers, rank(10, 40, 10, 40, 10), rank(40, 10, 40, 10, 40))
    assert found.values("caused_us") == [90.0, 60.0]
    assert found.values("candidate") == [False, False]


OLD = [
    rank(10, 10, 60, kernel="ncclKernel_AllReduce"),
    rank(40, 15, 60, kernel="ncclKernel_AllReduce"),
    rank(12, 14, 10, kernel="ncclKernel_AllReduce"),
]


def test_hta_blames_who_is_late_in_most_iterations_but_not_the_last() -> None:
    found = over(stragglers, *OLD, compat=Compat.HTA, num_candidates=1)
    # late: rank 1 in steps 1 and 2; step 3 is left out
    assert [(row["rank"], row["candidate"], row["late_steps"]) for row in found.rows()] == [
        (1, True, 2),
        (0, False, 0),
        (2, False, 0),
    ]
    assert found.notes == ("based on the starts of ncclKernel_AllReduce on stream 20",)


def test_hta_does_not_know_the_kernels_of_newer_versions() -> None:
    found = over(stragglers, *RANKS, compat=Compat.HTA)
    assert len(found) == 0
    assert "kernels called ncclKernel" in found.notes[0]


def test_hta_refuses_steps_that_it_has_not() -> None:
    with pytest.raises(ViewError, match=r"none of the steps \[3\]"):
        over(stragglers, *OLD, compat=Compat.HTA, steps=3)
