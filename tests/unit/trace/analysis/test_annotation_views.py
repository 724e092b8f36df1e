import pytest
from kineto_trace.analysis.annotation_views import annotation_latency
from kineto_trace.catalog.view_catalog import find_view
from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from kineto_trace.view_api.view import Compat
from support.trace_files import traces
from support.trace_files.hta_events import Event, context, event, gpu, launch, rows

TIMES = ("name", "count", "sum_us", "max_us", "min_us", "mean_us")


def annotation(name: str, ts: float, dur: float, stream: int = 7) -> Event:
    return event("gpu_user_annotation", name, ts, dur, 0, stream)


@pytest.fixture
def events() -> list[Event]:
    found = [event("user_annotation", "fwd", 0, 10), event("user_annotation", "fwd", 20, 30)]
    return [*found, annotation("fwd", 5, 40), annotation("opt", 60, 8)]


@pytest.mark.parametrize("hta", [False, True])
def test_annotations_have_their_times_on_gpu_and_cpu(events: list[Event], hta: bool) -> None:
    assert rows(events, "gpu_annotations", *TIMES, hta=hta) == [("fwd", 1, 40, 40, 40, 40), ("opt", 1, 8, 8, 8, 8)]
    assert rows(events, "gpu_annotations", *TIMES, hta=hta, on="cpu") == [("fwd", 2, 40, 30, 10, 20)]


@pytest.mark.parametrize("hta", [False, True])
def test_names_of_the_allowlist_are_never_others(events: list[Event], hta: bool) -> None:
    assert rows(events, "gpu_annotations", "name", hta=hta, num_kernels=1)[-1] == ("others",)
    found = rows(events, "gpu_annotations", "name", hta=hta, num_kernels=1, allowlist=("op",))
    assert ("opt",) in found


def test_annotations_are_on_the_gpu_or_the_cpu() -> None:
    with pytest.raises(ViewError, match="use one of gpu, cpu"):
        rows([], "gpu_annotations", "name", hta=False, on="tpu")


def test_a_kernel_is_of_the_innermost_annotation_around_its_launch() -> None:
    events = [
        event("user_annotation", "step", 0, 50),
        event("user_annotation", "fwd", 0, 10),
        *(launch(1, 5), gpu("a", 20, 10, 1), launch(2, 15), gpu("b", 32, 10, 2), gpu("c", 43, 1, 3)),
        *(annotation("step", 20, 30), annotation("fwd", 20, 13)),
    ]
    columns = ("name", "annotation")
    found = rows(events, "kernels_with_annotations", *columns, hta=False)
    assert found == [("a", "fwd"), ("b", "step"), ("c", "step")]  # c has no launch: the shortest that overlaps
    assert rows(events, "kernels_with_annotations", *columns) == [("a", "fwd"), ("b", "fwd"), ("c", "step")]


@pytest.mark.parametrize(("at", "annotation_of"), [(0, None), (6, "fwd"), (20, None)])
def test_hta_annotates_activities_of_0_us_inside_of_annotations(at: float, annotation_of: str | None) -> None:
    found = rows([gpu("a", at, 0, 1), annotation("fwd", 0, 20)], "kernels_with_annotations", "annotation")
    assert found == [(annotation_of,)]


def test_hta_gives_kernels_of_other_streams_with_the_same_times_the_same_annotation() -> None:
    events = [gpu("a", 5, 3, 1), gpu("b", 5, 3, 2, stream=9), gpu("c", 5, 4, 3, stream=9), annotation("fwd", 0, 20)]
    found = rows(events, "kernels_with_annotations", "name", "annotation")
    assert found == [("a", "fwd"), ("b", "fwd"), ("c", None)]


def test_hta_fails_on_kernels_that_end_before_they_start() -> None:
    events = [gpu("a", 5.5, 0.3, 1), gpu("b", 7, 3, 2), annotation("fwd", 0, 20)]
    result = find_view("kernels_with_annotations")(context(events), compat=Compat.HTA)
    assert result.values("annotation") == [None, "fwd"]
    assert result.notes == ("HTA fails on this trace: its rounding makes some activities end before they start",)


@pytest.mark.parametrize("hta", [False, True])
def test_without_annotations_there_are_none(hta: bool) -> None:
    assert rows([gpu("a", 5, 3, 1)], "gpu_annotations", "name", hta=hta) == []
    found = rows([gpu("a", 5, 3, 1)], "kernels_with_annotations", "annotation", hta=hta)
    assert found == ([] if hta else [(None,)])


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
