import numpy as np
import pytest
from kineto_trace.decode.decoded import Submissions
from kineto_trace.model.trace import make_table
from kineto_trace.structure.attribution import attribute
from support.trace_files.op_tables import random_intervals, spans, table


def test_a_call_belongs_to_the_innermost_op_that_runs_when_it_starts() -> None:
    tables = {
        "cpu_op": spans("cpu_op", (10, 30), (12, 17), (12, 40), id=[1, 2, 3], thread=[1, 1, 2]),
        "cuda_runtime": spans("cuda_runtime", (9, 11), (10, 11), (13, 20), (17, 18), (30, 31)),
        "cuda_driver": spans("cuda_driver", (13, 14), thread=[2]),
    }
    result = attribute(tables)
    assert result["cuda_runtime"]["external_id"].tolist() == [0, 1, 2, 1, 0]
    assert result["cuda_driver"]["external_id"].tolist() == [3]


def test_an_op_comes_before_an_annotation_that_is_nearer() -> None:
    tables = {
        "cpu_op": spans("cpu_op", (10, 30), id=[1]),
        "user_annotation": spans("user_annotation", (0, 50), (15, 25), id=[2, 3]),
        "cuda_runtime": spans("cuda_runtime", (20, 21), (40, 41), (60, 61)),
    }
    assert attribute(tables)["cuda_runtime"]["external_id"].tolist() == [1, 2, 0]


def test_gpu_work_belongs_to_what_its_launch_belongs_to() -> None:
    tables = {
        "cpu_op": spans("cpu_op", (0, 10), (20, 30)),
        "cuda_runtime": spans("cuda_runtime", (5, 6), correlation=[100]),
        "cuda_driver": spans("cuda_driver", (25, 26), correlation=[101]),
        "kernel": spans("kernel", (90, 95), (40, 50), (60, 70), correlation=[101, 100, 99]),
        "gpu_memcpy": spans("gpu_memcpy", (80, 85), correlation=[100]),
    }
    result = attribute(tables)
    assert result["kernel"]["external_id"].tolist() == [2, 1, 0]
    assert result["gpu_memcpy"]["external_id"].tolist() == [1]


def test_gpu_work_belongs_to_the_op_that_submitted_it_where_its_record_says_so() -> None:
    tables = {
        "cpu_op": spans("cpu_op", (0, 10), (20, 30), (0, 40), id=[1, 2, 3], thread=[1, 1, 2]),
        "cuda_driver": spans("cuda_driver", (25, 26), correlation=[101]),
        "kernel": spans("kernel", (90, 95), (40, 50), (60, 70), (80, 81), correlation=[101, 100, 99, 98]),
    }
    submissions = Submissions(
        correlation=np.array([100, 99, 98], np.uint32),
        thread=np.array([1, 2, 1], np.uint32),
        time=np.array([5, 35, 15]),
    )
    assert attribute(tables, [submissions])["kernel"]["external_id"].tolist() == [2, 1, 3, 0]
    assert attribute(tables)["kernel"]["external_id"].tolist() == [2, 0, 0, 0]


def test_all_kernels_of_a_graph_launch_belong_to_one_op() -> None:
    tables = {
        "cpu_op": spans("cpu_op", (0, 10)),
        "cuda_runtime": spans("cuda_runtime", (5, 6), correlation=[100]),
        "kernel": spans("kernel", (40, 50), (50, 60), (60, 70), correlation=[100, 100, 100]),
    }
    assert attribute(tables)["kernel"]["external_id"].tolist() == [1, 1, 1]


def test_allocations_belong_by_thread_and_time() -> None:
    tables = {
        "cpu_op": spans("cpu_op", (0, 10)),
        "cpu_instant_event": table("cpu_instant_event", {"start": 5}, {"start": 5, "thread": 2}, {"start": 10}),
    }
    assert attribute(tables)["cpu_instant_event"]["external_id"].tolist() == [1, 0, 0]


def test_an_unfinished_op_runs_until_the_end() -> None:
    tables = {
        "cpu_op": spans("cpu_op", (0, 1), finished=[0]),
        "cuda_runtime": spans("cuda_runtime", (500, 501)),
    }
    assert attribute(tables)["cuda_runtime"]["external_id"].tolist() == [1]


def test_tables_to_which_nothing_changes_are_the_same_values() -> None:
    calls, ops = spans("cuda_runtime", (5, 6)), spans("cpu_op", (0, 10))
    assert attribute({"cuda_runtime": calls})["cuda_runtime"] is calls
    far = spans("cuda_runtime", (50, 60))
    result = attribute({"cuda_runtime": far, "cpu_op": ops})
    assert (result["cuda_runtime"] is far, result["cpu_op"] is ops) == (True, True)
    assert attribute({}) == {}


def test_ids_that_are_there_stay_where_nothing_is_found() -> None:
    calls = spans("cuda_runtime", (5, 6), (50, 51), external_id=[77, 78])
    result = attribute({"cuda_runtime": calls, "cpu_op": spans("cpu_op", (0, 10))})
    assert result["cuda_runtime"]["external_id"].tolist() == [1, 78]
    assert calls["external_id"].tolist() == [77, 78]


def test_calls_alone_are_attributed_without_gpu_work_and_gpu_work_without_calls_is_not() -> None:
    kernels = spans("kernel", (5, 6))
    assert attribute({"kernel": kernels, "cpu_op": spans("cpu_op", (0, 10))})["kernel"] is kernels


@pytest.mark.parametrize("seed", range(10))
def test_random_calls_have_the_latest_op_that_runs(seed: int) -> None:
    """Of nested ops the innermost one is the last to start; these here all nest."""
    random = np.random.default_rng(seed)
    edges = np.sort(random.choice(400, 80, replace=False))
    pairs: list[tuple[int, int]] = []
    stack: list[int] = []
    for number, edge in enumerate(edges.tolist()):
        if stack and (random.random() < 0.5 or len(stack) > 79 - number):
            pairs.append((stack.pop(), edge))
        else:
            stack.append(edge)
    ops = spans("cpu_op", *pairs)
    moments = random.integers(0, 400, 100)
    calls = spans("cuda_runtime", *((moment, moment + 1) for moment in moments.tolist()))
    found = attribute({"cpu_op": ops, "cuda_runtime": calls})["cuda_runtime"]["external_id"]
    for moment, external_id in zip(moments.tolist(), found.tolist(), strict=True):
        around = [(start, row + 1) for row, (start, end) in enumerate(pairs) if start <= moment < end]
        assert external_id == max(around, default=(0, 0))[1]


def test_random_rows_do_no_harm() -> None:
    for seed in range(20):
        calls = {name: column for name, column in random_intervals(seed, 30).items() if name not in ("finished", "id")}
        tables = {
            "cpu_op": make_table("cpu_op", 30, random_intervals(seed + 100, 30)),
            "cuda_runtime": make_table("cuda_runtime", 30, {**calls, "correlation": np.arange(30)}),
            "kernel": make_table("kernel", 30, {"correlation": np.arange(20, 50)}),
        }
        result = attribute(tables)
        expected = [*result["cuda_runtime"]["external_id"].tolist()[20:], *[0] * 20]
        assert result["kernel"]["external_id"].tolist() == expected
