"""Copies and conversions in the forward."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.host_findings.host_finding_rules import forward_copies, layouts, loading, number_types
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


def copying(name: str, samples: int, after: int = 10 * PERIOD_NS) -> Context:
    """A function that runs this operator for so many of 100 samples, and its backward for the time `after`."""
    common: dict[str, Any] = {"thread": 1, "sequence": 1}
    made = [
        {**common, "name": name, "start": 0, "duration": samples * PERIOD_NS, "torch_thread": 1},
        {
            **common,
            "name": "autograd::engine::evaluate_function: ToCopyBackward0",
            "start": 50 * PERIOD_NS,
            "duration": after,
            "sequence": -1,
        },
        {
            **common,
            "name": "ToCopyBackward0",
            "start": 50 * PERIOD_NS,
            "duration": PERIOD_NS,
            "scope": 1,
            "forward_thread": 1,
        },
    ]
    engine = after // PERIOD_NS
    stacks = [*[CAST] * samples, *[FORWARD] * (50 - samples), *[ENGINE] * engine, *[FORWARD] * (50 - engine)]
    return sampled(stacks, ops=made)


@pytest.mark.parametrize(
    ("name", "title", "advice"),
    [
        ("aten::to", "converts tensors to other number types", "dtype"),
        ("aten::clone", "copies tensors", "views"),
    ],
)
def test_copies_count_with_their_backward(name: str, title: str, advice: str) -> None:
    (finding,) = forward_copies(copying(name, 20))
    assert finding.title == f"Block.cast (net.py:5) {title}, forward and backward"
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
    assert finding.title == "Loading takes a part of each step, most of it Images.read (data.py:42)"
    assert finding.saving_ns == 200_000_000
    assert "num_workers" in finding.advice


def test_waiting_for_workers_says_that_they_are_not_in_the_trace() -> None:
    (finding,) = found((WAITING, "idle"))
    assert finding.title == "The step waits for the next batch from the DataLoader's workers"
    assert "not in this trace" in finding.evidence


def test_workers_that_start_in_several_steps_are_found_with_the_wait_for_their_first_batches() -> None:
    (finding,) = found(STARTING, (WAITING, "idle"))
    assert finding.name == "worker_start"
    assert finding.saving_ns == 200_000_000
    assert "persistent_workers=True" in finding.advice


def test_workers_that_start_once_are_the_programs_start() -> None:
    context = sampled([*[STARTING] * 10, *TRAINING * 10], steps=7)
    assert [finding.name for finding in loading(context)] == ["loading_in_the_step"]
