"""Where threads stand, and which processes and threads stand in the same place."""

from collections.abc import Sequence

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl.output.stack_groups import (
    ReadProcess,
    StackGroup,
    does,
    gpu_does,
    gpus_do,
    grouped,
    is_idle,
    other_threads,
    place,
    stands,
)
from support.service import stacks
from support.service.stacks import at_lock, frame, gpu, in_collective, library, on_gpu, read, running, thread


def groups(*found: pb.ProcessStacks) -> list[StackGroup]:
    return grouped([ReadProcess(stacks=each) for each in found])


def ranks(found: Sequence[StackGroup]) -> list[list[int | None]]:
    return [[each.rank for each in group.members] for group in found]


def test_a_stack_stands_at_its_innermost_frame_of_the_program() -> None:
    inner, outer = library("get", 171, "utils/data/x.py"), frame("next_batch", 6)
    assert place(thread("", pb.WAIT_QUEUE, inner, outer, frame("main", 20))) == outer
    assert place(thread("", pb.WAIT_QUEUE, inner)) == inner
    assert place(thread()) is None
    assert stands(thread("waits", pb.WAIT_QUEUE, inner)) == "waits in get (torch/utils/data/x.py:171)"


def test_what_a_thread_does_is_told_without_the_daemon_s_words_too() -> None:
    assert does(thread("reads x", pb.WAIT_FILE)) == "reads x"
    assert does(thread("", pb.WAIT_NONE)) == "runs"
    assert does(thread("", pb.WAIT_UNSPECIFIED, state=pb.THREAD_STATE_UNINTERRUPTIBLE)) == "waits in the kernel"
    assert does(pb.ThreadStack()) == "is in an unknown state"


WAITS = "is busy without floating-point work or memory traffic, as when a kernel waits"


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (gpu(graphics_active=0.01), "is idle"),
        (gpu(graphics_active=1.0, tensor_active=0.0, fp32_active=0.001, dram_active=0.0), WAITS),
        (gpu(graphics_active=1.0, tensor_active=0.4, dram_active=0.1), "is busy 100 % of the time"),
        (gpu(graphics_active=0.5, tensor_active=0.0), "is busy 50 % of the time"),
        (gpu(graphics_active=1.0), "is busy 100 % of the time"),
        (pb.GpuSample(works=True, utilization=1.0, memory_utilization=0.0), WAITS),
        (pb.GpuSample(works=True, utilization=1.0, memory_utilization=0.3), "is busy 100 % of the time"),
        (pb.GpuSample(works=True, utilization=0.0, xid_errors={79: 1, 31: 2}), "is idle, with Xid 31, 79 reported"),
        (pb.GpuSample(works=False), "is not responding (it has fallen off the bus or must be reset)"),
        (pb.GpuSample(works=True), ""),
    ],
)
def test_a_gpu_that_waits_is_told_from_one_that_computes(sample: pb.GpuSample, words: str) -> None:
    assert gpu_does(sample) == words


def test_a_gpu_of_several_processes_counts_once_on_each_host() -> None:
    found = [
        read(on_gpu(), rank, gpus=[gpu(rank % 2), pb.GpuSample(works=True, gpu=pb.Gpu(index=9))]) for rank in range(4)
    ]
    hosts = ("a", "a", "a", "b")
    done = gpus_do(ReadProcess(stacks=each, host=host) for each, host in zip(found, hosts, strict=True))
    assert {text: [each.gpu.index for each in gpus] for text, gpus in done.items()} == {"is idle": [0, 1, 1]}


def test_the_smallest_group_comes_first_and_then_the_lowest_rank() -> None:
    found = groups(*stacks.hanging(late=5), read(running(), 8), read(None, 9))
    assert ranks(found) == [[5], [8], [0, 1, 2, 3, 4, 6, 7], [9]]
    assert [group.main is None for group in found] == [False, False, False, True]


def test_of_two_ranks_the_one_that_the_other_waits_for_comes_first() -> None:
    assert ranks(groups(read(in_collective(), 0), read(at_lock(), 1))) == [[1], [0]]
    assert ranks(groups(read(thread("waits for the GPU", pb.WAIT_GPU, frame("step", 3)), 0), read(running(), 1))) == [
        [1],
        [0],
    ]


def test_a_group_has_the_same_frames_and_the_same_wait() -> None:
    waits_otherwise = at_lock()
    waits_otherwise.wait, waits_otherwise.waits = pb.WAIT_SLEEP, "sleeps"
    other_caller = at_lock()
    other_caller.frames[1].line = 21
    found = groups(*(read(main, rank) for rank, main in enumerate([at_lock(), waits_otherwise, other_caller])))
    assert ranks(found) == [[0], [1], [2]]
    assert all(group.alike for group in found)


def test_where_that_gives_many_groups_the_place_and_the_wait_are_enough() -> None:
    mains = [at_lock() for _ in range(6)]
    for line, main in enumerate(mains):
        main.frames[1].line = line + 1
    found = groups(*(read(main, rank) for rank, main in enumerate([*mains, in_collective(), in_collective("barrier")])))
    assert ranks(found) == [[6], [7], [0, 1, 2, 3, 4, 5]]
    assert [group.alike for group in found] == [True, True, False]


@pytest.mark.parametrize(
    ("one", "idle"),
    [
        (thread("", pb.WAIT_QUEUE, library("get", 1, "x.py")), True),
        (thread("", pb.WAIT_EVENTS), True),
        (thread("", pb.WAIT_UNSPECIFIED), True),
        (thread("", pb.WAIT_SLEEP), True),  # a thread of a library that knows no Python
        (thread("", pb.WAIT_SLEEP, library("poll", 1, "x.py")), False),
        (thread("", pb.WAIT_QUEUE, library("get", 1, "x.py"), frame("worker", 3)), False),
        (thread("", pb.WAIT_GIL, library("get", 1, "x.py")), False),
        (thread("", pb.WAIT_NONE), False),
        (thread("", pb.WAIT_KERNEL), False),
    ],
)
def test_a_thread_that_waits_for_work_in_code_of_libraries_is_idle(one: pb.ThreadStack, idle: bool) -> None:
    assert is_idle(one) == idle


def test_other_threads_that_stand_alike_are_one_item_and_idle_ones_are_apart() -> None:
    pool = [thread("waits for a queue", pb.WAIT_QUEUE, frame("worker", 3), number=number) for number in (5, 6)]
    idle = thread("waits for events", pb.WAIT_EVENTS, number=7)
    (group,) = groups(*(read(at_lock(), rank, *pool, idle) for rank in (0, 1)))
    found = [[[each.thread for each in threads] for threads in kind] for kind in other_threads(group)]
    assert found == [[[5, 6, 5, 6]], [[7, 7]]]
