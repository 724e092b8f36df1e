from collections.abc import Sequence
from typing import Any

import pytest
from kineto_trace.analysis.idle_views import idle_causes, idle_gaps_view
from kineto_trace.model.context import Context
from support.trace_files.hta_events import Event, gpu, launch, op, rows
from support.trace_files.traces import START_NS, trace

COLUMNS = ("stream", "category", "idle_us", "idle_pct", "count")
US = 1000
Row = dict[str, Any]


@pytest.fixture
def events() -> list[Event]:
    # stream 7: busy [0, 10); 50 idle, launched at 30: too late; busy [60, 70); 20 idle, launched at 61: in time, short;
    # busy [90, 100); 40 idle, launched at 62: in time, long; busy [140, 150)
    starts = {1: (0, -5), 2: (60, 30), 3: (90, 61), 4: (140, 62)}
    return [
        row
        for number, (start, called) in starts.items()
        for row in (launch(number, called + 10), gpu("k", start + 10, 10, number))
    ]


def test_gaps_have_the_cause_that_the_launch_tells(events: list[Event]) -> None:
    assert rows(events, "idle_breakdown", *COLUMNS, hta=False) == [
        (7, "host_wait", 50, pytest.approx(100 * 50 / 110), 1),
        (7, "kernel_wait", 20, pytest.approx(100 * 20 / 110), 1),
        (7, "other", 40, pytest.approx(100 * 40 / 110), 1),
    ]
    assert rows(events, "idle_breakdown", *COLUMNS) == [
        (7, "host_wait", 50, 45, 1),
        (7, "kernel_wait", 20, 18, 1),
        (7, "other", 40, 36, 1),
    ]


def test_the_delay_tells_short_gaps_from_long_ones(events: list[Event]) -> None:
    found = rows(events, "idle_breakdown", "idle_us", hta=False, consecutive_kernel_delay=41)
    assert found == [(50,), (60,), (0,)]


def test_only_wanted_streams_have_rows(events: list[Event]) -> None:
    assert rows(events, "idle_breakdown", "stream", hta=False, streams=(8,)) == []


def test_hta_has_a_row_for_the_first_activity_and_none_for_empty_categories() -> None:
    assert rows([launch(1, 0), gpu("k", 5, 1, 1)], "idle_breakdown", *COLUMNS) == [(7, "other", 0, None, 0)]


def test_activities_that_overlap_leave_no_gap_but_in_hta_a_negative_one() -> None:
    # [0, 50), [10, 20), [60, 70): to HTA the gaps are -40 and 40
    events = [gpu("a", 0, 50, 1), gpu("b", 10, 10, 2), gpu("c", 60, 10, 3)]
    assert rows(events, "idle_breakdown", "category", "idle_us", hta=False)[1] == ("kernel_wait", 10)
    assert rows(events, "idle_breakdown", "category", "idle_us") == [("kernel_wait", -40), ("other", 40)]


def test_gaps_without_a_launch_are_told_of() -> None:
    from kineto_trace.catalog.view_catalog import find_view
    from support.trace_files.hta_events import context

    result = find_view("idle_breakdown")(context([gpu("a", 0, 5, 1), gpu("b", 9, 1, 2)]))
    assert result.notes == (
        "activities without a launch in the trace: 2; gaps before them count as kernel_wait or other",
    )


def test_htas_statistics_have_two_digits() -> None:
    # gaps of 1, 2 and 2 us; mean 5/3, deviation sqrt(1/3)
    events = [gpu("k", start, 1, number) for number, start in enumerate((0, 2, 5, 8), 1)]
    found = rows(events, "idle_breakdown", "category", "mean_us", "std_us")
    assert found == [("kernel_wait", 1.67, 0.58), ("other", None, None)]


def test_to_hta_mtias_events_are_kernels() -> None:
    # busy [0, 10) and [40, 50) on stream 3; the second one was launched at 20
    calls = [
        launch(number, ts, name="runFunction - job_prep_and_submit_for_execution") for number, ts in ((1, -5), (2, 20))
    ]
    work = [gpu("pe_exe", ts, 10, number, stream=3, kind="mtia_ccp_events") for number, ts in ((1, 0), (2, 40))]
    assert rows([op("first", -9, 1), *calls, *work], "idle_breakdown", "stream", "category", "idle_us") == [
        (3, "host_wait", 30),
        (3, "other", 0),
    ]


def test_hta_takes_the_files_first_event_for_the_launch_of_what_has_none() -> None:
    # the kernel at 40 has no launch; the event that the file begins with started after the gap did
    work = [gpu("k", 0, 10, 1), gpu("k", 40, 10, 2)]
    assert rows([op("first", 20, 1), *work], "idle_breakdown", "category", "idle_us")[0] == ("host_wait", 30)
    assert rows([op("first", 5, 1), *work], "idle_breakdown", "category", "idle_us") == [("other", 30)]


def kernel(start: int, end: int, correlation: int, **more: Any) -> Row:
    return {"name": "k", "start": start * US, "duration": (end - start) * US, "correlation": correlation, **more}


def call(start: int, end: int, correlation: int = 0, name: str = "cudaLaunchKernel", thread: int = 1) -> Row:
    times = {"start": start * US, "duration": (end - start) * US}
    return {"name": name, **times, "correlation": correlation, "thread": thread}


def op_row(name: str, start: int, end: int, identity: int = 1, thread: int = 1) -> Row:
    return {
        "name": name,
        "start": start * US,
        "duration": (end - start) * US,
        "thread": thread,
        "id": identity,
        "finished": 1,
    }


def context(kernels: Sequence[Row], calls: Sequence[Row], ops: Sequence[Row] = (), **more: Sequence[Row]) -> Context:
    """A trace whose window ends with its last GPU activity."""
    length = max((each["start"] + each["duration"] for each in (*kernels, *more.get("gpu_memcpy", ()))), default=0)
    return Context(trace({"kernel": kernels, "cuda_runtime": calls, "cpu_op": ops, **more}, length_ns=length))


def causes(found: Context) -> list[tuple[str, float]]:
    return [(row["cause"], row["idle_us"]) for row in idle_causes(found).rows()]


@pytest.mark.parametrize(
    ("cause", "calls", "ops"),
    [
        ("host", [call(-20, -10, 1), call(290, 295, 2)], []),
        ("queued", [call(-20, -10, 1), call(50, 60, 2)], []),
        ("queued", [call(-20, -10, 1), call(100, 110, 2)], []),
        ("unknown", [call(-20, -10, 1)], []),
        ("synchronisation", [call(-20, -10, 1), call(10, 120, 0, "cudaStreamSynchronize"), call(290, 295, 2)], []),
        ("synchronisation", [call(-20, -10, 1), call(10, 120, 0, "cudaMemcpy"), call(290, 295, 2)], []),
        ("host", [call(-20, -10, 1), call(10, 120, 0, "cudaMemcpyAsync"), call(290, 295, 2)], []),
        ("host", [call(-20, -10, 1), call(10, 90, 0, "cudaStreamSynchronize"), call(290, 295, 2)], []),
        ("host", [call(-20, -10, 1), call(10, 120, 0, "cudaEventSynchronize", thread=9), call(290, 295, 2)], []),
        ("memory", [call(-20, -10, 1), call(105, 200, 0, "cudaMalloc"), call(290, 295, 2)], []),
        ("host", [call(-20, -10, 1), call(105, 199, 0, "cudaMalloc"), call(290, 295, 2)], []),
        ("host", [call(-20, -10, 1), call(105, 250, 0, "cudaMallocAsync"), call(290, 295, 2)], []),
        (
            "data_loading",
            [call(-20, -10, 1), call(290, 295, 2)],
            [op_row("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 110, 280)],
        ),
        ("communication", [call(-20, -10, 1), call(290, 295, 2)], [op_row("gloo:all_reduce", 110, 280)]),
    ],
)
def test_a_gap_has_the_cause_of_the_activity_that_ends_it(cause: str, calls: list[Row], ops: list[Row]) -> None:
    assert causes(context(TWO, calls, ops)) == [(cause, 200.0)]


def test_a_blocking_call_of_another_launching_thread_holds_the_host_too() -> None:
    calls = [call(-20, -10, 1), call(10, 120, 0, "cudaDeviceSynchronize"), call(290, 295, 2, thread=2)]
    assert causes(context(TWO, calls)) == [("synchronisation", 200.0)]


def test_the_operator_is_that_of_the_wait_or_that_in_the_middle_or_that_of_the_launch() -> None:
    calls = [
        call(-20, -10, 1),
        call(10, 120, 0, "cudaStreamSynchronize"),
        call(290, 295, 2),
        call(590, 595, 3),
        call(380, 399, 4),
    ]
    kernels = [kernel(0, 100, 1), kernel(300, 400, 2), kernel(600, 700, 3), kernel(750, 800, 4)]
    calls[4] = call(610, 620, 4)
    ops = [op_row("aten::item", 5, 130, 1), op_row("aten::mm", 280, 296, 2), op_row("aten::slow", 401, 597, 3)]
    ops.append(op_row("aten::add", 605, 625, 4))
    rows = idle_gaps_view(context(kernels, calls, ops)).rows()
    assert [(row["cause"], row["op"]) for row in rows] == [
        ("synchronisation", "aten::item"),
        ("host", "aten::slow"),
        ("queued", "aten::add"),
    ]
    assert [row["blocking_call"] for row in rows] == ["cudaStreamSynchronize", None, None]
    assert [row["start_ns"] - START_NS for row in rows] == [100 * US, 400 * US, 700 * US]


def test_work_on_any_stream_and_copies_keep_a_gpu_busy_and_each_gpu_counts_for_itself() -> None:
    kernels = [kernel(0, 100, 1, stream=7), kernel(50, 200, 2, stream=9), kernel(300, 400, 3, stream=7)]
    kernels += [kernel(0, 10, 4, device=1), kernel(20, 30, 5, device=1)]
    copies = [{"name": "Memcpy DtoH", "start": 200 * US, "duration": 50 * US, "correlation": 6}]
    rows = idle_causes(context(kernels, [call(290, 295, 3)], gpu_memcpy=copies)).rows()
    assert [(row["device"], row["cause"], row["gaps"], row["idle_us"]) for row in rows] == [
        (0, "host", 1, 50.0),
        (1, "host", 1, 370.0),
        (1, "unknown", 1, 10.0),
    ]
    shares = [100 * 50 / 400, 100 * 370 / 400, 100 * 10 / 400]
    assert [row["window_pct"] for row in rows] == [pytest.approx(share) for share in shares]


def test_gaps_are_cut_at_the_steps_and_have_the_cause_of_the_whole_gap() -> None:
    steps = [
        {"name": f"ProfilerStep#{n}", "start": (200 + 100 * n) * US, "duration": 100 * US, "thread": 1, "id": n}
        for n in (1, 2)
    ]
    steps = [{**step, "finished": 1} for step in steps]
    kernels = [kernel(0, 100, 1), kernel(310, 350, 2), kernel(390, 450, 3), kernel(600, 700, 4)]
    calls = [call(300, 305, 2), call(380, 385, 3), call(590, 595, 4)]
    found = context(kernels, calls, user_annotation=steps)
    assert [(row["start_ns"] - START_NS, row["idle_us"], row["step"]) for row in idle_gaps_view(found).rows()] == [
        (450 * US, 50.0, 2),
        (350 * US, 40.0, 1),
        (300 * US, 10.0, 1),
    ]
    assert {row["cause"] for row in idle_gaps_view(found).rows()} == {"host"}


def test_the_time_before_the_first_and_after_the_last_activity_is_idle_too() -> None:
    steps = [{"name": "ProfilerStep#1", "start": 0, "duration": 1000 * US, "thread": 1, "finished": 1, "id": 1}]
    found = context([kernel(300, 400, 1)], [call(290, 295, 1)], user_annotation=steps)
    assert [(row["start_ns"] - START_NS, row["idle_us"], row["cause"]) for row in idle_gaps_view(found).rows()] == [
        (400 * US, 600.0, "host"),
        (0, 300.0, "host"),
    ]


def test_a_gpu_whose_work_lies_outside_of_the_steps_is_idle_all_the_time() -> None:
    steps = [{"name": "ProfilerStep#1", "start": 500 * US, "duration": 100 * US, "thread": 1, "finished": 1, "id": 1}]
    found = context([kernel(0, 100, 1)], [call(-20, -10, 1)], user_annotation=steps)
    assert causes(found) == [("host", 100.0)]


def test_a_trace_without_gpu_activity_says_so() -> None:
    found = idle_causes(context([], []))
    assert (found.rows(), found.notes) == ([], ("the trace has no GPU activity",))


def test_the_longest_gaps_come_first_and_can_be_chosen_by_cause() -> None:
    kernels = [kernel(0, 100, 1), kernel(150, 200, 2), kernel(300, 400, 3)]
    found = context(kernels, [call(140, 145, 2), call(150, 155, 3)])
    assert [row["idle_us"] for row in idle_gaps_view(found, limit=1).rows()] == [100.0]
    assert [row["idle_us"] for row in idle_gaps_view(found, cause="host").rows()] == [50.0]


TWO = [kernel(0, 100, 1), kernel(300, 400, 2)]
