"""What is found of types and layouts of tensors on the CPU."""

from dataclasses import replace

import numpy as np
from kineto_trace.analysis.host_findings.tensor_formats import layouts, number_types
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Table
from support.trace_files.sampled_stacks import FORWARD, PERIOD_NS, sampled_trace


def with_inputs(name: str, inputs: str) -> Context:
    """A trace of 100 periods, half of them in one operator with such arguments."""
    ops = [{"name": name, "start": 0, "duration": 50 * PERIOD_NS, "thread": 1}]
    trace = sampled_trace([FORWARD] * 100, ops=ops)
    table = trace.table("cpu_op")
    columns = {**table.columns, "inputs": np.full(1, len(trace.strings), np.int32)}
    return Context(
        replace(trace, strings=(*trace.strings, inputs), tables={**trace.tables, "cpu_op": Table("cpu_op", columns)})
    )


def test_operators_in_float64_are_found() -> None:
    (finding,) = number_types(with_inputs("aten::addmm", '"Input type": ["double", "double", "Scalar"]'))
    assert (finding.title, finding.saving_ns) == ("Operators compute in float64 (double)", 25 * PERIOD_NS)


def test_operators_in_float32_are_no_finding() -> None:
    assert list(number_types(with_inputs("aten::addmm", '"Input type": ["float", "float"]'))) == []


def test_convolutions_on_contiguous_channels_are_found() -> None:
    context = with_inputs("aten::mkldnn_convolution", '"Input Strides": [[3072, 1024, 32, 1], []]')
    (finding,) = layouts(context)
    assert (finding.name, finding.saving_ns) == ("not_channels_last", 15 * PERIOD_NS)


def test_convolutions_on_channels_last_are_no_finding() -> None:
    assert list(layouts(with_inputs("aten::mkldnn_convolution", '"Input Strides": [[3072, 1, 96, 3], []]'))) == []


def test_operators_without_convolutions_are_no_finding() -> None:
    assert list(layouts(with_inputs("aten::add", '"Input Strides": [[3072, 1024, 32, 1], []]'))) == []


def test_without_inputs_nothing_is_said() -> None:
    context = Context(sampled_trace([FORWARD] * 100))
    assert [*number_types(context), *layouts(context)] == []
