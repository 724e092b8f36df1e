"""Copies and conversions in the forward."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.host_findings.host_finding_rules import (
    called_directly,
    forward_copies,
    layouts,
    loading,
    number_types,
    recurrent_cells,
    small_operators,
)
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Table
from support.trace_files.sampled_stacks import (
    BACKWARD,
    FORWARD,
    LOADER,
    MAIN,
    MODULE,
    PERIOD_NS,
    TORCH,
    Sample,
    sampled,
    sampled_trace,
)

CAST = (*MAIN, MODULE, "/job/net.py(5): Block.cast")
ENGINE = (*MAIN, BACKWARD, TORCH + "autograd/graph.py(9): _engine_run_backward")


def op(name: str, start: int, duration: int, **more: int) -> dict[str, Any]:
    return {"name": name, "start": start, "duration": duration, "thread": 1, **more}


def copying(name: str, samples: int, after: int = 10 * PERIOD_NS) -> Context:
    """A function that runs this operator for so many of 100 samples, and its backward for the time `after`."""
    made = [
        op(name, 0, samples * PERIOD_NS, sequence=1, torch_thread=1),
        op("autograd::engine::evaluate_function: ToCopyBackward0", 50 * PERIOD_NS, after),
        op("ToCopyBackward0", 50 * PERIOD_NS, PERIOD_NS, sequence=1, scope=1, forward_thread=1),
    ]
    engine = after // PERIOD_NS
    stacks = [*[CAST] * samples, *[FORWARD] * (50 - samples), *[ENGINE] * engine, *[FORWARD] * (50 - engine)]
    return sampled(stacks, ops=made)


@pytest.mark.parametrize(
    ("name", "title", "advice"),
    [
        ("aten::to", "converts tensors to other dtypes", "dtype"),
        ("aten::clone", "copies tensors", "views"),
    ],
)
def test_copies_count_with_their_backward(name: str, title: str, advice: str) -> None:
    (finding,) = forward_copies(copying(name, 20))
    assert finding.title == f"Block.cast (net.py:5) {title}, in the forward and backward pass"
    assert round(finding.saving_ns / PERIOD_NS) == 30
    assert advice in finding.advice


def test_other_operators_are_no_copies() -> None:
    assert list(forward_copies(copying("aten::mul", 20))) == []


def test_a_few_copies_are_what_models_need() -> None:
    assert list(forward_copies(copying("aten::contiguous", 4, after=PERIOD_NS))) == []


def test_without_python_stacks_nobody_is_named() -> None:
    made = copying("aten::to", 20).trace
    bare = {kind: rows for kind, rows in made.tables.items() if kind != "python_function"}
    assert list(forward_copies(Context(replace(made, tables=bare)))) == []


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
    scalar = '"Input type": ["float", "double"], "Input Dims": [[64, 64], []]'
    assert list(number_types(with_inputs("aten::addcdiv_", scalar))) == []  # a number of Python
    (finding,) = number_types(with_inputs("aten::addmm", '"Input type": ["double", "double", "Scalar"]'))
    assert (finding.title, finding.saving_ns) == ("Operators compute in float64 (double)", 25 * PERIOD_NS)


def test_convolutions_on_contiguous_channels_are_found() -> None:
    context = with_inputs("aten::mkldnn_convolution", '"Input Strides": [[3072, 1024, 32, 1], []]')
    (finding,) = layouts(context)
    assert (finding.name, finding.saving_ns) == ("not_channels_last", 15 * PERIOD_NS)


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("aten::addmm", '"Input type": ["float", "float"]'),
        ("aten::mkldnn_convolution", '"Input Strides": [[3072, 1, 96, 3], []]'),
        ("aten::add", '"Input Strides": [[3072, 1024, 32, 1], []]'),
    ],
    ids=["float32", "channels last", "no convolution"],
)
def test_operators_with_the_right_types_and_layouts_are_no_finding(name: str, inputs: str) -> None:
    context = with_inputs(name, inputs)
    assert [*number_types(context), *layouts(context)] == []


def test_without_inputs_nothing_is_said() -> None:
    context = Context(sampled_trace([FORWARD] * 100))
    assert [*number_types(context), *layouts(context)] == []


TRAINING: list[Sample] = [*[FORWARD] * 3, *[(*MAIN, BACKWARD)] * 3]
FETCH = TORCH + "utils/data/_utils/fetch.py(49): _MapDatasetFetcher.fetch"
WAITING = (*MAIN, LOADER, TORCH + "utils/data/dataloader.py(1300): _MultiProcessingDataLoaderIter._get_data")
STARTING = (*MAIN, TORCH + "utils/data/dataloader.py(1000): _MultiProcessingDataLoaderIter.__init__")


def found(*extra: Sample) -> list[Finding]:
    """Ten steps, each with these samples."""
    return list(loading(sampled([*TRAINING, *extra] * 10, steps=10)))


def test_without_a_loader_there_is_no_finding() -> None:
    assert found() == []


def test_the_data_sets_function_with_most_of_the_time_is_named() -> None:
    stack = (*MAIN, LOADER, FETCH, "/job/data.py(3): Images.__getitem__", "/job/data.py(9): Images.read")
    (finding,) = found((stack, "idle"), (stack, "idle"))
    assert finding.name == "loading_in_the_step"
    assert finding.title == "Data loading takes up part of each step, mostly in Images.read (data.py:42)"
    assert finding.saving_ns == 200_000_000
    assert "num_workers" in finding.advice


def test_waiting_for_workers_says_that_they_are_not_in_the_trace() -> None:
    (finding,) = found((WAITING, "idle"))
    assert finding.title == "The step waits for the next batch from the DataLoader's workers"
    assert "not in this trace" in finding.evidence
    assert finding.advice.startswith("Raise num_workers ")


def test_workers_that_start_in_several_steps_are_found_with_the_wait_for_their_first_batches() -> None:
    (finding,) = found(STARTING, (WAITING, "idle"))
    assert finding.name == "worker_start"
    assert finding.saving_ns == 200_000_000
    assert "persistent_workers=True" in finding.advice


def test_workers_that_start_once_are_the_programs_start() -> None:
    context = sampled([*[STARTING] * 10, *TRAINING * 10], steps=7)
    assert [finding.name for finding in loading(context)] == ["loading_in_the_step"]


LOSS = (*MAIN, "/job/train.py(20): penalty")
BLOCK = (*MAIN, MODULE, "/job/net.py(5): Block.forward")
OWN = (*ENGINE, TORCH + "autograd/function.py(3): BackwardCFunction.apply", "/job/net.py(9): Norm.backward")


def forward_ops(name: str, first: int, last: int, count: int, since: int = 0) -> list[dict[str, Any]]:
    """So many operators, one after the other, from one sample to another, numbered as nodes of the graph."""
    every = (last - first) * PERIOD_NS // count
    return [
        op(name, first * PERIOD_NS + n * every, every - 1_000, torch_thread=1, sequence=since + n) for n in range(count)
    ]


def backward_ops(first: int, last: int, count: int, since: int = 0) -> list[dict[str, Any]]:
    """Their backward: the engine's operator for each node, twice as long as the node's own."""
    every = (last - first) * PERIOD_NS // count
    rows = []
    for n in range(count):
        start, engine = first * PERIOD_NS + n * every, "autograd::engine::evaluate_function: MulBackward0"
        rows.append(op(engine, start, every))
        rows.append(op("MulBackward0", start, every // 2, sequence=since + n, scope=1, forward_thread=1))
    return rows


def test_the_backward_has_the_time_of_the_engine_around_its_nodes_and_between_them() -> None:
    made = [*forward_ops("aten::mul", 0, 3, 1_000), *backward_ops(3, 8, 1_000)]
    (finding,) = small_operators(sampled([*[LOSS] * 3, *[ENGINE] * 10, *[FORWARD] * 87], ops=made))
    assert finding.title == "penalty (train.py:20) calls 1,000 small operators per step"
    assert round(finding.saving_ns / PERIOD_NS, 1) == round(0.8 * (3 + 5 + 5), 1)


def test_the_backward_takes_no_longer_than_it_is_seen() -> None:
    late = [{**row, "start": row["start"] + 2 * PERIOD_NS} for row in backward_ops(3, 11, 1_000)]
    made = [*forward_ops("aten::mul", 0, 3, 1_000), *late]  # two samples of the backward see no operator
    (finding,) = small_operators(sampled([*[LOSS] * 3, *[ENGINE] * 8, *[FORWARD] * 89], ops=made))
    assert round(finding.saving_ns / PERIOD_NS, 1) == round(0.8 * (3 + 8), 1)


def test_a_recurrent_cell_that_is_stepped_through_time_is_told_with_what_takes_its_place() -> None:
    encode = (*MAIN, MODULE, "/job/model.py(4): Model.encode")
    cell = (*encode, MODULE, TORCH + "nn/modules/rnn.py(1500): GRUCell.forward")
    made = [*forward_ops("aten::gru_cell", 0, 4, 20), *backward_ops(4, 10, 20)]
    context = sampled([*[cell] * 4, *[ENGINE] * 6], ops=made)
    (finding,) = recurrent_cells(context)
    assert finding.title == "Model.encode (model.py:42) calls 20 GRU cells per step, one after the other"
    assert finding.advice.startswith("Call nn.GRU once for the whole sequence")
    assert finding.guess
    assert round(finding.saving_ns / PERIOD_NS) == 5
    few = [*forward_ops("aten::gru_cell", 0, 4, 10), *backward_ops(4, 10, 10)]
    assert list(recurrent_cells(sampled([*[cell] * 4, *[ENGINE] * 6], ops=few))) == []


def test_operators_belong_to_the_function_in_which_samples_saw_their_name() -> None:
    late = [{**row, "start": row["start"] + PERIOD_NS // 2} for row in forward_ops("aten::rsub", 2, 5, 1_000, since=4)]
    made = [*forward_ops("aten::gelu", 0, 2, 4), *late]  # the sample at 2 sees none of them, the slice has some
    nodes = backward_ops(8, 9, 1_004)
    context = sampled([*[BLOCK] * 3, *[LOSS] * 3, *[FORWARD] * 2, *[ENGINE] * 2], ops=[*made, *nodes])
    caller = called_directly(context)[1]
    names = [context.trace.strings[name] for name in caller.tolist()]
    assert (names.count(LOSS[-1]), names.count(BLOCK[-1])) == (1_000, 4)


def test_operators_too_short_for_samples_belong_to_the_function_that_has_those_around_them() -> None:
    late = [{**row, "start": row["start"] + PERIOD_NS // 2} for row in forward_ops("aten::rsub", 2, 5, 1_000, since=4)]
    short = [
        {**row, "name": "aten::select", "start": row["start"] + row["duration"], "duration": 500, "sequence": 1_004 + n}
        for n, row in enumerate(late)
    ]
    made = [*forward_ops("aten::gelu", 0, 2, 4), *late, *short]
    nodes = backward_ops(8, 9, 2_004)
    context = sampled([*[BLOCK] * 3, *[LOSS] * 3, *[FORWARD] * 2, *[ENGINE] * 2], ops=[*made, *nodes])
    rows, caller = called_directly(context)
    names = [context.trace.strings[name] for name in context.trace.table("cpu_op")["name"][rows].tolist()]
    of_short = [
        context.trace.strings[number] for name, number in zip(names, caller, strict=True) if name == short[0]["name"]
    ]
    assert (of_short.count(LOSS[-1]), len(of_short)) == (1_000, 1_000)


def test_what_modules_run_inside_a_forward_of_the_program_is_not_its_own() -> None:
    layer = (*BLOCK, MODULE, TORCH + "nn/modules/transformer.py(900): TransformerEncoderLayer.forward")
    made = [*forward_ops("aten::mul", 0, 4, 1_000), *backward_ops(5, 9, 1_000)]
    context = sampled([*[layer] * 4, BLOCK, *[ENGINE] * 5], ops=made)
    assert len(called_directly(context)[0]) == 0
    assert list(small_operators(context)) == []


def own_backward(of_each: int) -> Context:
    """A backward in which an autograd.Function runs operators for 4 of 10 samples."""
    engine = [
        op("autograd::engine::evaluate_function: NormBackward", 5 * PERIOD_NS, 4 * PERIOD_NS),
        op("NormBackward", 5 * PERIOD_NS, 4 * PERIOD_NS, scope=1, sequence=0, forward_thread=1),
    ]
    inside = [{**row, "sequence": -1} for row in forward_ops("aten::mul", 5, 9, of_each)]
    return sampled([*[FORWARD] * 5, *[OWN] * 4, ENGINE], ops=[*engine, *inside])


def test_a_loop_in_the_backward_of_an_own_function_is_found() -> None:
    (finding,) = small_operators(own_backward(2_000))
    assert finding.title == "Norm.backward (net.py:9) calls 2,000 small operators per step, inside the backward pass"
    assert round(finding.saving_ns / PERIOD_NS, 1) == round(0.8 * 4, 1)


def test_few_large_operators_in_the_backward_of_an_own_function_are_no_loop() -> None:
    assert list(small_operators(own_backward(300))) == []


def test_an_operator_is_small_by_the_time_that_it_has_a_processor() -> None:
    use = {"thread": 1, "samples": 100, "python": 100, "running": 100, "waiting": 0, "idle": 0, "has_gil": 100}
    made = [*forward_ops("aten::mul", 0, 30, 1_000), *backward_ops(30, 40, 1_000)]
    samples = [*[LOSS] * 30, *[ENGINE] * 10, *[FORWARD] * 60]
    assert list(small_operators(sampled(samples, ops=made))) == []
    busy = sampled(samples, ops=made, thread_use=[{**use, "cpu_ns": 10 * PERIOD_NS}])
    assert [finding.where for finding in small_operators(busy)] == ["penalty (/job/train.py:20)"]
