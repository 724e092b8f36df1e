import pytest
from support.trace_files.hta_events import Event, event, gpu, launch, op, rows

COLUMNS = ("correlation", "cpu_us", "gpu_us", "launch_delay_us", "short_activity", "long_call", "long_delay")
DELAY_COLUMNS = ("op", "kernels", "count", "launch_delay_us", "runtime_delay_us")
SERIES = ("stream", "time_us", "queue_length")
SUMMARY = ("stream", "count", "mean", "std", "min", "p25", "p50", "p75", "max", "time_mean")


@pytest.fixture
def events() -> list[Event]:
    return [
        *(launch(1, 0, 10), gpu("a", 12, 5, 1)),  # shorter than its call, waits 2
        *(launch(2, 20, 60), gpu("b", 50, 90, 2)),  # long call, starts before its end
        *(launch(3, 90, 5), gpu("c", 300, 9, 3)),  # waits 205
        *(launch(4, 400, 3, name="cudaMemcpyAsync"), gpu("Memcpy HtoD", 410, 1, 4, kind="gpu_memcpy")),
        *(launch(5, 500, 3, name="cuLaunchKernel"), gpu("d", 510, 4, 5)),
    ]


def test_launches_have_their_calls_activities_and_delays(events: list[Event]) -> None:
    assert rows(events, "launch_stats", *COLUMNS, hta=False) == [
        (1, 10, 5, 2, True, False, False),
        (2, 60, 90, 0, False, True, False),
        (3, 5, 9, 205, False, False, True),
        (4, 3, 1, 7, True, False, False),
        (5, 3, 4, 7, False, False, False),
    ]


def test_hta_knows_no_driver_calls(events: list[Event]) -> None:
    assert [row[0] for row in rows(events, "launch_stats", *COLUMNS)] == [1, 2, 3, 4]
    assert [row[0] for row in rows(events, "launch_stats", *COLUMNS, include_memory=False)] == [1, 2, 3]


def test_a_graph_launch_has_a_row_for_each_kernel() -> None:
    events = [launch(1, 0, 2, name="cudaGraphLaunch"), gpu("a", 3, 1, 1), gpu("b", 5, 1, 1)]
    assert [row[3] for row in rows(events, "launch_stats", *COLUMNS, hta=False)] == [1, 3]


def test_the_summary_counts_what_is_conspicuous(events: list[Event]) -> None:
    names = ("launches", "short_activities", "long_calls", "long_delays", "mean_delay_us", "max_delay_us")
    assert rows(events, "launch_summary", *names, hta=False) == [(5, 2, 1, 1, pytest.approx(221 / 5), 205)]
    changed = rows(events, "launch_summary", *names[:4], hta=False, runtime_cutoff=4, launch_delay_cutoff=6)
    assert changed == [(5, 1, 3, 3)]
    assert rows([], "launch_summary", *names) == [(0, 0, 0, 0, None, None)]


@pytest.fixture
def op_events() -> list[Event]:
    # aten::linear [0, 50) > aten::addmm [10, 40): launches at 12 and 20, kernels at 30 and 45
    # aten::linear [100, 150) > aten::addmm [110, 140): launches at 114 and 120, kernels at 124 and 150
    found = []
    for base, first, delay in ((0, 12, 18), (100, 114, 10)):
        number = base + 1
        found += [op("aten::linear", base, 50), op("aten::addmm", base + 10, 30)]
        found += [launch(number, first, 2), gpu("scale", first + delay, 5, number)]
        found += [launch(number + 1, base + 20, 2), gpu("gemm", base + 45, 5, number + 1)]
    return found


@pytest.mark.parametrize("hta", [False, True])
def test_runs_of_an_operator_with_the_same_kernels_are_one_row(op_events: list[Event], hta: bool) -> None:
    # delays of the first kernel: 2 and 4 to the launch, 18 and 10 to the start
    assert rows(op_events, "op_kernel_delay", *DELAY_COLUMNS, hta=hta) == [("aten::addmm", "scale -> gemm", 2, 3, 14)]


def test_a_launch_is_of_the_operator_of_its_thread_but_to_hta_of_any() -> None:
    op_events = [op("aten::a", 0, 20), op("aten::other", 5, 10, tid=2), launch(1, 6), gpu("k", 8, 1, 1)]
    assert rows(op_events, "op_kernel_delay", "op", hta=False) == [("aten::a",)]
    assert rows(op_events, "op_kernel_delay", "op") == [("aten::other",)]


def test_a_launch_that_outlives_its_operator_is_of_the_one_around_to_hta() -> None:
    op_events = [op("aten::a", 0, 20), op("aten::b", 2, 5), launch(1, 6, 3), gpu("k", 9, 1, 1)]
    assert rows(op_events, "op_kernel_delay", "op", hta=False) == [("aten::b",)]
    assert rows(op_events, "op_kernel_delay", "op") == [("aten::a",)]


def test_hta_fails_where_a_launch_has_no_kernel() -> None:
    from kineto_trace.catalog.view_catalog import find_view
    from kineto_trace.view_api.view import Compat
    from support.trace_files.hta_events import context

    result = find_view("op_kernel_delay")(context([op("aten::a", 0, 20), launch(1, 6)]), compat=Compat.HTA)
    assert result.notes == ("HTA fails on this trace: 1 launches inside operators have no kernel",)
    assert len(result) == 0


def test_kernels_in_another_order_are_another_row() -> None:
    op_events: list[Event] = []
    for base, names in ((0, "ab"), (100, "ba"), (200, "ab")):
        op_events.append(op("aten::x", base, 50))
        for place, name in enumerate(names):
            number = base + place + 1
            op_events += [launch(number, base + 5 * place + 5), gpu(name, base + 10 * place + 60, 5, number)]
    assert rows(op_events, "op_kernel_delay", "kernels", "count", hta=False) == [("a -> b", 2), ("b -> a", 1)]


def test_a_kernel_that_starts_before_its_launch_had_no_delay() -> None:
    op_events = [op("aten::a", 0, 20), launch(1, 6), gpu("k", 4, 1, 1)]
    assert rows(op_events, "op_kernel_delay", "launch_delay_us", "runtime_delay_us", hta=False) == [(6, 0)]


@pytest.fixture
def queue_events() -> list[Event]:
    # stream 7: launches at 0 and 2, starts at 10 and 30; stream 9: launch at 4, start at 6
    return [
        *(launch(1, 0), launch(2, 2), launch(3, 4)),
        *(gpu("k", 10, 5, 1), gpu("k", 30, 5, 2), gpu("k", 6, 5, 3, stream=9)),
    ]


@pytest.mark.parametrize("hta", [False, True])
def test_a_queue_grows_with_launches_and_shrinks_with_starts(queue_events: list[Event], hta: bool) -> None:
    assert rows(queue_events, "queue_length", *SERIES, hta=hta) == [
        (7, 0, 1),
        (7, 2, 2),
        (7, 10, 1),
        (7, 30, 0),
        (9, 4, 1),
        (9, 6, 0),
    ]


@pytest.mark.parametrize("hta", [False, True])
def test_the_summary_counts_each_change_once_and_weighs_time_as_well(queue_events: list[Event], hta: bool) -> None:
    # values 1, 2, 1, 0; over time (2 * 1 + 8 * 2 + 20 * 1) / 30
    first = rows(queue_events, "queue_length_summary", *SUMMARY, hta=hta)[0]
    assert first == (7, 4, 1, pytest.approx((2 / 3) ** 0.5), 0, 0.75, 1, 1.25, 2, pytest.approx(38 / 30))


def test_a_graph_launch_adds_all_its_kernels_but_not_to_hta() -> None:
    queue_events = [launch(1, 0, name="cudaGraphLaunch"), gpu("k", 5, 1, 1), gpu("k", 8, 1, 1)]
    assert [row[2] for row in rows(queue_events, "queue_length", *SERIES, hta=False)] == [1, 2, 1, 0]
    assert rows(queue_events, "queue_length", *SERIES) == []


def test_a_launch_and_a_start_at_one_time_make_no_negative_queue() -> None:
    queue_events = [gpu("k", 5, 1, 1), launch(1, 5)]
    assert [row[2] for row in rows(queue_events, "queue_length", *SERIES, hta=False)] == [1, 0]


def test_an_activity_that_starts_before_its_launch_makes_no_negative_queue() -> None:
    queue_events = [launch(1, 9), gpu("k", 5, 1, 1), launch(2, 10), gpu("k", 12, 1, 2)]
    assert rows(queue_events, "queue_length", *SERIES, hta=False) == [(7, 0, 1), (7, 0, 0), (7, 5, 1), (7, 7, 0)]


def test_a_full_queue_blocks_as_long_as_it_is_full(queue_events: list[Event]) -> None:
    columns = ("stream", "blocked_us", "blocked_pct")
    found = rows(queue_events, "blocked_on_full_queue", *columns, hta=False, max_queue_length=2)
    assert found == [(7, 8, pytest.approx(100 * 8 / 35))]  # the trace is [0, 35)
    assert rows(queue_events, "blocked_on_full_queue", *columns, max_queue_length=2) == [
        (7, 8, pytest.approx(100 * 8 / 30))  # to HTA it ends at the last start
    ]


def test_hta_tells_only_of_the_last_stream_that_was_full(queue_events: list[Event]) -> None:
    found = rows(queue_events, "blocked_on_full_queue", "stream", hta=False, max_queue_length=1)
    assert found == [(7,), (9,)]
    assert rows(queue_events, "blocked_on_full_queue", "stream", max_queue_length=1) == [(9,)]


def test_activities_without_a_launch_are_not_counted_but_told_of() -> None:
    from kineto_trace.catalog.view_catalog import find_view
    from support.trace_files.hta_events import context

    result = find_view("queue_length")(context([gpu("k", 5, 1, 1), event("cpu_op", "a", 0, 1)]))
    assert len(result) == 0
    assert result.notes == ("GPU activities that have no launch in the trace are not counted: 1",)


def test_hta_does_not_count_a_launch_of_what_stands_first_in_the_file() -> None:
    queue_events = [gpu("k", 5, 1, 1), launch(1, 0), launch(2, 7), gpu("k", 9, 1, 2)]
    assert rows(queue_events, "queue_length", *SERIES) == [(7, 7, 1), (7, 9, 0)]
    assert len(rows(queue_events, "queue_length", *SERIES, hta=False)) == 4
