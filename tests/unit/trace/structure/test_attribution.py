import numpy as np
import pytest
from kineto_trace.decode.decoded import Submissions
from kineto_trace.model.trace import Table, make_table
from kineto_trace.structure.attribution import attribute, gpu_annotations
from support.trace_files.op_tables import random_intervals, spans, table

NAMES = ("start", "duration", "name", "device", "stream", "external_id")


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


def rows(result: Table) -> list[tuple[int, ...]]:
    """Sorted by annotation, device and stream."""
    columns = [result[name].tolist() for name in NAMES]
    return sorted(zip(*columns, strict=True), key=lambda row: (row[5], row[3], row[4]))


def parts() -> dict[str, Table]:
    """A step with an optimizer in it; one kernel before, two inside, one after it, and one outside of all."""
    return {
        "user_annotation": spans("user_annotation", (0, 100), (40, 60), id=[1, 2], name=[11, 12]),
        "cuda_runtime": spans("cuda_runtime", *((at, at + 1) for at in (10, 45, 50, 70, 200)), correlation=range(1, 6)),
        "kernel": spans(
            "kernel",
            (20, 30),
            (50, 55),
            (60, 90),
            (95, 99),
            (300, 310),
            correlation=range(1, 6),
            stream=[7, 7, 8, 7, 7],
        ),
    }


def test_the_innermost_annotation_has_a_span_on_each_stream_that_it_used() -> None:
    assert rows(gpu_annotations(parts())) == [
        (20, 79, 11, 0, 7, 1),
        (50, 5, 12, 0, 7, 2),
        (60, 30, 12, 0, 8, 2),
    ]


def test_devices_are_apart_and_copies_count() -> None:
    tables = {
        "user_annotation": spans("user_annotation", (0, 100)),
        "cuda_runtime": spans("cuda_runtime", (10, 11), correlation=[1]),
        "kernel": spans("kernel", (20, 30), (40, 50), correlation=[1, 1], device=[0, 1]),
        "gpu_memcpy": spans("gpu_memcpy", (60, 70), correlation=[1], stream=[7]),
    }
    assert rows(gpu_annotations(tables)) == [(20, 50, 0, 0, 7, 1), (40, 10, 0, 1, 7, 1)]


def test_launches_of_other_threads_do_not_count() -> None:
    tables = {**parts(), "user_annotation": spans("user_annotation", (0, 100), thread=[9])}
    assert rows(gpu_annotations(tables)) == []


def test_missing_parts_give_no_rows() -> None:
    for missing in parts():
        rest = {kind: found for kind, found in parts().items() if kind != missing}
        assert len(gpu_annotations(rest)) == 0
        assert len(gpu_annotations({**rest, missing: table(missing)})) == 0
