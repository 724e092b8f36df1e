"""Kernels of AMD's and Intel's GPUs in the views, as their profilers write them."""

from typing import Any

import kineto_trace as kt
import pytest
from kineto_trace.model.trace import Trace
from support.trace_files.chrome_files import event, load_events

MI300X: dict[str, Any] = {
    "id": 0, "name": "AMD Instinct MI300X", "totalGlobalMem": 206141652992, "computeMajor": 9, "computeMinor": 4,
    "maxThreadsPerMultiprocessor": 2048, "warpSize": 64, "numSms": 304, "maxSharedMemoryPerMultiProcessor": 65536,
}  # fmt: skip
MAX_1550 = {"id": 0, "name": "Intel(R) Data Center GPU Max 1550", "totalGlobalMem": 64 << 30}
INPUTS = {"Input Dims": [[512, 1024], [1024, 256]], "Input type": ["float", "float"]}
TENSILE = "Cijk_Alik_Bljk_SB_Bias_AS_SAV_UserArgs_MT64x16x32_MI16x16x1_SN"


def launched(call: str, category: str, kernel: str, device: int, properties: dict[str, Any], **args: Any) -> Trace:
    shared = {"correlation": 7, "External id": 1}
    return load_events(
        event("cpu_op", "aten::mm", 0, 100, pid=4, tid=4, args={"External id": 1, **INPUTS}),
        event(category, call, 10, 5, pid=4, tid=4, args=shared),
        event("kernel", kernel, 50, 40, pid=device, tid=1, args={**shared, "device": device, "stream": 1, **args}),
        deviceProperties=[properties],
    )


@pytest.mark.parametrize(
    ("call", "grid", "blocks"),
    [
        ("hipLaunchKernel", [608, 1, 1], 2.0),
        ("hipExtModuleLaunchKernel", [608 * 256, 1, 1], 2.0),  # in threads
        ("hipGraphLaunch", [608, 1, 1], None),
    ],
)
def test_amds_grids_count_what_their_call_counts(call: str, grid: list[int], blocks: float | None) -> None:
    trace = launched(call, "cuda_runtime", "k", 2, MI300X, grid=grid, block=[256, 1, 1])
    found = kt.run_view("kernels", trace)
    assert [row["blocks_per_sm"] for row in found.rows()] == [blocks]
    assert [row["occupancy_pct"] for row in found.rows()] == [None]
    (note,) = found.notes
    assert ("register counts" in note) if blocks else ("compute unit" in note)


def test_float32_on_matrix_cores_of_amd_is_float32() -> None:
    trace = launched("hipExtModuleLaunchKernel", "cuda_runtime", TENSILE, 2, MI300X)
    (row,) = kt.run_view("operator_flops", trace).rows()
    assert (row["precision"], row["peak_tflop_s"]) == ("fp32", 163.4)
    (gpu,) = kt.run_view("gpu_summary", trace).rows()
    assert (gpu["name"], gpu["compute_capability"]) == ("AMD Instinct MI300X", None)


def test_how_much_of_intels_matrix_engines_is_used_is_unknown() -> None:
    trace = launched("urEnqueueKernelLaunch", "xpu_runtime", "gemm_kernel", 0, MAX_1550)
    assert kt.run_view("overview", trace).rows()[0]["tensor_core_pct"] is None
    assert kt.run_view("kernels", trace).rows()[0]["tensor_cores"] is None
    assert kt.run_view("operators", trace).rows()[0]["tensor_core_self_pct"] is None
    assert kt.run_view("kernel_precision", trace).rows()[0]["tensor_core_us"] is None
    (row,) = kt.run_view("operator_flops", trace).rows()
    assert (row["precision"], row["peak_tflop_s"]) == ("fp32", 26.2)
    assert "Xe core" in kt.run_view("kernels", trace).notes[0]


def test_intels_kernels_and_collectives_are_told_by_their_names() -> None:
    names = (
        "gen_conv",
        "at::native::xpu::UnrolledElementwiseKernel<at::native::xpu::Add>",
        "conv_reorder",
        "oneccl_reduce_base<float, 2>",
    )
    rows = [
        event("kernel", name, 100 * at, 90, pid=0, tid=1, args={"device": 0, "stream": 1, "correlation": at})
        for at, name in enumerate(names)
    ]
    trace = load_events(*rows, deviceProperties=[MAX_1550])
    causes = kt.run_view("time_causes", trace).rows()
    computed = {row["cause"] for row in causes if row["total_us"] == 90}
    assert computed == {"matrix_products", "elementwise", "other_kernels", "communication"}


def test_a_collective_of_rccls_one_kernel_is_unknown_without_arguments() -> None:
    name = "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)"
    trace = launched("hipExtLaunchKernel", "cuda_runtime", name, 2, MI300X)
    assert [row["collective"] for row in kt.run_view("collectives", trace).rows()] == ["unknown"]
