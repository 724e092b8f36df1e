""""""

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kineto_trace.analysis.kernels.kernel_views import kernels_by_op
from kineto_trace.base.array_types import NOTHING
from kineto_trace.decode.iterations import add_iterations, reported_marks
from kineto_trace.formats.perfetto.perfetto_reader import load_perfetto
from kineto_trace.formats.perfetto.perfetto_writer import write_perfetto
from kineto_trace.formats.text_sinks import TextSink
from kineto_trace.kernel_traits.gpu_vendors import GpuVendor
from kineto_trace.model.context import Context
from kineto_trace.model.trace import StringTable, Table, Trace, make_table
from kineto_trace.structure.activity_links import (
    NO_THREAD,
    ForwardBackward,
    call_owners,
    device_properties,
    forward_backward,
    gpu_vendor,
    owners,
    steps,
    training_thread,
    vendor_words,
    whole_steps,
    with_evaluated_sequences,
)
from support.trace_files import traces
from support.trace_files.chrome_files import event, load, load_events, written
from support.trace_files.op_tables import table
from support.trace_files.traces import trace

MS = 1_000_000
MI300X = {"id": 0, "name": "AMD Instinct MI300X", "numSms": 304}
FORWARD: dict[str, int] = {"torch_thread": 1}
BACKWARD: dict[str, int] = {"torch_thread": 2, "thread": 2, "scope": 1, "forward_thread": 1}


def made() -> Context:
    calls = [
        {"name": "cudaLaunchKernel", "start": at, "duration": 5, "thread": 1, "correlation": at} for at in (20, 60, 90)
    ]
    kernels = [{"name": f"k{at}", "start": at + 100, "duration": 7, "correlation": at} for at in (20, 60, 90)]
    annotations = [
        {"name": "ProfilerStep#1", "start": 0, "duration": 80, "thread": 1, "id": 2, "finished": 1},
        {"name": "Optimizer.step#FusedAdam.step", "start": 50, "duration": 30, "thread": 1, "id": 3, "finished": 1},
        {"name": "of another thread", "start": 85, "duration": 30, "thread": 2, "id": 4, "finished": 1},
    ]
    ops = [{"name": "aten::mm", "start": 10, "duration": 30, "thread": 1, "id": 1, "finished": 1}]
    return Context(trace({"cuda_runtime": calls, "kernel": kernels, "user_annotation": annotations, "cpu_op": ops}))


def test_what_no_op_launched_belongs_to_the_innermost_annotation_of_its_thread() -> None:
    context = made()
    for found in (context.get(owners), context.get(call_owners)):
        names = [context.trace.strings[number] if number != NOTHING else None for number in found.tolist()]
        assert names == ["aten::mm", "Optimizer.step#FusedAdam.step", None]
    assert sorted((row["name"], row["op"]) for row in kernels_by_op(context).rows()) == [
        ("k20", "aten::mm"),
        ("k60", "Optimizer.step#FusedAdam.step"),
        ("k90", None),
    ]


def test_a_trace_without_anything_has_no_owners() -> None:
    assert len(Context(trace({})).get(owners)) == 0


def captured(*marks_ms: int, length_ms: int) -> Trace:
    """A capture of a program whose iterations 7, 8, … began at these times (ms) relative to the window."""
    starts = [[7 + place, traces.START_NS + at * MS] for place, at in enumerate(marks_ms)]
    target = traces.target(iterations=starts, iteration_thread=77)
    strings = StringTable()
    window = traces.START_NS, traces.START_NS + length_ms * MS
    tables = add_iterations({}, strings, reported_marks(target), window)
    return replace(
        traces.trace({}, length_ns=length_ms * MS), target=target, tables=tables, strings=tuple(strings.strings)
    )


def complete(trace: Trace) -> dict[int, bool]:
    found = Context(trace).get(steps)
    return dict(zip(found.number.tolist(), found.complete.tolist(), strict=True))


def perfetto(trace: Trace) -> Trace:
    out = io.BytesIO()
    with TextSink(out) as sink:
        write_perfetto(trace, sink)
    return load_perfetto(io.BytesIO(out.getvalue()), name="trace.pftrace")


@pytest.mark.parametrize("again", [lambda trace: trace, lambda trace: load(written(trace)), perfetto])
def test_a_step_that_the_window_cuts_is_incomplete_in_every_format(again: Callable[[Trace], Trace]) -> None:
    assert complete(again(captured(-163, 87, 337, 587, length_ms=700))) == {7: False, 8: True, 9: True, 10: False}
    assert complete(again(captured(-163, 87, length_ms=40))) == {7: False}


def test_a_window_from_one_iteration_to_another_has_complete_steps_alone() -> None:
    assert complete(captured(0, 250, 500, length_ms=500)) == {7: True, 8: True}
    assert Context(captured(0, 250, 500, length_ms=500)).get(whole_steps).number.tolist() == [7, 8]


def test_a_stored_trace_without_the_argument_has_the_starts_of_its_steps() -> None:
    old = captured(-163, 87, 337, length_ms=300)
    table = old.table("user_annotation")
    table.columns["inputs"][:] = -1
    assert complete(old) == {7: False, 8: False}  # the second one is not finished
    assert complete(captured(-163, 87, 300, length_ms=300)) == {7: False, 8: True}


def profiled(*work: int) -> Trace:
    """A file of torch.profiler whose steps of 1 ms hold so many operators."""
    events = [event("user_annotation", f"ProfilerStep#{number}", 1000 * number, 1000) for number in range(len(work))]
    for number, count in enumerate(work):
        events += [event("cpu_op", "aten::add", 1000 * number + place, 1) for place in range(count)]
    return load_events(*events)


@pytest.mark.parametrize(
    ("work", "last"),
    [
        ([100, 100, 100], True),
        ([100, 100, 60], True),
        ([100, 100, 40], False),
        ([5000, 100, 100], True),  # the first one compiled
        ([100, 1], False),
        ([100, 10], True),
        ([100], True),
        ([5, 5, 0], True),  # too little to conclude anything
    ],
)
def test_the_rest_that_torch_profiler_ends_itself_is_incomplete(work: Sequence[int], last: bool) -> None:
    found = complete(profiled(*work))
    assert found.pop(len(work) - 1) is last
    assert all(found.values())


@pytest.mark.slow
@pytest.mark.torch
def test_a_loop_that_ends_before_the_schedule_of_torch_profiler_does_leaves_a_rest(tmp_path: Path) -> None:
    import torch

    schedule = torch.profiler.schedule(wait=0, warmup=1, active=10)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule) as profiler:
        for _ in range(4):
            value = torch.ones(4, 4)
            for _ in range(60):
                value = value @ value
            profiler.step()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = load((tmp_path / "trace.json").read_bytes())
    assert complete(trace) == {1: True, 2: True, 3: True, 4: False}


def context(devices: tuple[dict[str, Any], ...], *used: int, call: str = "") -> Context:
    calls = [{"name": call, "thread": 1}] if call else []
    return Context(
        trace({"kernel": [{"name": "k", "device": each} for each in used], "cuda_runtime": calls}, devices=devices)
    )


def test_devices_that_are_numbered_otherwise_have_the_properties_that_all_have() -> None:
    found = device_properties(context((MI300X, {**MI300X, "id": 1}), 9))
    assert found[9] == {**MI300X, "id": 9}


def test_a_device_stays_unknown_where_others_differ_or_are_numbered_alike() -> None:
    assert 9 not in device_properties(context((MI300X, {**MI300X, "id": 1, "numSms": 38}), 9))
    assert 9 not in device_properties(context((MI300X,), 0, 9))


def test_the_calls_tell_the_vendor_where_names_are_empty() -> None:
    assert gpu_vendor(context(({"id": 0, "name": ""},), 0, call="hipLaunchKernel")) is GpuVendor.AMD
    assert gpu_vendor(context((MI300X,), 0, call="cudaLaunchKernel")) is GpuVendor.AMD
    assert gpu_vendor(context((), 0)) is GpuVendor.UNKNOWN
    assert vendor_words(context((MI300X,), 0)).multiprocessor == "compute unit"


def op(kind: dict[str, int], start: int, end: int, sequence: int, **columns: int) -> dict[str, int]:
    return {**kind, "start": start, "end": end, "sequence": sequence, **columns}


def pairs(ops: Table) -> list[tuple[int, int]]:
    forward, backward = forward_backward({"cpu_op": ops})
    return list(zip(forward.tolist(), backward.tolist(), strict=True))


@pytest.mark.parametrize(
    ("ops", "links"),
    [
        ([op(FORWARD, 0, 100, 5), op(FORWARD, 10, 20, 5), op(FORWARD, 12, 15, 6), op(BACKWARD, 200, 210, 5)], [(1, 3)]),
        ([op(FORWARD, 0, 10, 5), op(BACKWARD, 200, 260, 5), op(BACKWARD, 210, 220, 5)], [(0, 2)]),
        (
            [op(FORWARD, 0, 10, 5), op(BACKWARD, 20, 30, 5), op(FORWARD, 40, 50, 5), op(BACKWARD, 60, 70, 5)],
            [(0, 1), (2, 3)],
        ),
        ([op(BACKWARD, 0, 10, 5), op(FORWARD, 20, 30, 5)], []),
        ([op(FORWARD, 0, 10, 5), op(FORWARD, 5, 15, 5, torch_thread=3), op(BACKWARD, 20, 30, 5)], [(0, 2)]),
        (
            [op(FORWARD, 0, 10, 1), op(FORWARD, 10, 20, 2), op(BACKWARD, 50, 60, 1), op(BACKWARD, 30, 40, 2)],
            [(1, 3), (0, 2)],  # in the order in which backward ops end
        ),
    ],
    ids=["last to start", "one link for a number", "number used again", "backward first", "other thread", "order"],
)
def test_a_backward_op_belongs_to_the_last_forward_op_of_its_thread_to_start_with_its_number(
    ops: list[dict[str, int]], links: list[tuple[int, int]]
) -> None:
    assert pairs(table("cpu_op", *ops)) == links


def test_ops_without_number_or_thread_have_no_links() -> None:
    ops = table(
        "cpu_op",
        op(FORWARD, 0, 10, -1),
        op(BACKWARD, 20, 30, -1),
        op(FORWARD, 0, 10, 7, torch_thread=0),
        op(BACKWARD, 20, 30, 7, forward_thread=0),
    )
    assert pairs(ops) == []
    assert [len(column) for column in forward_backward({})] == [0, 0]
    assert [len(column) for column in forward_backward({"cpu_op": table("cpu_op")})] == [0, 0]


def plain(ops: Table) -> list[tuple[int, int]]:
    """PyTorch's rule, op by op."""
    remembered: dict[tuple[int, int], int] = {}
    found = []
    ends = ops.end()
    for row in sorted(range(len(ops)), key=lambda row: int(ends[row])):
        if ops["sequence"][row] < 0:
            continue
        if ops["forward_thread"][row]:
            forward = remembered.pop((int(ops["forward_thread"][row]), int(ops["sequence"][row])), None)
            if forward is not None:
                found.append((forward, row))
        elif ops["torch_thread"][row]:
            key = (int(ops["torch_thread"][row]), int(ops["sequence"][row]))
            if key not in remembered or ops["start"][row] >= ops["start"][remembered[key]]:
                remembered[key] = row
    return found


@pytest.mark.parametrize("seed", range(40))
def test_random_ops_are_linked_as_pytorch_links_them(seed: int) -> None:
    random = np.random.default_rng(seed)
    count = 300
    backward = random.random(count) < 0.4
    columns: dict[str, Any] = {
        "start": random.integers(0, 200, count),
        "duration": random.integers(0, 40, count),
        "sequence": random.integers(-1, 8, count),
        "torch_thread": random.integers(0, 3, count),
        "forward_thread": np.where(backward, random.integers(1, 3, count), 0),
        "scope": backward.astype(int),
        "finished": np.ones(count),
    }
    ops = make_table("cpu_op", count, columns)
    assert pairs(ops) == plain(ops)


def test_evaluate_function_ops_take_the_number_of_the_backward_op_inside() -> None:
    strings = StringTable()
    evaluate, node, other = strings.add_all(
        ["autograd::engine::evaluate_function: MulBackward0", "MulBackward0", "aten::mul"]
    )
    ops = table(
        "cpu_op",
        {"name": node, **op(BACKWARD, 12, 18, 5)},
        {"name": evaluate, **op({"thread": 2}, 10, 20, -1)},
        {"name": other, **op({"thread": 2}, 30, 40, -1)},
        {"name": node, **op(BACKWARD, 32, 38, 6)},
    )
    result = with_evaluated_sequences(ops, strings.strings)
    assert result["sequence"].tolist() == [5, 5, -1, 6]
    assert result["forward_thread"].tolist() == [1, 1, 0, 1]
    assert ops["sequence"].tolist() == [5, -1, -1, 6]
    assert with_evaluated_sequences(ops, ["a", "b", "c"]) is ops


def test_the_pair_is_a_plain_tuple() -> None:
    forward, backward = ForwardBackward(np.array([1]), np.array([2]))
    assert (forward[0], backward[0]) == (1, 2)


US = 1000


def row(name: str, start: int, end: int, thread: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "start": start * US, "duration": (end - start) * US, "thread": thread, "finished": 1, **more}


def of(**tables: list[dict[str, Any]]) -> int:
    return Context(trace(tables)).get(training_thread)


def step(number: int, thread: int, **more: Any) -> dict[str, Any]:
    return row(f"ProfilerStep#{number}", 100 * number, 100 * number + 90, thread, **more)


STEPS = [step(1, 7), step(2, 7), step(3, 8)]
OPERATORS = [row("aten::mm", 0, 40, 5), *[row("aten::add", at, at + 1, 6) for at in range(50, 60)]]
AUTOGRAD = [
    row("autograd::engine::evaluate_function: MmBackward0", 0, 80, 9),
    row("MmBackward0", 1, 79, 9, forward_thread=1),
]
LAUNCHES = [row("cudaLaunchKernel", 10 * number, 10 * number + 1, 4, correlation=number) for number in (1, 2, 3)]
KERNELS = [row("k", 10 * number + 2, 10 * number + 4, 0, correlation=number, device=0) for number in (1, 2, 3)]
PYTHON = [row("a.py(1): f", 0, 100, 2, parent=-1), row("a.py(2): g", 0, 100, 3, parent=-1)]


def test_the_thread_of_most_steps_trains_whatever_other_threads_compute() -> None:
    assert of(user_annotation=STEPS, cpu_op=OPERATORS, python_function=PYTHON) == 7


def test_steps_that_were_recorded_as_a_whole_come_first() -> None:
    cut = [step(1, 8, finished=0), step(2, 8, finished=0), step(3, 7)]
    assert of(user_annotation=cut) == 7
    assert of(user_annotation=cut[:2]) == 8


def test_without_steps_the_thread_with_most_time_in_operators_trains() -> None:
    assert of(cpu_op=OPERATORS, cuda_runtime=LAUNCHES, kernel=KERNELS, python_function=PYTHON) == 5


def test_a_thread_of_autograd_does_not_train() -> None:
    assert of(cpu_op=OPERATORS + AUTOGRAD) == 5


def test_without_operators_the_thread_that_launches_most_trains() -> None:
    other = row("cudaLaunchKernel", 60, 61, 3, correlation=9)
    kernel = row("k", 62, 70, 0, correlation=9, device=0)
    assert of(cuda_runtime=[other, *LAUNCHES], kernel=[kernel, *KERNELS], python_function=PYTHON) == 4


def test_with_python_alone_the_thread_that_was_busy_trains() -> None:
    sampled = [
        row("a.py(1): f", 0, 100, 2, samples=10, self_samples=10, idle=9),
        row("a.py(2): g", 0, 100, 3, samples=4, self_samples=4),
    ]
    assert of(python_function=sampled) == 3


def test_of_recorded_calls_only_the_outermost_count() -> None:
    inner = [row("a.py(3): h", 0, 60, 3), row("a.py(4): i", 0, 60, 3)]
    assert of(python_function=[row("a.py(1): f", 0, 100, 2), row("a.py(2): g", 0, 60, 3), *inner]) == 2


def test_a_trace_without_threads_has_none() -> None:
    assert of() == NO_THREAD
