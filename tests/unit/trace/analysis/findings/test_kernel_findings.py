"""Findings that go by hardware counters, and estimates that give way to them."""

from typing import Any

import pytest
from kineto_trace.analysis.counters.roofline import OWN_POWER
from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.findings.finding_views import findings
from kineto_trace.model.context import Context
from support.trace_files.simulated.sampled_gpu import H200, MS, Run, sampled

LABELS = ["DRAM", "Tensor pipe", "SM busy", "FMA pipe"]
GEMM, SGEMM = "nvjet_tst_256x128_64x4_2x1_v_bz_coopA_NNT", "ampere_sgemm_128x64_tn"
ADD, SOFTMAX = "vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>", "cunn_SoftMaxForward<8, float>"
COPY_LIKE = {"DRAM": 85.0, "Tensor pipe": 0.0, "SM busy": 97.0, "FMA pipe": 5.0}
PRODUCT = {"DRAM": 18.0, "Tensor pipe": 93.0, "SM busy": 96.0, "FMA pipe": 2.0}
WAITING = {"DRAM": 20.0, "Tensor pipe": 0.0, "SM busy": 95.0, "FMA pipe": 12.0}
FEW_BLOCKS = {"DRAM": 3.0, "Tensor pipe": 10.0, "SM busy": 12.0, "FMA pipe": 1.0}


def found(
    *kernels: tuple[str, dict[str, float]], labels: list[str] | None = None, **changes: Any
) -> dict[str, Finding]:
    """The findings of a trace in which these kernels run for 10 ms each, again and again; all from aten::mm."""
    runs, calls, ops = [], [], []
    for at in range(40):
        name, counters = kernels[at % len(kernels)]
        runs.append(Run(name=name, start=at * 10 * MS, duration=10 * MS - 1000, counters=counters, correlation=at + 1))
        calls.append({"name": "cudaLaunchKernel", "start": at * 1000 + 10, "duration": 10, "correlation": at + 1})
        ops.append({"name": "aten::mm", "start": at * 1000, "duration": 100, "finished": 1, "id": at + 1})
    rows = {"cuda_runtime": calls, "cpu_op": ops}
    made = sampled(
        runs, LABELS if labels is None else labels, length_ns=400 * MS, noise=0, spread=0, rows=rows, **changes
    )
    return {each.name: each for each in findings(Context(made)).findings}


def test_elementwise_kernels_are_told_with_how_much_of_the_memorys_peak_they_use() -> None:
    told = found((ADD, COPY_LIKE), (GEMM, PRODUCT))
    assert "50 % of the GPU's work, measured at 85 % of DRAM's peak: memory-bound" in told["elementwise"].evidence
    assert "memory_bound" not in told  # no second finding of the same kernels


def test_elementwise_kernels_that_wait_are_told_as_such() -> None:
    told = found((ADD, WAITING), (GEMM, PRODUCT))
    assert "measured at 20 % of DRAM's peak: latency-bound" in told["elementwise"].evidence
    assert "latency_bound" not in told


def test_other_kernels_that_are_bound_by_memory_have_a_finding() -> None:
    told = found((SOFTMAX, COPY_LIKE), (GEMM, PRODUCT))["memory_bound"]
    assert told.guess and told.kernels == (SOFTMAX,) and told.advice.startswith("Fuse them ")
    assert "50 % of the GPU's work, measured at 85 % of DRAM's peak" in told.evidence


def test_products_that_use_the_pipe_as_well_as_they_can_are_told_what_would_be_faster() -> None:
    told = found((GEMM, PRODUCT))["compute_bound"]
    assert "measured at 93 % of the tensor pipe's peak and 18 % of DRAM's peak" in told.evidence
    assert told.advice.startswith("Use float8 ") and "TF32" not in told.advice
    older = ({**H200, "name": "NVIDIA A100-SXM4-80GB", "computeMajor": 8, "computeMinor": 0},)
    assert "compute_bound" not in found((GEMM, PRODUCT), devices=older)  # it has nothing narrower to multiply


def test_kernels_that_use_nothing_well_wait_for_latency() -> None:
    told = found((SOFTMAX, WAITING), (GEMM, PRODUCT))["latency_bound"]
    assert told.guess and "measured at 20 % of the peak of the unit that they use most" in told.evidence
    assert told.saving_ns == pytest.approx(200 * MS * (1 - 20 / 60), rel=0.01)


def test_multiprocessors_without_work_are_small_grids_whatever_the_blocks_say() -> None:
    told = found((GEMM, FEW_BLOCKS))["small_grids"]
    assert "each multiprocessor busy for 12 % of the time (measured)" in told.evidence
    assert told.saving_ns == pytest.approx(400 * MS * 0.88, rel=0.01)


def test_few_multiprocessors_that_use_all_of_the_memory_are_no_small_grid() -> None:
    told = found((GEMM, {**FEW_BLOCKS, "DRAM": 88.0}))
    assert "small_grids" not in told and "memory_bound" in told


def test_a_full_gpu_has_no_small_grids_whatever_the_blocks_say(monkeypatch: pytest.MonkeyPatch) -> None:
    from kineto_trace.analysis.findings import kernel_findings
    from kineto_trace.analysis.kernels.precision_views import LaunchFigures

    def few(context: Context) -> LaunchFigures:
        import numpy as np

        values = np.full(len(context.trace.table("kernel")), 0.3)
        return LaunchFigures(values, values, 100 * values)

    monkeypatch.setattr(kernel_findings, "launch_figures", few)
    assert "small_grids" in found((GEMM, PRODUCT), labels=["DRAM"])
    assert "small_grids" not in found((GEMM, PRODUCT))


def test_kernels_that_use_the_tensor_pipe_are_not_said_to_lack_it() -> None:
    assert "no_tensor_cores" in found((SGEMM, PRODUCT), labels=["DRAM"])
    assert "no_tensor_cores" not in found((SGEMM, PRODUCT))
    told = found((SGEMM, {**PRODUCT, "Tensor pipe": 0.0, "FMA pipe": 80.0}))["no_tensor_cores"]
    assert "they used 0 % of the tensor pipe's peak" in told.evidence


THROTTLED = {"SM clock": 1.4e9, "Power": 700.0, "Power limit": 700.0, "Throttled by power": 1.0}
FREE = {"SM clock": 1.98e9, "Power": 500.0, "Power limit": 700.0, "Throttled by power": 0.0}


def test_clocks_that_are_held_down_have_a_finding_with_how_much_and_how_long() -> None:
    names = [*THROTTLED, "DRAM"]
    told = found((GEMM, THROTTLED), (SOFTMAX, FREE), labels=names)["throttled_clock"]
    assert told.title == "The GPU's clock is held down by power" and told.guess
    assert told.evidence.startswith(
        "GPU 0: throttled by power for 50 % of the steps' time, to 1.4 of 1.98 GHz, 700 W of 700 W"
    )
    assert told.saving_ns == pytest.approx(200 * MS * (1 - 1.4 / 1.98), rel=0.02)
    assert "nvidia-smi -pl" in told.advice
    assert told.evidence.endswith(OWN_POWER)


def test_throttling_without_a_lower_clock_is_no_finding() -> None:
    names = [*THROTTLED, "DRAM"]
    assert "throttled_clock" not in found((GEMM, {**THROTTLED, "SM clock": 1.97e9}), (SOFTMAX, FREE), labels=names)
    assert "throttled_clock" not in found((GEMM, FREE), labels=names)


def test_findings_without_counters_are_as_ever() -> None:
    told = found((ADD, COPY_LIKE), (SGEMM, PRODUCT), labels=[])
    assert {"elementwise", "no_tensor_cores"} <= set(told)
    assert not {"memory_bound", "compute_bound", "latency_bound", "throttled_clock"} & set(told)
    assert "measured at" not in told["elementwise"].evidence
