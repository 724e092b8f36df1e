"""The views of counters by GPU, kernel, operator, annotation and module."""

import json
from typing import Any

import numpy as np
import pytest
from kineto_trace.analysis.counters.hardware_counter_views import (
    NO_LINKS,
    NO_STEPS,
    NO_WORK,
    annotation_counters,
    collective_counters,
    gpu_counters,
    gpu_steps,
    kernel_counters,
    module_counters,
    op_counters,
    step_counters,
)
from kineto_trace.analysis.counters.sampled_counters import NO_COUNTERS
from kineto_trace.model.context import Context
from kineto_trace.model.trace import StringTable, Trace
from kineto_trace.structure.module_calls import NO_MODULES
from kineto_trace.view_api.view import View
from support.trace_files.simulated.sampled_gpu import MS, Run, counter_table, sampled
from support.trace_files.traces import START_NS, trace

NOTHING: dict[str, Any] = {}
THREAD = 1
LABELS = ["NVLink received", "NVLink sent", "PCIe read"]
KERNEL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ELEMENTS = 256 << 20


def training() -> Trace:
    """Two modules in a third: the first one copies, the second one multiplies; and a backward of the second one."""
    runs: list[Run] = []
    python: list[Any] = []
    ops: list[Any] = []
    calls: list[Any] = []
    notes: list[Any] = []
    for step in range(20):
        at, work = step * 1000, step * 40 * MS
        python += [
            {"name": "nn.Module: Model_0", "start": at, "duration": 400, "thread": THREAD, "module": 0, "depth": 0,
             "parent": -1},
            {"name": "nn.Module: Copy_0", "start": at + 10, "duration": 100, "thread": THREAD, "module": 1, "depth": 1,
             "parent": 3 * step},
            {"name": "nn.Module: Linear_0", "start": at + 200, "duration": 100, "thread": THREAD, "module": 2,
             "depth": 1, "parent": 3 * step},
        ]  # fmt: skip
        notes.append({"name": "data" if step % 2 else "even", "start": at, "duration": 150, "thread": THREAD,
                      "id": 1000 + step, "finished": 1})  # fmt: skip
        starts = (at + 20, at + 210, at + 500)
        for part, (name, start) in enumerate(zip(("aten::copy_", "aten::mm", "MmBackward0"), starts, strict=True)):
            sequence = {1: step, 2: step}.get(part, -1)
            ops.append({"name": name, "start": start, "duration": 50, "thread": THREAD + (part == 2), "finished": 1,
                        "id": 3 * step + part + 1, "sequence": sequence, "scope": int(part == 2), "torch_thread": 1,
                        "forward_thread": int(part == 2)})  # fmt: skip
            correlation = 3 * step + part + 1
            calls.append({"name": "cudaLaunchKernel", "start": start + 5, "duration": 10,
                          "thread": THREAD + (part == 2), "correlation": correlation})  # fmt: skip
            kernel, dram, tensor = (("copy", 85.0, 0.0), ("gemm", 20.0, 90.0), ("gemm", 20.0, 90.0))[part]
            runs.append(Run(name=kernel, start=work + part * 12 * MS, duration=10 * MS, correlation=correlation,
                            counters={"DRAM": dram, "Tensor pipe": tensor}))  # fmt: skip
    rows: dict[str, Any] = {"python_function": python, "cpu_op": ops, "cuda_runtime": calls, "user_annotation": notes}
    return sampled(runs, ["DRAM", "Tensor pipe"], length_ns=800 * MS, rows=rows, noise=0, spread=0)


def values(of: View, made: Trace, *keys: str, **options: Any) -> dict[tuple[Any, ...], float | None]:
    return {
        tuple(row[key] for key in (*keys, "counter")): None if row["value"] is None else round(row["value"])
        for row in of(Context(made), **options).rows()
    }


def test_kernels_have_a_row_for_each_counter_those_with_the_most_time_first() -> None:
    found = values(kernel_counters, training(), "name")
    assert list(found.items()) == [
        (("gemm", "DRAM"), 20), (("gemm", "Tensor pipe"), 90), (("copy", "DRAM"), 85), (("copy", "Tensor pipe"), 0),
    ]  # fmt: skip
    first = kernel_counters(Context(training())).rows()[0]
    assert (first["method"], first["time_us"], first["shared_pct"], first["why"]) == ("direct", 400_000, 0, None)


def test_one_counter_can_be_chosen() -> None:
    assert list(values(kernel_counters, training(), "name", counter="dram")) == [("gemm", "DRAM"), ("copy", "DRAM")]


def test_operators_have_the_counters_of_their_kernels() -> None:
    assert values(op_counters, training(), "name", counter="DRAM") == {
        ("aten::copy_", "DRAM"): 85, ("aten::mm", "DRAM"): 20, ("MmBackward0", "DRAM"): 20,
    }  # fmt: skip


def test_annotations_have_the_counters_of_what_was_launched_in_them() -> None:
    assert values(annotation_counters, training(), "name", counter="DRAM") == {
        ("even", "DRAM"): 85, ("data", "DRAM"): 85, (None, "DRAM"): 20,
    }  # fmt: skip


def test_modules_have_those_of_the_modules_inside_and_of_their_backward() -> None:
    found = values(module_counters, training(), "path", "part", counter="DRAM")
    assert found == {
        ("Model_0", "forward", "DRAM"): pytest.approx((85 + 20) / 2, abs=1),
        ("Model_0/Copy_0", "forward", "DRAM"): 85,
        ("Model_0/Linear_0", "forward", "DRAM"): 20,
        ("Model_0", "backward", "DRAM"): 20,
        ("Model_0/Linear_0", "backward", "DRAM"): 20,
    }


def test_a_kernel_without_values_has_one_row_with_the_reason() -> None:
    runs = [Run(name="short", start=at * 5 * MS, duration=MS // 10, counters={"DRAM": 50}) for at in range(10)]
    (row,) = kernel_counters(Context(sampled(runs, ["DRAM", "Tensor pipe"], length_ns=50 * MS))).rows()
    assert (row["counter"], row["value"], row["method"]) == (None, None, "not stated")
    assert row["why"] == "not enough evidence: it ran alone for only 1 samples; 50 are needed"


def test_each_gpu_and_counter_has_a_row_about_its_samples() -> None:
    strings = StringTable()
    value = np.array([10.0, 20, 30, 40, float("nan")])
    half = {"label": "DRAM", "device": 1, "start": START_NS + 100 * np.arange(5), "duration": np.full(5, 100)}
    table = counter_table([{**half, "value": value, "metric": "dram__x"}], strings)
    made = trace(NOTHING, strings=tuple(strings.strings), tables={"counter": table}, length_ns=1000)
    found = gpu_counters(Context(made))
    (row,) = found.rows()
    assert (row["device"], row["counter"], row["metric"], row["unit"]) == (1, "DRAM", "dram__x", "%")
    assert (row["mean"], row["p50"], row["max"], row["samples"]) == (25, 25, 40, 4)
    assert (row["sample_us"], row["unsampled_pct"]) == (pytest.approx(0.1), pytest.approx(60))
    assert found.notes == ("1 of 5 samples are left out: their value is missing or impossible (DRAM)",)


@pytest.mark.parametrize("view", [gpu_counters, kernel_counters, op_counters, annotation_counters, module_counters])
def test_a_trace_without_samples_says_how_to_record_them(view: View) -> None:
    found = view(Context(trace(NOTHING)))
    assert (len(found), found.notes) == (0, (NO_COUNTERS,))


def test_samples_of_nothing_but_nan_are_told() -> None:
    strings = StringTable()
    column = {"label": "DRAM", "device": 0, "start": START_NS + 100 * np.arange(4), "duration": np.full(4, 100)}
    table = counter_table([{**column, "value": np.full(4, np.nan)}], strings)
    context = Context(trace(NOTHING, strings=tuple(strings.strings), tables={"counter": table}, length_ns=1000))
    (row,) = gpu_counters(context).rows()
    assert (row["samples"], row["mean"], row["unsampled_pct"]) == (0, None, 100)
    assert kernel_counters(context).notes[-1] == NO_WORK


def test_a_trace_without_modules_says_so() -> None:
    runs = [Run(name="copy", start=0, duration=50 * MS, counters={"DRAM": 80})]
    assert module_counters(Context(sampled(runs, ["DRAM"], length_ns=50 * MS))).notes == (NO_MODULES,)


def job(*, length: int = 10 * MS, labels: list[str] | None = None) -> Trace:
    """All-reduces of 512 MiB over two ranks beside a computing kernel on another stream."""
    described = {"Collective name": "allreduce", "In msg nelems": ELEMENTS, "Out msg nelems": ELEMENTS,
                 "dtype": "BFloat16", "Group size": 2, "Process Group Name": "0",
                 "Process Group Ranks": [0, 1]}  # fmt: skip
    rate = {"NVLink received": 150e9, "NVLink sent": 150e9, "PCIe read": 1e9}
    begins = np.cumsum(np.full(200, 2 * length)) + np.random.default_rng(3).integers(0, length // 2, 200)
    runs = [
        run
        for at, start in enumerate(begins.tolist())
        for run in (
            Run(name=KERNEL, start=start, duration=length, counters=rate, correlation=2 * at + 1),
            Run(name="gemm", start=start - length // 4, duration=length, stream=8, correlation=2 * at + 2),
        )
    ]
    ops = [{"name": "nccl:all_reduce", "start": at * 1000, "duration": 900, "finished": 1, "id": at + 1,
            "inputs": json.dumps(described)[1:-1]} for at in range(200)]  # fmt: skip
    calls = [{"name": "cudaLaunchKernel", "start": at * 1000 + 5, "duration": 10, "correlation": 2 * at + 1}
             for at in range(200)]  # fmt: skip
    return sampled(runs, labels or LABELS, length_ns=450 * length, rows={"cpu_op": ops, "cuda_runtime": calls})


@pytest.mark.parametrize("length", [10 * MS, MS // 2], ids=["long", "shorter than samples"])
def test_the_rates_of_links_are_those_while_collectives_run_whatever_else_does(length: int) -> None:
    (row,) = collective_counters(Context(job(length=length))).rows()
    assert (row["collective"], row["group_size"], row["bytes"], row["calls"]) == ("all_reduce", 2, 2 * ELEMENTS, 200)
    assert row["nvlink_sent_gb_s"] == pytest.approx(150, rel=0.03)
    assert row["busbw_gb_s"] == pytest.approx(2 * ELEMENTS / length)
    assert row["nvlink_pct"] == pytest.approx(100 * row["nvlink_sent_gb_s"] / row["busbw_gb_s"])
    assert row["pcie_write_gb_s"] is None and row["why"] is None


def test_other_counters_than_those_of_links_say_what_is_missing() -> None:
    found = collective_counters(Context(job(labels=["DRAM"])))
    assert (len(found), found.notes) == (0, (NO_LINKS,))


def test_traces_without_samples_or_collectives_say_so() -> None:
    assert collective_counters(Context(trace({}))).notes == (NO_COUNTERS,)
    runs = [Run(name="gemm", start=0, duration=50 * MS)]
    found = collective_counters(Context(sampled(runs, LABELS, length_ns=50 * MS)))
    assert found.notes == ("the trace has no collectives on a sampled GPU",)


def trained(steps: int = 6) -> Trace:
    """Steps of 20 ms on the host; the GPU is 5 ms behind, computes for 10 ms and is idle for 10 ms."""
    runs, calls, notes, ops = [], [], [], []
    for step in range(steps):
        at = step * 20 * MS
        notes += [
            {"name": f"ProfilerStep#{step}", "start": at, "duration": 20 * MS, "id": step + 1, "finished": 1},
            {"name": "Optimizer.step#SGD.step", "start": at + 2 * MS, "duration": MS, "id": 100 + step, "finished": 1},
        ]
        for part, launched in enumerate((MS, 2 * MS + MS // 2)):
            correlation = 2 * step + part + 1
            calls.append({"name": "cudaLaunchKernel", "start": at + launched, "duration": 1000,
                          "correlation": correlation})  # fmt: skip
            runs.append(Run(name=("gemm", "adam")[part], start=at + 5 * MS + part * 6 * MS, duration=(6, 4)[part] * MS,
                            counters={"DRAM": (20, 80)[part]}, correlation=correlation))  # fmt: skip
        ops.append({"name": "aten::mm", "start": at, "duration": 2 * MS, "finished": 1, "id": 500 + step})
    rows: dict[str, Any] = {"cuda_runtime": calls, "user_annotation": notes, "cpu_op": ops}
    return sampled(runs, ["DRAM"], length_ns=steps * 20 * MS, rows=rows, noise=0, spread=0)


def test_a_step_on_the_gpu_begins_with_its_first_activity_and_ends_with_the_next_ones() -> None:
    found = gpu_steps(Context(trained()), 0)
    begins = [(start - START_NS) // MS for start in found.start.tolist()]
    assert begins == [5, 25, 45, 65, 85, 105]
    assert (found.end[:-1] == found.start[1:]).all()
    assert (int(found.end[-1]) - START_NS) // MS == begins[-1] + 10


def test_a_steps_value_is_the_mean_over_its_time_on_the_gpu() -> None:
    rows = [row for row in step_counters(Context(trained())).rows() if row["phase"] is None]
    assert (rows[1]["step"], rows[1]["time_us"], rows[1]["sampled_pct"]) == ("0", 20_000, 100)
    assert rows[1]["value"] == pytest.approx((6 * 20 + 4 * 80) / 20)
    assert rows[0]["step"] == "average"


def test_the_counters_of_one_step_stand_together() -> None:
    values = {"DRAM": 20, "SM busy": 90}
    runs = [Run(name="gemm", start=at * 10 * MS, duration=10 * MS, counters=values, correlation=at + 1)
            for at in range(3)]  # fmt: skip
    calls = [{"name": "cudaLaunchKernel", "start": run.start, "duration": 1000, "correlation": run.correlation}
             for run in runs]  # fmt: skip
    notes = [{"name": f"ProfilerStep#{at}", "start": at * 10 * MS, "duration": 10 * MS, "finished": 1, "id": at + 1}
             for at in range(3)]  # fmt: skip
    rows: dict[str, Any] = {"cuda_runtime": calls, "user_annotation": notes}
    measured = sampled(runs, ["DRAM", "SM busy"], length_ns=30 * MS, rows=rows, noise=0, spread=0)
    found = [row["step"] for row in step_counters(Context(measured)).rows() if row["phase"] is None]
    assert found == ["average", "average", "0", "0", "1", "1", "2", "2"]


def test_phases_have_the_work_that_was_launched_in_them() -> None:
    rows = {row["phase"]: row for row in step_counters(Context(trained())).rows() if row["step"] == "all"}
    assert rows["optimizer"]["value"] == pytest.approx(80) and rows["other"]["value"] == pytest.approx(20)
    assert rows["optimizer"]["time_us"] == 6 * 4000


def test_a_trace_without_steps_says_so() -> None:
    runs = [Run(name="copy", start=0, duration=50 * MS, counters={"DRAM": 80})]
    assert step_counters(Context(sampled(runs, ["DRAM"], length_ns=50 * MS))).notes == (NO_STEPS,)
    assert step_counters(Context(trace({}))).notes == (NO_COUNTERS,)
