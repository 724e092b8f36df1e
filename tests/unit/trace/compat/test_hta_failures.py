"""Traces at which HTA fails: a note says so, and the figures are the right ones."""

from collections.abc import Sequence
from typing import Any

from kineto_trace.catalog.view_catalog import find_view
from kineto_trace.view_api.result import Result
from kineto_trace.view_api.view import Compat
from support.trace_files.hta_events import Event, context, event, gpu, launch, op, step


def figures(events: Sequence[Event], view: str, *, hta: bool = True, **options: Any) -> Result:
    return find_view(view)(context(events), compat=Compat.HTA if hta else Compat.NONE, **options)


def failure(events: Sequence[Event], view: str, **options: Any) -> str:
    """The note, after a look at whether the figures are the right ones."""
    found = figures(events, view, **options)
    assert len(found)
    assert found.rows() == figures(events, view, hta=False, **options).rows()
    return found.notes[0]


def sequences() -> list[Event]:
    calls = [row for n in (1, 2, 3) for row in (launch(n, 10 * n), gpu("k", 10 * n + 50, 2, n))]
    return [op("aten::x", 5, 95), *calls]


def test_events_of_no_length_and_less_cannot_be_compared() -> None:
    # [200.2, 200.8] becomes 201 to 200, [199.5, 200] becomes 200 to 200: at 200 one ends, one begins
    events = [*sequences(), op("a", 200.2, 0.6), op("b", 199.5, 0.5)]
    note = failure(events, "frequent_sequences")
    assert note.startswith("HTA fails on this trace (its rounding produced events of 0 and of -1 us at the same time)")
    apart = [*sequences(), op("a", 200.2, 0.6, tid=2), op("b", 199.5, 0.5)]
    assert figures(apart, "frequent_sequences").notes == ()


def test_the_tid_of_a_thread_can_not_be_a_text_but_that_of_a_stream_can() -> None:
    events = sequences()
    for row in events:
        row["tid"] = f"stream {row['tid']}" if row["cat"] == "kernel" else row["tid"]
    assert figures(events, "frequent_sequences").notes == ()
    for row in events:
        row["tid"] = str(row["tid"]) + " thread"
    assert "some calls or operators have a thread id that is not a number" in failure(events, "frequent_sequences")


def window() -> list[Event]:
    return [step(1, 0, 100), op("aten::x", 5, 60), launch(1, 10, 5), gpu("k", 30, 40, 1)]


def test_a_path_needs_a_launch() -> None:
    assert figures(window(), "critical_path").notes[0].startswith("HTA's rules")
    assert "no call launches anything" in failure(window()[:2], "critical_path")
    assert "no call launches anything" in failure(window()[:2], "critical_path_breakdown")


def test_a_path_needs_calls_of_the_categories_that_hta_knows() -> None:
    events = [{**row, "cat": "Runtime"} if row["cat"] == "cuda_runtime" else row for row in window()]
    assert "a call that launched a kernel is not in its graph" in failure(events, "critical_path")


def test_a_kernel_of_two_calls_breaks_the_path_if_steps_are_dropped() -> None:
    # HTA joins kernels and calls where it drops the last of two steps: the kernel is there once per call
    calls = [launch(1, 10, 5), launch(1, 20, 5), gpu("k", 30, 40, 1)]
    events = [step(1, 0, 100), op("aten::x", 5, 60), *calls]
    assert figures(events, "critical_path").notes[0].startswith("HTA's rules")
    found = figures([*events, step(2, 100, 50)], "critical_path")
    assert "a kernel launched by several calls appears several times" in found.notes[0]
    right = figures(events, "critical_path", hta=False)
    assert found.values("duration_us") == right.values("duration_us")


def test_an_annotation_that_is_not_there_is_an_error_all_the_same() -> None:
    import pytest
    from kineto_trace.errors import ViewError

    with pytest.raises(ViewError, match="no instance 0 of 'epoch'"):
        figures(window(), "critical_path", annotation="epoch")


def test_without_steps_there_are_no_stragglers() -> None:
    found = figures([op("a", 0, 5)], "stragglers")
    assert (len(found), found.notes) == (0, ("HTA fails here: the traces have no steps (ProfilerStep#N)",))


def test_only_categories_that_hta_spells_so_are_kernels_in_idle_time() -> None:
    def idle(category: str) -> int:
        work = [gpu("k", ts, 10, n, kind=category) for n, ts in ((1, 0), (2, 40))]
        return len(figures([op("first", -9, 1), *work], "idle_breakdown"))

    assert [idle(category) for category in ("kernel", "Kernel", "KERNEL", "Memset")] == [1, 1, 0, 1]


def test_only_annotations_of_its_spelling_count_to_hta() -> None:
    events = [op("first", 0, 1), *(event(cat, "fwd", 0, 9) for cat in ("user_annotation", "User_Annotation"))]
    assert figures(events, "gpu_annotations", on="cpu").values("count") == [1]
    assert figures(events, "gpu_annotations", on="cpu", hta=False).values("count") == [2]


def test_launches_that_share_a_correlation_have_no_queue_in_hta() -> None:
    # without steps nothing is dropped: to the two calls HTA joins one kernel each, of which there is one
    events = [op("first", 0, 1), launch(1, 2), launch(1, 4), gpu("k", 9, 1, 1)]
    assert "several launches have the same correlation id" in failure(events, "queue_length")
    assert "several launches have the same correlation id" in failure(events, "queue_length_summary")
    assert "several launches" in failure(events, "blocked_on_full_queue", max_queue_length=1)
