import numpy as np
from kineto_trace.model.context import Context
from kineto_trace.model.trace import StringTable
from kineto_trace.structure.event_arguments import argument, argument_objects, argument_texts, arguments
from support.trace_files.chrome_files import event, load_events
from support.trace_files.traces import trace

ROWS = (
    event("kernel", "a", 0, 1, args={"blocks per SM": 0.25, "stream": 7, "Collective name": "allreduce"}),
    event("kernel", "b", 1, 1, args={"blocks per SM": "N/A", "correlation": 4, "grid": [1, 2, 3]}),
    event("kernel", "c", 2, 1),
    event("kernel", "a", 3, 1, args={"blocks per SM": 0.25, "stream": 9, "Collective name": "allreduce"}),
)


def test_numbers_are_given_for_each_row() -> None:
    context = Context(load_events(*ROWS))
    np.testing.assert_array_equal(argument(context, "kernel", "blocks per SM"), [0.25, np.nan, np.nan, 0.25])
    np.testing.assert_array_equal(argument(context, "kernel", "missing"), [np.nan] * 4)


def test_arguments_with_columns_are_given_where_the_row_has_them() -> None:
    context = Context(load_events(*ROWS, event("cpu_op", "o", args={"External id": 3})))
    np.testing.assert_array_equal(argument(context, "kernel", "stream"), [7, np.nan, np.nan, 9])
    np.testing.assert_array_equal(argument(context, "cpu_op", "External id"), [3])


def test_texts_are_distinct_and_parsed_once() -> None:
    context = Context(load_events(*ROWS))
    rows, texts = argument_texts(context, "kernel", "Collective name")
    assert (rows.tolist(), texts) == ([0, -1, -1, 0], ["allreduce"])
    assert len(arguments(context, "kernel").objects) == 2
    assert arguments(context, "kernel") is arguments(context, "kernel")


def test_inputs_of_operators_are_arguments_too() -> None:
    args = {"Input Dims": [[2, 3], []], "External id": 1}
    context = Context(load_events(event("cpu_op", "o", args=args), event("cpu_op", "p")))
    rows, values = argument_objects(context, "cpu_op", "Input Dims")
    assert (rows.tolist(), values) == ([0, -1], [[[2, 3], []]])


def test_captures_have_arguments_of_operators_only() -> None:
    strings = StringTable()
    number = strings.add('"Input Dims": [[4]]')
    made = trace({"cpu_op": [{"inputs": number}, {"inputs": -1}], "kernel": [{"stream": 7}]}, strings=strings.strings)
    context = Context(made)
    assert argument_objects(context, "cpu_op", "Input Dims")[1] == [[[4]]]
    np.testing.assert_array_equal(argument(context, "kernel", "blocks per SM"), [np.nan])
