"""Distributed training: overlap, waiting, operations and devices, right and as the TensorBoard plug-in counts."""

from kineto_trace.analysis.distributed.distributed_views import (
    distributed_devices,
    distributed_ops,
    distributed_overlap,
    distributed_wait,
)
from kineto_trace.view_api.result import Result
from kineto_trace.view_api.view import Compat, View
from support.trace_files.ranks import FIRST_CORRELATION, Event, context, event, launched, nccl, step

KERNEL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"


def over(view: View, *ranks: list[Event], compat: Compat = Compat.NONE) -> Result:
    partials = [
        (rank, view.partial(context(events, rank=rank, size=len(ranks)), compat=compat))
        for rank, events in enumerate(ranks)
    ]
    return view.combine(partials, compat=compat)


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
    assert found.notes[-1] == "1 collectives ran outside of all measured steps and are not counted"


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
    note = "rank 1 has no row: its recording began or ended in each of its steps"
    for view in (distributed_overlap, distributed_wait):
        found = over(view, RANK0, cut)
        assert {row["rank"] for row in found.rows()} == {0}
        assert note in found.notes
