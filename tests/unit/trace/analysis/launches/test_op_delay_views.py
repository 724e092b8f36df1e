import pytest
from support.trace_files.hta_events import Event, gpu, launch, op, rows

COLUMNS = ("op", "kernels", "count", "launch_delay_us", "runtime_delay_us")


@pytest.fixture
def events() -> list[Event]:
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
def test_runs_of_an_operator_with_the_same_kernels_are_one_row(events: list[Event], hta: bool) -> None:
    # delays of the first kernel: 2 and 4 to the launch, 18 and 10 to the start
    assert rows(events, "op_kernel_delay", *COLUMNS, hta=hta) == [("aten::addmm", "scale -> gemm", 2, 3, 14)]


def test_a_launch_is_of_the_operator_of_its_thread_but_to_hta_of_any() -> None:
    events = [op("aten::a", 0, 20), op("aten::other", 5, 10, tid=2), launch(1, 6), gpu("k", 8, 1, 1)]
    assert rows(events, "op_kernel_delay", "op", hta=False) == [("aten::a",)]
    assert rows(events, "op_kernel_delay", "op") == [("aten::other",)]


def test_a_launch_that_outlives_its_operator_is_of_the_one_around_to_hta() -> None:
    events = [op("aten::a", 0, 20), op("aten::b", 2, 5), launch(1, 6, 3), gpu("k", 9, 1, 1)]
    assert rows(events, "op_kernel_delay", "op", hta=False) == [("aten::b",)]
    assert rows(events, "op_kernel_delay", "op") == [("aten::a",)]


def test_hta_fails_where_a_launch_has_no_kernel() -> None:
    from kineto_trace.catalog.view_catalog import find_view
    from kineto_trace.view_api.view import Compat
    from support.trace_files.hta_events import context

    result = find_view("op_kernel_delay")(context([op("aten::a", 0, 20), launch(1, 6)]), compat=Compat.HTA)
    assert result.notes == ("HTA fails on this trace: 1 launches inside operators have no kernel",)
    assert len(result) == 0


def test_kernels_in_another_order_are_another_row() -> None:
    events: list[Event] = []
    for base, names in ((0, "ab"), (100, "ba"), (200, "ab")):
        events.append(op("aten::x", base, 50))
        for place, name in enumerate(names):
            number = base + place + 1
            events += [launch(number, base + 5 * place + 5), gpu(name, base + 10 * place + 60, 5, number)]
    assert rows(events, "op_kernel_delay", "kernels", "count", hta=False) == [("a -> b", 2), ("b -> a", 1)]


def test_a_kernel_that_starts_before_its_launch_had_no_delay() -> None:
    events = [op("aten::a", 0, 20), launch(1, 6), gpu("k", 4, 1, 1)]
    assert rows(events, "op_kernel_delay", "launch_delay_us", "runtime_delay_us", hta=False) == [(6, 0)]
