"""Do HTA and the TensorBoard plug-in see in our traces what they see in Kineto's own of the same workloads?

usage: read_traces.py FOLDER      (in an environment with HolisticTraceAnalysis and torch-tb-profiler; `make campaign`)

The two are traces of different runs: numbers of kernels and launches must agree, times need not.
"""

import logging
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

WORKLOADS = ("mlp", "graph", "streams")
# HTA takes these for kernels; Kineto's traces were made without cuda_sync.
SYNCHRONIZATIONS = {"Stream Wait Event", "Event Sync", "Stream Sync", "Context Sync"}


def with_hta(trace: Path) -> dict[str, Any]:
    """What HTA counts."""
    from hta.trace_analysis import TraceAnalysis

    analysis = TraceAnalysis(trace_files={0: str(trace)})
    _, kernels = analysis.get_gpu_kernel_breakdown(visualize=False, num_kernels=1000)
    breakdown = analysis.get_temporal_breakdown(visualize=False)
    (launches,) = analysis.get_cuda_kernel_launch_stats(visualize=False).values()
    return {
        "kernel names": sorted(set(kernels["name"]) - SYNCHRONIZATIONS),
        "kernel launches": len(launches),
        "temporal breakdown of": len(breakdown),
    }


def with_plugin(trace: Path) -> dict[str, Any]:
    """What the TensorBoard plug-in counts."""
    from torch_tb_profiler.io.cache import Cache
    from torch_tb_profiler.profiler.loader import RunLoader

    run = trace.parent / "run"
    run.mkdir()
    shutil.copy(trace, run / "host_1.1700000000000.pt.trace.json.gz")
    (profile,) = RunLoader("run", str(run), Cache()).load().profiles.values()
    data = profile.kernel_table["data"]
    calls = [column["name"] for column in data["columns"]].index("Calls")
    return {"kernel calls": {row[0]: row[calls] for row in data["rows"]}}


def main() -> int:
    """Prints one line for each reader and workload; 1 if a pair differs."""
    folder, differ = Path(sys.argv[1]).resolve(), 0  # HTA refuses a relative path
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    for workload in WORKLOADS:
        for reader in (with_hta, with_plugin):
            ours, kinetos = (reader(folder / f"{who}-{workload}" / "trace.json.gz") for who in ("ours", "kineto"))
            verdict = "same" if ours == kinetos else f"DIFFERS\n  ours    {ours}\n  kineto  {kinetos}"
            print(f"{reader.__name__:<12} {workload:<8} {verdict}")
            differ += ours != kinetos
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
