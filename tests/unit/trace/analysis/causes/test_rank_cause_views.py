"""Times in these traces are microseconds."""

from typing import Any

import pytest
from kineto_trace import run_views
from kineto_trace.analysis.causes.cause_views import time_causes_view
from kineto_trace.analysis.causes.rank_cause_views import rank_time_causes
from kineto_trace.model.context import Context
from kineto_trace.view_api.result import Result
from support.trace_files.traces import target, trace
from support.trace_files.training_ranks import Job, write_job

US = 1000


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
