"""What the time of traces without GPU activity went to."""

from typing import Any

import pytest
from kineto_trace import run_views
from kineto_trace.analysis.cause_views import HOST_CAUSES, OF_THE_HOST, host_causes, rank_time_causes, time_causes_view
from kineto_trace.model.context import Context
from kineto_trace.view_api.result import Result
from support.trace_files.sampled_stacks import FORWARD, MAIN, sampled
from support.trace_files.traces import target, trace
from support.trace_files.training_ranks import Job, write_job

MS = 1_000_000
SAVES = (*MAIN, "/job/a.py(3): save")
US = 1000


def op(name: str, start_ms: int, end_ms: int, **values: int) -> dict[str, Any]:
    return {"name": name, "start": start_ms * MS, "duration": (end_ms - start_ms) * MS, "thread": 1, **values}


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


def rank(number: int, *kernels: tuple[str, int, int], steps: tuple[int, ...] = (1000,)) -> Context:
    """Kernels (name, start, end), in steps of these lengths."""
    rows: dict[str, list[dict[str, Any]]] = {
        "kernel": [{"name": name, "start": a * US, "duration": (b - a) * US} for name, a, b in kernels]
    }
    ends = [sum(steps[: n + 1]) for n in range(len(steps))]
    rows["user_annotation"] = [
        {"name": f"ProfilerStep#{n}", "start": (end - length) * US, "duration": length * US, "id": n + 1, "finished": 1}
        for n, (length, end) in enumerate(zip(steps, ends, strict=True))
    ]
    return Context(trace(rows, target=target(rank=number), length_ns=sum(steps) * US), rank=number)


def over(*contexts: Context, **options: Any) -> Result:
    partials = [(context.rank, rank_time_causes.partial(context)) for context in contexts]
    return rank_time_causes.combine(partials, **options)


def test_the_causes_of_all_ranks_sum_to_the_whole_and_name_the_ranks_with_most_and_least() -> None:
    contexts = [rank(0, ("sgemm", 0, 900)), rank(1, ("sgemm", 0, 500)), rank(2, ("sgemm", 0, 700))]
    rows = {row["cause"]: row for row in over(*contexts).rows()}
    assert sum(row["share_pct"] for row in rows.values()) == pytest.approx(100)
    row = rows["matrix_products"]
    assert (row["share_pct"], row["step_us"], row["total_us"]) == (pytest.approx(70), 700, 2100)
    assert (row["least_pct"], row["least_rank"], row["most_pct"], row["most_rank"]) == (50, 1, 90, 0)
    assert row["meaning"] == "GPU computes: matrix products, convolutions, attention"


def test_a_rank_s_share_is_of_its_own_time_however_long_it_took() -> None:
    (row, *_) = over(rank(0, ("sgemm", 0, 1000)), rank(1, ("sgemm", 0, 1500), steps=(3000,))).rows()
    others = {row["cause"]: row for row in over(rank(1, ("sgemm", 0, 1500), steps=(3000,))).rows()}
    assert (row["share_pct"], row["most_pct"], row["least_pct"]) == (62.5, 100, 50)
    assert others["matrix_products"]["share_pct"] == 50


def test_small_causes_are_one_row_only_if_they_are_small_on_every_rank() -> None:
    contexts = [rank(0, ("sgemm", 0, 995), ("softmax", 995, 1000)), rank(1, ("sgemm", 0, 900), ("Memset", 900, 1000))]
    assert {row["cause"] for row in over(*contexts).rows()} == {"matrix_products", "other_kernels"}
    contexts = [rank(0, ("sgemm", 0, 995), ("softmax", 995, 1000)), rank(1, ("sgemm", 0, 1000))]
    (_, row) = over(*contexts, least=1.0).rows()
    assert (row["cause"], row["share_pct"], row["most_pct"], row["least_pct"]) == ("other_kernels", 0.25, 0.5, 0)


def test_a_rank_without_gpu_activity_is_named_and_counts_for_nothing() -> None:
    found = over(rank(0, ("sgemm", 0, 1000)), rank(1))
    assert [(row["cause"], row["least_rank"]) for row in found.rows()] == [("matrix_products", 0)]
    assert found.notes == ("rank 1: the trace has no GPU activity",)
    assert (len(over(rank(1))), over(rank(1)).notes) == (0, ("rank 1: the trace has no GPU activity",))


def test_it_is_the_sum_of_what_each_rank_has(tmp_path: Any) -> None:
    paths = write_job(tmp_path, Job(ranks=4, per_host=2, steps=3, layers=2, slow={3: 1.3}))
    each, together = run_views([time_causes_view.name, rank_time_causes.name], paths)
    total: dict[str, float] = {}
    for row in each.rows():
        total[row["cause"]] = total.get(row["cause"], 0.0) + row["total_us"]
    assert {row["cause"]: row["total_us"] for row in together.rows()} == pytest.approx(total)
    products = next(row for row in together.rows() if row["cause"] == "matrix_products")
    assert products["most_rank"] == 3


OPS = [
    op("aten::linear", 20, 30, sequence=7, torch_thread=1),
    op("autograd::engine::evaluate_function: LinearBackward0", 60, 65, sequence=7, forward_thread=1),
]
ANNOTATIONS = [
    op("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 10),
    op("Optimizer.step#SGD.step", 80, 90),
]
