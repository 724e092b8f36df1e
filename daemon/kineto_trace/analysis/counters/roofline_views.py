"""The view of what bounds kernels and operators: the roofline, by measurement."""

from typing import Literal

import numpy as np

from kineto_trace.analysis.counters.hardware_counter_views import as_columns, notes
from kineto_trace.analysis.counters.roofline import kernel_roofline, op_roofline
from kineto_trace.analysis.counters.sampled_counters import NO_COUNTERS
from kineto_trace.model.context import Context
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

By = Literal["kernel", "op"]


@view(
    "roofline",
    columns(
        ("name", "text", "", "kernel, copy or fill; with by=op the operator, missing for work without one"),
        ("device", "int", "", "GPU index in the process"),
        ("time_us", "float", "us", "sum of the durations of its GPU activities"),
        ("share_pct", "float", "%", "share of the time of all activities of this GPU"),
        ("verdict", "text", "", "memory-bound, compute-bound, latency-bound or not known"),
        ("why", "text", "", "the numbers that the verdict comes from, or what is missing for one"),
        ("dram_pct", "float", "%", "use of the memory, of its peak"),
        ("dram_error_pct", "float", "%", "95 % interval of that, plus or minus, in points"),
        ("dram_gb_s", "float", "GB/s", "bytes read and written: counted, else dram_pct of the peak"),
        ("peak_gb_s", "float", "GB/s", "the most that the memory of this GPU can do, by its data sheet"),
        ("tensor_pct", "float", "%", "use of the tensor pipe, of its peak"),
        ("cores_pct", "float", "%", "use of ordinary cores: the FMA pipe or instructions, the larger one"),
        ("compute_pct", "float", "%", "the larger one of tensor_pct and cores_pct"),
        ("sm_busy_pct", "float", "%", "time in which a multiprocessor has work"),
        ("occupancy_pct", "float", "%", "warps on multiprocessors that have work, of the most that fit"),
        ("precision", "text", "", "in which it computes, by the kernel's name or its operator's inputs"),
        (
            "speed_tflop_s",
            "float",
            "TFLOP/s",
            "what tensor_pct stands for in that precision, at the data sheet's clock",
        ),
        ("peak_tflop_s", "float", "TFLOP/s", "the most that this GPU can do in that precision, by its data sheet"),
        ("intensity_flop_byte", "float", "FLOP/byte", "speed_tflop_s by dram_gb_s"),
    ),
    nothing=NO_COUNTERS,
)
def roofline(context: Context, *, by: By = "kernel") -> Answer:
    """What bounds each kernel or operator, by measurement: memory, computing, or neither (latency).

    Counters of kernels are those of the view kernel_counters. The larger one of the use of DRAM and of the units that
    compute decides if it is 60 % of its peak or more, the mark of Nsight Compute's rule for latency. A row is
    latency-bound if both are below it, or multiprocessors have work for less than 60 % of the time. It takes a value of
    all units that the work may use: the tensor pipe, and for other kernels than those that multiply on tensor cores
    also ordinary cores (kinetoctl trace --counters=tensor); otherwise the verdict is not known. Nor is it for
    collectives and copies between host and GPU, whose speed is that of a link (view collective_counters).

    Options:
    - by: kernel, or op for operators.
    """
    found = context.get(kernel_roofline if by == "kernel" else op_roofline)
    strings, total = context.trace.strings, dict[int, int]()
    for point in found:
        total[point.device] = total.get(point.device, 0) + point.time_ns
    rows = [
        {
            "name": strings[point.group] if point.group < len(strings) else None,
            "device": point.device,
            "time_us": point.time_ns / 1000,
            "share_pct": 100 * point.time_ns / total[point.device],
            "verdict": point.verdict,
            "why": point.why,
            "dram_pct": point.use.dram,
            "dram_error_pct": point.dram_error,
            "dram_gb_s": point.bytes_s / 1e9,
            "peak_gb_s": point.peak_bytes_s / 1e9,
            "tensor_pct": point.use.tensor,
            "cores_pct": point.use.cores,
            "compute_pct": point.use.compute,
            "sm_busy_pct": point.use.sm_busy,
            "occupancy_pct": point.use.occupancy,
            "precision": point.traits.precision,
            "speed_tflop_s": point.flop_s / 1e12,
            "peak_tflop_s": point.peak_flop_s / 1e12,
            "intensity_flop_byte": point.intensity,
        }
        for point in found
    ]
    told = notes(context)
    if rows and np.isnan([point.peak_bytes_s for point in found]).all():
        told.append("how fast this GPU can be is not in the table of this version: rates are missing")
    return Answer(as_columns(roofline, rows), told)
