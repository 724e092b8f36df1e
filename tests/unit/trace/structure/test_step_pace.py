"""Times in these traces are milliseconds."""

import numpy as np
import pytest
from kineto_trace.analysis.cause_views import time_causes_view
from kineto_trace.analysis.diff.diff_views import diff_kernels, diff_steps
from kineto_trace.analysis.diff.step_noise import RAN_AHEAD
from kineto_trace.analysis.distributed.rank_views import rank_step_table, rank_table
from kineto_trace.analysis.findings.finding_views import findings_view
from kineto_trace.analysis.host_time.user_calls import host_steps
from kineto_trace.analysis.idle_gaps import measured_steps
from kineto_trace.analysis.overview.overview_views import gpu_summary, overview, step_breakdown
from kineto_trace.model.context import Context
from kineto_trace.structure.step_pace import is_warm_up, step_pace
from support.trace_files.step_traces import queued

MS = 1_000_000
AHEAD = [7, 7, 5, 24]  # of the host, while the GPU takes 40 for each
STEADY = [40, 41, 39, 40, 40, 41, 39, 40]
NOTE = (
    "4 early steps are left out of means and savings, because the host ran ahead of the GPU until its queue was full: "
    "steps 7, 8, 9, 10 (10.8 ms on average; the others take 40 ms)"
)


def ran_ahead(scale: float = 1.0, *, rank: int | None = None) -> Context:
    """A program whose GPU takes 40 ms for each step, and whose host does so once the queue is full."""
    host = [*AHEAD, *(scale * length for length in STEADY)]
    return Context(queued(host, [40 * scale] * len(host), rank=rank))


@pytest.mark.parametrize(
    ("lengths", "warm_up"),
    [
        ([13000, 45, 44, 46], 1),
        ([900, 400, 45, 44, 46, 45, 44], 2),
        ([45, 44, 13000, 46, 45], 0),  # not at the beginning: a slow step is no warm-up
        ([60, 45, 44, 46], 0),  # not twice the median
        ([100, 20, 90, 25, 80, 30], 0),  # within the spread of the others
        ([13000, 45, 44], 0),  # too few others
        ([45], 0),
    ],
)
def test_first_steps_that_last_much_longer_are_warm_up(lengths: list[int], warm_up: int) -> None:
    found = is_warm_up(np.array(lengths, np.int64) * MS).tolist()
    assert found == [True] * warm_up + [False] * (len(lengths) - warm_up)


@pytest.mark.parametrize(
    ("host", "gpu", "ahead"),
    [
        ([7, 7, 5, 24, 40, 41, 39, 40], [40] * 8, 4),
        ([20, 20, 20, 40, 40, 40, 40, 40], [40] * 8, 3),
        ([300, 7, 7, 24, 40, 41, 39, 40, 40, 40], [40] * 10, 3),  # behind the step of the warm-up
        ([7, 5, 8], [40] * 3, 3),  # all of them
        ([40, 41, 39, 40, 7, 7, 40, 40], [40] * 8, 0),  # not at the beginning
        ([33, 52, 40, 44, 38, 44, 44, 44], [44] * 8, 0),  # the host varies, and gained less than half a step
        ([7, 7, 7, 40, 40, 40, 40, 40], [7, 7, 7, 40, 40, 40, 40, 40], 0),  # a phase of the program with less work
        ([7, 7, 7, 40, 40, 40, 40, 40], [3] * 8, 0),  # the GPU has little to do in any step: loading caught up
        ([5, 75, 5, 75, 5, 75, 5, 75], [40] * 8, 0),  # the program waits for the GPU in every other step
        ([5, 5, 5, 5, 180, 5, 5, 5, 5, 180, 5, 5], [40] * 12, 0),  # or in every fifth one
        ([43, 47, 41, 97, 43, 42, 42, 96], [42, 42, 42, 95, 42, 42, 42, 95], 0),  # evaluates in every fourth one
    ],
)
def test_first_steps_that_are_shorter_than_their_work_on_the_gpu_ran_ahead(
    host: list[float], gpu: list[float], ahead: int
) -> None:
    found = Context(queued(host, gpu)).get(step_pace)
    slow = int(found.slow.sum())
    assert found.ahead.tolist() == [False] * slow + [True] * ahead + [False] * (len(host) - slow - ahead)


def test_work_that_was_queued_before_the_recording_is_not_that_of_the_first_step() -> None:
    context = Context(queued(STEADY, [40] * len(STEADY), before_ms=120))
    assert not context.get(step_pace).ahead.any()


def test_without_the_gpu_no_step_is_left_out() -> None:
    trace = queued([*AHEAD, *STEADY], [40] * 12)
    for kind in ("kernel", "cuda_runtime"):
        trace.tables.pop(kind)  # type: ignore[attr-defined]
    assert Context(trace).get(step_pace).note() is None


def test_every_view_has_the_same_step_time() -> None:
    context = ran_ahead(rank=0)
    (row,) = overview(context).rows()
    assert (row["steps"], row["step_us"]) == (8, 40_000)
    assert step_breakdown(context).rows()[-1]["total_us"] == 40_000
    assert sum(row["step_us"] for row in time_causes_view(context).rows()) == pytest.approx(40_000)
    assert rank_table(context).values("step_us") == [40_000]
    assert rank_step_table(context).values("step_us") == [1000 * length for length in STEADY]
    assert diff_steps(context, ran_ahead()).rows()[0]["baseline_us"] == 40_000
    assert (context.get(measured_steps).measured_ns, context.get(host_steps).total_ns) == (320 * MS, 320 * MS)
    assert gpu_summary(context).values("utilization_pct") == [100]


def test_the_notes_say_how_many_steps_are_left_out_and_why() -> None:
    context = ran_ahead(rank=0)
    for result in (overview(context), step_breakdown(context), time_causes_view(context), findings_view(context)):
        assert NOTE in result.notes
    assert f"baseline: {NOTE}" in diff_steps(context, ran_ahead()).notes
    told = "first steps left out because they do not show the usual pace (see the view overview): 4 on rank 0"
    assert told in rank_table(context).notes


def test_left_out_steps_are_counted_if_wanted() -> None:
    rows = time_causes_view(ran_ahead(), warm_up=True).rows()
    assert sum(row["total_us"] for row in rows) == 363_000


def test_a_regression_is_seen_although_the_host_ran_ahead_in_both_traces() -> None:
    row = diff_steps(ran_ahead(), ran_ahead(1.1)).rows()[0]
    assert (row["verdict"], row["delta_pct"]) == ("slower", pytest.approx(10))


def test_gpu_work_of_the_last_steps_that_was_not_recorded_does_not_shorten_the_mean() -> None:
    result = diff_kernels(ran_ahead(), ran_ahead())
    assert result.rows()[0]["baseline_us"] == pytest.approx(40_000)
    assert RAN_AHEAD in result.notes


def test_a_host_that_ran_ahead_throughout_is_told_and_not_compared() -> None:
    context = Context(queued([7, 5, 8, 7], [40] * 4, before_ms=1))
    (row,) = overview(context).rows()
    assert (row["steps"], row["step_us"]) == (4, 6750)
    told = "the host ran ahead of the GPU in every complete step, so step lengths do not show the pace: "
    assert overview(context).notes[0].startswith(f"{told}a step takes 6.75 ms on the host and ")
    result = diff_steps(context, ran_ahead())
    assert {row["verdict"] for row in result.rows()} == {"unknown"}
    assert "no complete training steps (ProfilerStep#N) that show the program's usual pace" in result.notes[0]
    assert any(note.startswith(f"baseline: {told}") for note in result.notes)
