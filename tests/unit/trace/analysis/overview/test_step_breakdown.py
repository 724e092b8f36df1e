"""Roles of moments: priority, steps, and the plug-in's restart."""

from dataclasses import replace

import numpy as np
import pytest
from kineto_trace.analysis.overview.step_breakdown import (
    ROLES,
    DeviceLaunches,
    StepRanges,
    Timeline,
    on_device,
    partition,
    roles,
)
from kineto_trace.arrays.intervals import Union, union
from kineto_trace.model.context import Context
from kineto_trace.model.trace import NO_STRING, Table
from kineto_trace.structure.activity_links import communication_kernels, gpu
from support.trace_files import traces


def intervals(*pairs: tuple[int, int]) -> Union:
    return union(np.array([low for low, _ in pairs], np.int64), np.array([high for _, high in pairs], np.int64))


def parts(steps: list[tuple[int, int]], *, restart: bool = False, **active: Union) -> list[list[int]]:
    low, high = (np.array([step[side] for step in steps], np.int64) for side in (0, 1))
    found = partition([active.get(role, intervals()) for role in ROLES], low, high, restart=restart)
    return [[int(share) for share in step] for step in found.T]


def test_each_moment_belongs_to_the_first_active_role() -> None:
    found = parts(
        [(0, 100)],
        kernel=intervals((10, 30)),
        memcpy=intervals((20, 40)),
        runtime=intervals((0, 15), (35, 50)),
        cpu_exec=intervals((0, 80)),
    )
    # kernel 10-30, memcpy 30-40, runtime 0-10 and 40-50, operators 50-80, other 80-100
    assert found == [[20, 10, 0, 0, 20, 0, 30, 20]]


def test_steps_take_their_own_part_and_may_overlap() -> None:
    kernel = intervals((0, 10), (20, 30))
    assert [row[0] for row in parts([(5, 25), (22, 50), (60, 70)], kernel=kernel)] == [10, 8, 0]
    assert [row[-1] for row in parts([(5, 25), (22, 50), (60, 70)], kernel=kernel)] == [10, 20, 10]


def test_without_events_everything_is_other() -> None:
    assert parts([(0, 7)]) == [[0, 0, 0, 0, 0, 0, 0, 7]]


def test_the_plugin_takes_the_next_role_as_a_whole_when_nothing_is_free() -> None:
    kernel, memcpy, cpu_exec = intervals((0, 100)), intervals((0, 50)), intervals((0, 90))
    found = parts([(0, 100)], restart=True, kernel=kernel, memcpy=memcpy, cpu_exec=cpu_exec)
    assert found == [[100, 50, 0, 0, 0, 0, 40, 10]]
    assert parts([(0, 100)], kernel=kernel, memcpy=memcpy, cpu_exec=cpu_exec) == [[100, 0, 0, 0, 0, 0, 0, 0]]


def test_the_plugin_has_no_other_when_the_last_role_fills_the_rest() -> None:
    assert parts([(0, 10)], restart=True, cpu_exec=intervals((0, 10))) == [[0, 0, 0, 0, 0, 0, 10, 0]]


def test_events_without_duration_change_nothing() -> None:
    timeline = Timeline([intervals((5, 5)), intervals((3, 9))])
    assert timeline.covered(1, np.array([99])).tolist() == [0]
    assert timeline.covered(2, np.array([99])).tolist() == [6]


def test_the_roles_of_events() -> None:
    trace = traces.trace(
        {
            "kernel": [
                {"name": "gemm", "start": 0, "duration": 10},
                {"name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", "start": 100, "duration": 10},
            ],
            "gpu_memcpy": [{"name": "Memcpy HtoD", "start": 200, "duration": 10}],
            "gpu_memset": [{"name": "Memset", "start": 300, "duration": 10}],
            "cuda_runtime": [{"name": "cudaLaunchKernel", "start": 500, "duration": 10}],
            "cuda_driver": [{"name": "cuLaunchKernel", "start": 505, "duration": 10}],
            "cpu_op": [{"name": "aten::mm", "start": 700, "duration": 10}],
            "user_annotation": [
                {"name": "nccl:all_to_all", "start": 400, "duration": 10},
                {"name": "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "start": 600, "duration": 10},
                {"name": "forward", "start": 705, "duration": 10},
                {"name": "ProfilerStep#3", "start": 0, "duration": 1000},
            ],
            "gpu_user_annotation": [{"name": "forward", "start": 900, "duration": 10}],
        }
    )
    found = dict(zip(ROLES, roles(Context(trace)), strict=True))
    times = {
        name: [(a - traces.START_NS, b - traces.START_NS) for a, b in zip(*role, strict=True)]
        for name, role in found.items()
    }
    assert times == {
        "kernel": [(0, 10)],
        "memcpy": [(200, 210)],
        "memset": [(300, 310)],
        "communication": [(100, 110), (400, 410)],
        "runtime": [(500, 515)],
        "dataloader": [(600, 610)],
        "cpu_exec": [(700, 715)],
    }


def test_a_kernel_whose_collective_the_file_describes_communicates() -> None:
    trace = traces.trace({"kernel": [{"name": "cross_device_reduce"}, {"name": "gemm"}]})
    table = trace.table("kernel")
    strings = (*trace.strings, '"Collective name":"allreduce","Group size":8')
    described = Table("kernel", table.columns, {"args": np.array([len(strings) - 1, NO_STRING], np.int32)})
    context = Context(replace(trace, tables={"kernel": described}, strings=strings))
    assert communication_kernels(context).tolist() == [True, False]
    assert gpu(context).communication.tolist() == [True, False]


def steps_of(*ranges: tuple[int, int]) -> StepRanges:
    low, high = (np.array([step[side] for step in ranges], np.int64) for side in (0, 1))
    return StepRanges(tuple(str(n) for n in range(len(ranges))), low, high, np.zeros(len(ranges), np.int64))


def launches_of(*rows: tuple[int, int, int, int]) -> DeviceLaunches:
    """(start and end of the call, start and end of the device event); a call at 0-0 is none."""
    columns = [np.array([row[place] for row in rows], np.int64) for place in range(4)]
    call = np.where(columns[1] > 0, np.arange(len(rows)), -1)
    return DeviceLaunches(columns[0], columns[1], call, columns[2], columns[3])


def ranges(found: StepRanges) -> list[tuple[int, int]]:
    return list(zip(found.start.tolist(), found.end.tolist(), strict=True))


def test_a_step_ends_with_what_it_launched_and_the_next_one_starts_there() -> None:
    found = on_device(steps_of((0, 100), (100, 200)), launches_of((10, 12, 50, 130), (110, 112, 140, 180)))
    assert ranges(found) == [(0, 130), (130, 200)]
    assert found.launched.tolist() == [1, 1]


def test_a_step_that_is_over_before_it_starts_has_no_length() -> None:
    found = on_device(steps_of((0, 100), (100, 200), (200, 300)), launches_of((10, 12, 50, 250), (210, 212, 260, 320)))
    assert ranges(found) == [(0, 250), (250, 250), (250, 320)]


def test_a_call_across_a_border_belongs_to_no_step() -> None:
    found = on_device(
        steps_of((0, 100), (100, 200)), launches_of((95, 105, 110, 500), (10, 11, 20, 30), (110, 111, 120, 130))
    )
    assert ranges(found) == [(0, 100), (100, 200)]


def test_the_first_step_starts_when_earlier_work_is_over() -> None:
    launched = launches_of((0, 0, 10, 40), (0, 0, 45, 60), (20, 22, 50, 90))
    assert ranges(on_device(steps_of((30, 100)), launched)) == [(30, 100)]  # its call begins before it
    launched = launches_of((0, 0, 10, 40), (0, 0, 45, 60), (32, 33, 50, 90))
    assert ranges(on_device(steps_of((30, 100)), launched)) == [(40, 100)]  # the event until 60 ends after 50


@pytest.mark.parametrize(
    ("events", "kept"),
    [((5, 4, 0), 2), ((5, 5, 4), 3), ((5, 5, 3), 2), ((5, 3, 0), 1), ((1,), 1)],
)
def test_last_steps_that_may_be_incomplete_are_dropped(events: tuple[int, ...], kept: int) -> None:
    host = steps_of(*((100 * step, 100 * step + 100) for step in range(len(events))))
    rows = [
        (100 * step + 10 + number, 100 * step + 11 + number, 100 * step + 50, 100 * step + 60)
        for step, count in enumerate(events)
        for number in range(count)
    ]
    found = on_device(host, launches_of(*rows))
    assert found.name == host.name[:kept]
    assert found.dropped == host.name[kept:]


def test_without_launches_steps_stay_as_the_host_saw_them() -> None:
    host = steps_of((0, 100), (100, 150))
    assert on_device(host, launches_of((0, 0, 10, 500))) is host
