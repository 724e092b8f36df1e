import pytest
from support.trace_files.hta_events import Event, gpu, launch, op, rows

COLUMNS = ("stream", "category", "idle_us", "idle_pct", "count")


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
    assert result.notes == ("2 activities have no launch in the trace; their gaps count as kernel_wait or other",)


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
