"""Latency of annotations by percentile."""

import pytest
from kineto_trace.analysis.gpu_time.latency_views import annotation_latency
from kineto_trace.model.context import Context
from support.trace_files import traces


def requests(count: int = 100) -> list[dict[str, int | str]]:
    """One every 10 µs, the first one with 1 ns, the last one with `count`."""
    return [
        {"name": f"request#{at}", "start": 10_000 * at, "duration": 1_000 * (at + 1), "finished": 1}
        for at in range(count)
    ]


def test_requests_with_numbers_are_one_row_with_percentiles() -> None:
    context = Context(
        traces.trace(
            {"user_annotation": [{**each, "thread": at} for at, each in enumerate(requests())]}, length_ns=10**9
        )
    )
    (row,) = annotation_latency(context).rows()
    assert (row["name"], row["count"]) == ("request", 100)
    assert [row[name] for name in ("p50_us", "p90_us", "p99_us", "max_us")] == pytest.approx([50.5, 90.1, 99.01, 100])
    assert row["mean_gpu_us"] is None


def test_latency_lasts_to_the_end_of_the_gpu_work_of_all_inner_annotations() -> None:
    context = Context(
        traces.trace(
            {
                "user_annotation": [
                    {"name": "batch", "start": 0, "duration": 10_000, "finished": 1},
                    {"name": "model", "start": 1_000, "duration": 5_000, "finished": 1},
                    {"name": "empty", "start": 2_000, "duration": 100, "finished": 1},
                ],
                "cuda_runtime": [{"name": "cudaLaunchKernel", "start": 1_500, "duration": 100, "correlation": 1}],
                "kernel": [{"name": "k", "start": 20_000, "duration": 30_000, "correlation": 1}],
            }
        )
    )
    rows = {row["name"]: row for row in annotation_latency(context).rows()}
    assert list(rows) == ["batch", "model", "empty"]
    assert [row["p50_us"] for row in rows.values()] == [50, 49, 0.1]
    assert [row["mean_host_us"] for row in rows.values()] == [10, 5, 0.1]
    assert [row["mean_gpu_us"] for row in rows.values()] == [30, 30, 0]


def test_annotations_that_were_open_at_the_end_do_not_count() -> None:
    cut = {"name": "batch", "start": 0, "duration": 1_000_000}
    assert annotation_latency(Context(traces.trace({"user_annotation": [cut]}))).rows() == []


def test_a_trace_without_annotations_says_so() -> None:
    assert annotation_latency(Context(traces.trace({}))).notes == ("there are no annotations on the CPU in the trace",)
