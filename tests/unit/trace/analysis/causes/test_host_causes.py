"""What the time of traces without GPU activity went to."""

from typing import Any

import pytest
from kineto_trace.analysis.causes.cause_views import OF_THE_HOST, time_causes_view
from kineto_trace.analysis.causes.host_causes import HOST_CAUSES, host_causes
from kineto_trace.analysis.causes.rank_cause_views import rank_time_causes
from kineto_trace.model.context import Context
from support.trace_files.sampled_stacks import FORWARD, MAIN, sampled
from support.trace_files.traces import trace

MS = 1_000_000
SAVES = (*MAIN, "/job/a.py(3): save")


def op(name: str, start_ms: int, end_ms: int, **values: int) -> dict[str, Any]:
    return {"name": name, "start": start_ms * MS, "duration": (end_ms - start_ms) * MS, "thread": 1, **values}


OPS = [
    op("aten::linear", 20, 30, sequence=7, torch_thread=1),
    op("autograd::engine::evaluate_function: LinearBackward0", 60, 65, sequence=7, forward_thread=1),
]
ANNOTATIONS = [
    op("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 10),
    op("Optimizer.step#SGD.step", 80, 90),
]


def training() -> Context:
    """One step of 100 ms, whose code saves something at 30 to 60 ms."""
    return sampled([FORWARD] * 3 + [SAVES] * 3 + [FORWARD] * 4, ops=OPS, annotations=ANNOTATIONS)


def test_the_parts_of_the_host_s_steps_sum_to_the_whole() -> None:
    result = time_causes_view(training())
    rows = result.rows()
    assert {row["cause"]: row["step_us"] / 1000 for row in rows} == {
        "host_other": 65,
        "host_loading": 10,
        "host_forward": 10,
        "host_optimizer": 10,
        "host_backward": 5,
    }
    assert sum(row["share_pct"] for row in rows) == pytest.approx(100)
    assert {row["cause"] for row in rows} == set(HOST_CAUSES)
    assert {row["device"] for row in rows} == {None}
    assert result.notes == (OF_THE_HOST,)


def test_the_program_s_own_code_is_shown_by_the_line_with_most_of_it() -> None:
    first = time_causes_view(training()).rows()[0]
    assert (first["cause"], first["what"]) == ("host_other", "save (/job/a.py:42)")


def test_small_parts_are_one_row() -> None:
    rows = time_causes_view(training(), least=10.5).rows()
    assert [(row["cause"], row["share_pct"]) for row in rows] == [("host_other", 65), ("others", 35)]


def test_with_gpu_activity_it_is_the_gpu_s_time_that_is_told() -> None:
    rows = {"cpu_op": [op("aten::mm", 0, 5)], "kernel": [{"name": "sgemm", "start": 0, "duration": 5 * MS}]}
    context = Context(trace(rows, length_ns=10 * MS))
    assert host_causes(context).causes == ()
    assert {row["device"] for row in time_causes_view(context).rows()} == {0}


def test_a_job_without_gpus_has_the_parts_of_all_its_hosts() -> None:
    partials = [(number, rank_time_causes.partial(training())) for number in (0, 1)]
    found = rank_time_causes.combine(partials)
    assert sum(row["share_pct"] for row in found.rows()) == pytest.approx(100)
    assert (found.rows()[0]["cause"], found.rows()[0]["what"]) == ("host_other", "save (/job/a.py:42)")
    assert found.notes == (OF_THE_HOST,)


def test_ranks_without_a_gpu_do_not_count_beside_ranks_with_one() -> None:
    rows = {"kernel": [{"name": "sgemm", "start": 0, "duration": 5 * MS}]}
    partials = [
        (0, rank_time_causes.partial(training())),
        (1, rank_time_causes.partial(Context(trace(rows, length_ns=5 * MS)))),
    ]
    found = rank_time_causes.combine(partials)
    assert [row["cause"] for row in found.rows()] == ["matrix_products"]
    assert found.notes == ("rank 0: the trace has no GPU activity",)
