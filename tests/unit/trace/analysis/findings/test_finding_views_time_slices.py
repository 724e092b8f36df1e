"""Whether another program that takes turns on the GPU is told from kernels that merely differ."""

from collections.abc import Sequence
from typing import Any

import pytest
from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.findings.finding_views import findings
from kineto_trace.model.context import Context
from support.trace_files.traces import trace

US, SLICE_US = 1000, 2400
Row = dict[str, Any]


def ran(
    extra_us: Sequence[float],
    *,
    names: int = 4,
    gap_us: Sequence[float] = (),
    prefix: str = "kernel",
    larger: bool = False,
) -> list[Finding]:
    """Kernels of 100 us, launched long ahead, every fifth one with the next of extra_us; some after the next gap_us.

    larger: those with extra time have a larger grid.
    """
    kernels: list[Row] = []
    at, gaps, extra = 0.0, list(gap_us), list(extra_us)
    for number in range(max(5 * len(extra_us), 100)):
        if gaps and number % 5 == 2:
            at += gaps.pop()
        length = 100 + (extra.pop() if extra and number % 5 == 0 else 0)
        name = f"{prefix}_{number % names}"
        kernels.append(
            {
                "name": name,
                "start": int(at * US),
                "duration": int(length * US),
                "correlation": number + 1,
                "grid_x": 2 if larger and length > 100 else 1,
            }
        )
        at += length
    calls = [
        {"name": "cudaLaunchKernel", "start": -10 * US, "duration": US, "thread": 1, "correlation": row["correlation"]}
        for row in kernels
    ]
    made = Context(trace({"kernel": kernels, "cuda_runtime": calls}, length_ns=int(at * US)))
    return [finding for finding in findings(made).findings if finding.name == "gpu_shared"]


def test_slices_that_are_missing_in_kernels_and_between_them_are_another_program() -> None:
    (finding,) = ran([SLICE_US + number for number in range(20)], gap_us=[SLICE_US] * 6)
    assert finding.title == "Another program takes turns with this one on the GPU"
    assert finding.saving_ns == pytest.approx(26 * SLICE_US * US, rel=0.01)
    assert finding.evidence.startswith("26 slices of 2.41 ms")


def test_kernels_that_take_longer_by_different_times_have_more_to_do() -> None:
    assert ran([600 + 300 * number for number in range(20)]) == []


def test_a_few_long_kernels_are_nothing() -> None:
    assert ran([SLICE_US] * 5) == []


def test_two_kinds_of_kernels_that_come_in_two_sizes_are_nothing() -> None:
    assert ran([SLICE_US] * 20, names=2) == []


def test_kernels_with_larger_grids_have_more_to_do() -> None:
    assert ran([SLICE_US] * 20, larger=True) == []


def test_matrix_products_that_may_differ_in_size_prove_nothing() -> None:
    assert ran([SLICE_US] * 20, prefix="nvjet_gemm") == []


def test_kernels_of_one_length_are_nothing() -> None:
    assert ran([]) == []
