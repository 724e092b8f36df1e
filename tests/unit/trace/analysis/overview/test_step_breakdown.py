"""Roles of moments: priority, steps, and the plug-in's restart."""

from dataclasses import replace

import numpy as np
from kineto_trace.analysis.overview.step_breakdown import ROLES, Timeline, partition, roles
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
