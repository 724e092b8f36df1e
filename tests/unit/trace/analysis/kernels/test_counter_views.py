import pytest
from kineto_trace.catalog.view_catalog import find_view
from support.trace_files.hta_events import Event, context, event, launch, op, rows

FMA = "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum"
ADD = "smsp__sass_thread_inst_executed_op_hadd_pred_on.sum"


def profiled(name: str, ts: float, **counters: float) -> Event:
    return event("cuda_profiler_range", name, ts, 5, 0, 0, **counters)


@pytest.mark.parametrize("hta", [False, True])
def test_the_nth_range_belongs_to_the_nth_launch(hta: bool) -> None:
    events = [
        *(
            op("aten::linear", 0, 50),
            op("aten::addmm", 5, 20),
            launch(1, 10),
            launch(2, 60, name="cudaLaunchKernelExC"),
        ),
        *(profiled("second", 90, cycles=7), profiled("first", 80, **{FMA: 10, ADD: 3})),
    ]
    columns = ("kernel", "op_stack", "top_op", "bottom_op", "counter", "value", "flop")
    stack = ["aten::linear", "aten::addmm"]
    assert rows(events, "counters_with_operators", *columns, hta=hta) == [
        ("first", stack, "aten::linear", "aten::addmm", FMA, 10, 20),
        ("first", stack, "aten::linear", "aten::addmm", ADD, 3, 3),
        ("second", [], None, None, "cycles", 7, None),
    ]


def test_ranges_that_cannot_be_paired_are_told_of() -> None:
    result = find_view("counters_with_operators")(context([profiled("a", 1, cycles=1)]))
    assert result.notes == ("1 ranges and 0 calls of cudaLaunchKernel… cannot be paired",)
    result = find_view("counters_with_operators")(context([launch(1, 0)]))
    assert result.notes == ("there are no events of the category cuda_profiler_range in the trace",)
