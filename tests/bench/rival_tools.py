"""Measures HTA, torch-tb-profiler and json on one trace, in their own Python, for comparison by traces.py.

    PYTHON tests/bench/rival_tools.py TOOL FILE [--step NUMBER] [--operator NAME]

Prints one JSON object: {measurement: {"seconds": CPU seconds, "wall": seconds} or {"error": text}}, and "peak_bytes",
by how much the process's memory grew while it loaded. Imports are not counted. HTA's critical path draws nothing; its
sequences write their overlaid trace, as they always do.
"""

import argparse
import contextlib
import gzip
import io
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

Measured = dict[str, Any]


def measure(found: Measured, name: str, work: Callable[[], Any]) -> Any:
    """Runs the function once and records its times; an exception it raises becomes the result."""
    begin, wall = time.process_time(), time.perf_counter()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            value = work()
    except Exception as exc:
        found[name] = {"error": f"{type(exc).__name__}: {exc}"[:200]}
        return None
    found[name] = {"seconds": time.process_time() - begin, "wall": time.perf_counter() - wall}
    return value


def resident_bytes() -> int:
    """Resident memory of this process now, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_growth(before: int) -> int:
    """By how much the peak memory of this process exceeds the given size."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 - before


def plain_json(found: Measured, file: str, options: argparse.Namespace) -> None:
    """json.loads of the unpacked text."""
    data = Path(file).read_bytes()
    data = gzip.decompress(data) if file.endswith(".gz") else data
    before = resident_bytes()
    measure(found, "load", lambda: json.loads(data))
    found["peak_bytes"] = peak_growth(before) + len(data)


def hta(found: Measured, file: str, options: argparse.Namespace) -> None:
    """HTA's default loader and the analyses that we compare, without its rounding, at which its sequences crash."""
    os.environ["HTA_DISABLE_NS_ROUNDING"] = "1"
    from hta.trace_analysis import TraceAnalysis

    before = resident_bytes()
    analysis = measure(found, "load", lambda: TraceAnalysis(trace_files={0: file}))
    found["peak_bytes"] = peak_growth(before)
    if analysis is None:
        return
    measure(found, "temporal_breakdown", lambda: analysis.get_temporal_breakdown(visualize=False))
    measure(found, "kernel_breakdown", lambda: analysis.get_gpu_kernel_breakdown(visualize=False))
    measure(found, "idle_breakdown", lambda: analysis.get_idle_time_breakdown(ranks=[0], visualize=False))
    measure(found, "overlap", lambda: analysis.get_comm_comp_overlap(visualize=False))
    measure(found, "launches", lambda: analysis.get_cuda_kernel_launch_stats(ranks=[0], visualize=False))
    measure(found, "queue", lambda: analysis.get_queue_length_summary(ranks=[0]))
    with tempfile.TemporaryDirectory() as folder:
        measure(
            found,
            "sequences",
            lambda: analysis.get_frequent_cuda_kernel_sequences(
                operator_name=options.operator, output_dir=folder, visualize=False
            ),
        )
    measure(
        found,
        "critical_path",
        lambda: analysis.critical_path_analysis(rank=0, annotation=f"ProfilerStep#{options.step}", instance_id=0),
    )


def tensorboard(found: Measured, file: str, options: argparse.Namespace) -> None:
    """The plug-in's parser, and everything that it computes for one worker."""
    from torch_tb_profiler.io import Cache
    from torch_tb_profiler.profiler.data import RunProfileData
    from torch_tb_profiler.profiler.run_generator import RunGenerator

    before = resident_bytes()
    with tempfile.TemporaryDirectory() as folder:
        cache = Cache(folder)
        data = measure(found, "load", lambda: RunProfileData.parse("worker", 1, file, cache.cache_dir))
        found["peak_bytes"] = peak_growth(before)
        if data is None:
            return

        def views() -> None:
            data.process()
            data.analyze()
            RunGenerator("worker", 1, data).generate_run_profile()

        measure(found, "views", views)


TOOLS = {"json": plain_json, "hta": hta, "tensorboard": tensorboard}


def main() -> None:
    """Runs one tool on one file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tool", choices=list(TOOLS))
    parser.add_argument("file")
    parser.add_argument("--step", default="1")
    parser.add_argument("--operator", default="aten::linear")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    found: Measured = {}
    try:
        TOOLS[options.tool](found, options.file, options)
    except Exception as exc:
        found["load"] = {"error": f"{type(exc).__name__}: {exc}"[:200]}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
