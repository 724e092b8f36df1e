"""NVLink and PCIe beside collectives."""

import json

import numpy as np
import pytest
from kineto_trace.analysis.counters.link_views import NO_LINKS, collective_counters
from kineto_trace.analysis.counters.sampled_counters import NO_COUNTERS
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Trace
from support.trace_files.simulated.sampled_gpu import MS, Run, sampled
from support.trace_files.traces import trace

LABELS = ["NVLink received", "NVLink sent", "PCIe read"]
KERNEL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ELEMENTS = 256 << 20


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
    assert found.notes == ("the trace has no collectives on a GPU that has samples",)
