import pytest
from support.trace_files.hta_events import Event, gpu, launch, rows

COLUMNS = ("correlation", "cpu_us", "gpu_us", "launch_delay_us", "short_activity", "long_call", "long_delay")


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
