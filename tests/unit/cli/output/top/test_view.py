"""The selection, the filter and the modes of the live view."""

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl.output.top.view import KeyAction, Mode, TopView


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
