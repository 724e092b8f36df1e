"""The selection, the filter and the modes of the live view."""

from collections.abc import Iterable

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl.output.top_view import SPAN_S, KeyAction, Mode, TopView, Trends, rates_of


def process(pid: int, *, cpu: float = 0.0, rank: int | None = None, command: str = "train") -> pb.ProcessSample:
    return pb.ProcessSample(process=pb.Process(pid=pid, start_time_ns=pid, rank=rank, command=[command]), cpu=cpu)


def view_of(*processes: pb.ProcessSample, order: str = "pid") -> TopView:
    view = TopView(order=order)
    view.see(processes)
    return view


def selected(view: TopView) -> int:
    sample = view.process()
    return sample.process.pid if sample else 0


def press(view: TopView, *keys: str) -> list[KeyAction]:
    return [action for key in keys if (action := view.press(key))]


def test_the_selection_follows_its_process_through_samples_orders_and_filters() -> None:
    view = view_of(process(1), process(2), process(3))
    press(view, "down", "j")
    assert selected(view) == 3
    view.see([process(3, cpu=9), process(4), process(5)])
    assert (selected(view), view.selected) == (3, 0)
    press(view, "P", "I")
    assert (selected(view), view.selected) == (3, 2)
    view.see([process(4), process(5)])  # it is gone: the row in its place
    assert selected(view) == 5
    view.see([])
    assert selected(view) == 0


def test_the_selection_stays_within_the_list() -> None:
    view = view_of(*map(process, range(1, 101)))
    view.list_rows = 10
    for keys, expected in ((("up",), 1), (("page down", "page down"), 21), (("G", "down"), 100), (("g",), 1)):
        press(view, *keys)
        assert selected(view) == expected


def test_the_list_scrolls_so_that_the_selection_is_in_sight() -> None:
    view = view_of(*map(process, range(1, 101)))
    view.list_rows = 10
    for place in range(100):
        view.selected = place
        assert 0 <= view.first_row() <= place < view.first_row() + 10 <= 100


@pytest.mark.parametrize(
    ("typed", "pids"), [("TRAIN", [1, 3]), ("rank 2", [2]), ("train b", [3]), ("3", [3]), ("none", [])]
)
def test_the_filter_looks_for_all_words_in_any_case(typed: str, pids: list[int]) -> None:
    view = view_of(process(1, command="train a"), process(2, rank=2, command="other"), process(3, command="train b"))
    press(view, "/", *typed)
    assert [each.process.pid for each in view.rows] == pids
    press(view, "erase", "x", "backspace", "enter")
    assert (len(view.rows), view.mode) == (3, Mode.LIST)


def test_keys_that_type_a_filter_do_nothing_else() -> None:
    view = view_of(process(1))
    assert press(view, "/", *"qtdejr?") == []
    assert (view.filter, view.mode, view.order, view.reverse) == ("qtdejr?", Mode.FILTER, "pid", False)


def test_only_y_starts_a_trace_and_only_of_the_process_that_was_asked_about() -> None:
    view = view_of(process(1), process(2))
    for no in ("n", "enter", "esc", "q", "t"):
        assert press(view, "t", no) == []
    assert press(view, "t") == []
    view.see([process(2)])
    assert press(view, "y") == []
    assert view.message == "not traced: the process is no longer there"
    assert press(view, "t", "y") == [KeyAction.TRACE]
    assert view.asked is not None
    assert view.asked.process.pid == 2


def test_nothing_is_done_to_no_process() -> None:
    view = view_of()
    assert press(view, "t", "y", "d", "e", "down", "G", "page up") == []
    assert view.mode is Mode.LIST


def test_a_page_takes_the_keys_until_it_is_closed() -> None:
    view = view_of(process(1), process(2))
    press(view, "?")
    assert press(view, "down", "t", "d", "s") == []
    assert (view.mode, view.page_line, selected(view), view.order) == (Mode.PAGE, 1, 1, "pid")
    assert press(view, "q") == []
    assert press(view, "q") == [KeyAction.LEAVE]


def test_esc_ends_the_filter_and_takes_the_note_away() -> None:
    view = view_of(process(1))
    view.note, view.filter = "a trace", "x"
    press(view, "esc")
    assert (view.note, view.filter) == ("", "")


def sample(time_s: float, iterations: int, start_ns: int = 1) -> pb.HostSample:
    process = pb.Process(pid=7, start_time_ns=start_ns, iterations=iterations)
    return pb.HostSample(time_ns=int(time_s * 1e9), processes=[pb.ProcessSample(process=process)])


def shown(samples: Iterable[pb.HostSample]) -> str:
    trends, last = Trends(), pb.HostSample()
    for last in samples:
        trends.see(last)
    return trends.text(last.processes[0])


def at_rates(*rates: int, each_s: int = 20) -> list[pb.HostSample]:
    """Samples every two seconds of a process with these rates, one after the other."""
    counts, samples = 1000, []
    for part, rate in enumerate(rates):
        for step in range(0, each_s, 2):
            samples.append(sample(part * each_s + step, counts))
            counts += 2 * rate
    return [*samples, sample(len(rates) * each_s, counts)]


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ((10,), "███ →"),
        ((10, 10, 10, 10, 10, 5, 5), "█████▄▄ ↘"),
        ((4, 4, 4, 4, 4, 8, 8), "▄▄▄▄▄██ ↗"),
        ((8, 8, 8, 8, 8, 8, 0), "██████▁ ↘"),
    ],
)
def test_bars_grow_with_the_rate_and_an_arrow_says_where_it_goes(rates: tuple[int, ...], expected: str) -> None:
    assert shown(at_rates(*rates)) == expected


def test_nothing_is_said_of_what_was_not_seen() -> None:
    assert shown([sample(0, 5)]) == "-"
    assert shown([sample(2 * time_s, -1) for time_s in range(9)]) == "-"
    assert shown([sample(2 * time_s, 70) for time_s in range(9)]) == "-"
    assert shown(sample(2 * time_s, time_s) for time_s in range(9)) == "-"  # too few steps to tell one from two


def test_slow_steps_share_fewer_bars_so_that_one_more_or_less_does_not_show() -> None:
    assert len(rates_of([(2.0 * place, place // 4) for place in range(120)])) == 3


def test_what_is_older_than_the_span_is_forgotten_and_so_is_a_process_that_counts_anew() -> None:
    slow = [sample(time_s, time_s) for time_s in range(0, 400, 2)]
    fast = [sample(400 + time_s, 400 + 9 * time_s) for time_s in range(0, int(SPAN_S) + 2, 2)]
    assert shown([*slow, *fast]) == "███████ →"
    assert shown([*at_rates(10), sample(30, 3)]) == "-"
    assert shown([*at_rates(10), sample(30, 2000, start_ns=2)]) == "-"
