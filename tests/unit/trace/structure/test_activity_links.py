import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kineto_trace.analysis.kernels.kernel_views import kernels_by_op
from kineto_trace.base.array_types import NOTHING
from kineto_trace.decode.iterations import add_iterations, reported_marks
from kineto_trace.formats.perfetto.perfetto_reader import load_perfetto
from kineto_trace.formats.perfetto.perfetto_writer import write_perfetto
from kineto_trace.formats.text_sinks import TextSink
from kineto_trace.kernel_traits.gpu_vendors import GpuVendor
from kineto_trace.model.context import Context
from kineto_trace.model.trace import StringTable, Trace
from kineto_trace.structure.activity_links import (
    call_owners,
    device_properties,
    gpu_vendor,
    owners,
    steps,
    vendor_words,
    whole_steps,
)
from support.trace_files import traces
from support.trace_files.chrome_files import event, load, load_events, written
from support.trace_files.traces import trace

MS = 1_000_000
MI300X = {"id": 0, "name": "AMD Instinct MI300X", "numSms": 304}


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
