import pytest
from support.trace_files.hta_events import Event, event, gpu, launch, rows

SERIES = ("stream", "time_us", "queue_length")
SUMMARY = ("stream", "count", "mean", "std", "min", "p25", "p50", "p75", "max", "time_mean")


@pytest.fixture
def events() -> list[Event]:
    # stream 7: launches at 0 and 2, starts at 10 and 30; stream 9: launch at 4, start at 6
    return [
        *(launch(1, 0), launch(2, 2), launch(3, 4)),
        *(gpu("k", 10, 5, 1), gpu("k", 30, 5, 2), gpu("k", 6, 5, 3, stream=9)),
    ]


@pytest.mark.parametrize("hta", [False, True])
def test_a_queue_grows_with_launches_and_shrinks_with_starts(events: list[Event], hta: bool) -> None:
    assert rows(events, "queue_length", *SERIES, hta=hta) == [
        (7, 0, 1),
        (7, 2, 2),
        (7, 10, 1),
        (7, 30, 0),
        (9, 4, 1),
        (9, 6, 0),
    ]


@pytest.mark.parametrize("hta", [False, True])
def test_the_summary_counts_each_change_once_and_weighs_time_as_well(events: list[Event], hta: bool) -> None:
    # values 1, 2, 1, 0; over time (2 * 1 + 8 * 2 + 20 * 1) / 30
    first = rows(events, "queue_length_summary", *SUMMARY, hta=hta)[0]
    assert first == (7, 4, 1, pytest.approx((2 / 3) ** 0.5), 0, 0.75, 1, 1.25, 2, pytest.approx(38 / 30))


def test_a_graph_launch_adds_all_its_kernels_but_not_to_hta() -> None:
    events = [launch(1, 0, name="cudaGraphLaunch"), gpu("k", 5, 1, 1), gpu("k", 8, 1, 1)]
    assert [row[2] for row in rows(events, "queue_length", *SERIES, hta=False)] == [1, 2, 1, 0]
    assert rows(events, "queue_length", *SERIES) == []


def test_a_launch_and_a_start_at_one_time_make_no_negative_queue() -> None:
    events = [gpu("k", 5, 1, 1), launch(1, 5)]
    assert [row[2] for row in rows(events, "queue_length", *SERIES, hta=False)] == [1, 0]


def test_an_activity_that_starts_before_its_launch_makes_no_negative_queue() -> None:
    events = [launch(1, 9), gpu("k", 5, 1, 1), launch(2, 10), gpu("k", 12, 1, 2)]
    assert rows(events, "queue_length", *SERIES, hta=False) == [(7, 0, 1), (7, 0, 0), (7, 5, 1), (7, 7, 0)]


def test_a_full_queue_blocks_as_long_as_it_is_full(events: list[Event]) -> None:
    columns = ("stream", "blocked_us", "blocked_pct")
    found = rows(events, "blocked_on_full_queue", *columns, hta=False, max_queue_length=2)
    assert found == [(7, 8, pytest.approx(100 * 8 / 35))]  # the trace is [0, 35)
    assert rows(events, "blocked_on_full_queue", *columns, max_queue_length=2) == [
        (7, 8, pytest.approx(100 * 8 / 30))  # to HTA it ends at the last start
    ]


def test_hta_tells_only_of_the_last_stream_that_was_full(events: list[Event]) -> None:
    found = rows(events, "blocked_on_full_queue", "stream", hta=False, max_queue_length=1)
    assert found == [(7,), (9,)]
    assert rows(events, "blocked_on_full_queue", "stream", max_queue_length=1) == [(9,)]


def test_activities_without_a_launch_are_not_counted_but_told_of() -> None:
    from kineto_trace.catalog.view_catalog import find_view
    from support.trace_files.hta_events import context

    result = find_view("queue_length")(context([gpu("k", 5, 1, 1), event("cpu_op", "a", 0, 1)]))
    assert len(result) == 0
    assert result.notes == ("1 GPU activities have no launch in the trace and are not counted",)


def test_hta_does_not_count_a_launch_of_what_stands_first_in_the_file() -> None:
    events = [gpu("k", 5, 1, 1), launch(1, 0), launch(2, 7), gpu("k", 9, 1, 2)]
    assert rows(events, "queue_length", *SERIES) == [(7, 7, 1), (7, 9, 0)]
    assert len(rows(events, "queue_length", *SERIES, hta=False)) == 4
