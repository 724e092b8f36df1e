from kineto_trace.compat.hta_event_views import hta_stacks
from support.trace_files.hta_events import Event, context, event, gpu, launch, op


def depths(*events: Event) -> list[int]:
    """The depth of each row, in the order of the file."""
    found: list[int] = context(events).get(hta_stacks).depth.tolist()
    return found


def test_rows_nest_by_time_and_kernels_hang_under_their_calls() -> None:
    assert depths(op("a", 0, 20), op("b", 2, 5), launch(1, 3), gpu("k", 9, 1, 1), op("c", 7, 3)) == [0, 1, 2, 3, 1]


def test_of_rows_that_begin_and_end_together_the_first_one_is_outside() -> None:
    assert depths(op("a", 0, 5), op("b", 0, 5)) == [0, 1]


def test_what_begins_when_another_row_ends_comes_after_it() -> None:
    assert depths(op("a", 0, 5), op("b", 5, 5)) == [0, 0]


def test_a_row_of_no_length_is_inside_what_begins_there() -> None:
    assert depths(op("b", 5, 5), op("point", 5, 0), op("c", 7, 2)) == [0, 1, 1]


def test_a_row_of_no_length_is_inside_what_ends_there() -> None:
    assert depths(op("a", 0, 5), op("point", 5, 0)) == [0, 1]


def test_where_a_row_of_no_length_meets_an_end_and_a_beginning_the_sort_decides() -> None:
    # by time, in the order of the file: a( point( b( a) point) c( c) b). Then one after the other is put before the
    # last one that is not less: b( < point(, as it is inside; a) < b(, as ends come first; point) > point(.
    # So a( a) b( point( point) c( c) b), although point( < a)
    assert depths(op("a", 0, 5), op("point", 5, 0), op("b", 5, 5), op("c", 7, 2)) == [0, 1, 0, 1]


def test_threads_do_not_nest_into_each_other() -> None:
    assert depths(op("a", 0, 20), op("b", 2, 5, tid=2)) == [0, 0]


def test_gpu_rows_without_a_partner_are_in_no_stack() -> None:
    annotation = event("gpu_user_annotation", "fwd", 0, 9, 0, 7)
    assert depths(op("a", 0, 20), gpu("k", 9, 1, 1), annotation) == [0, -1, -1]


def test_autograds_rows_go_under_the_step_that_lasts_as_long() -> None:
    backward = op("autograd::x", 3, 4, tid=2)
    assert depths(event("user_annotation", "ProfilerStep#1", 0, 20), backward, op("aten::y", 4, 1, tid=2)) == [0, 1, 2]
    assert depths(event("user_annotation", "ProfilerStep#1", 4, 20), backward, op("aten::y", 4, 1, tid=2)) == [0, 0, 1]
