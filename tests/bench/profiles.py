"""Time and size of profiles (pprof, OTLP) of a large trace, as ratios to the flame graphs of the same trace.

    python tests/bench/profiles.py [--rows 1000000] [--stacks 2000] [--repeat 3]

The trace is made up: a training loop whose steps repeat the same calls, as loops do, with a kernel and a launch for
each operator, and samples of Python. A flame graph (speedscope, all graphs) needs the same stacks of the same rows, so
the ratio is what the profile's own labels, tables and encoding cost. Times are CPU seconds, the best of some
repetitions; each begins with a trace of which nothing has been computed.
"""

import argparse
import gc
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from kineto_trace.formats.trace_export import export_trace
from kineto_trace.model.target_info import TargetInfo
from kineto_trace.model.trace import StringTable, Table, Trace, make_table

FORMATS = (".speedscope.json", ".pb.gz", ".otlp")
PARTS = 4  # rows of each operator: itself, its caller, its launch, its kernel
STEP_NS, THREAD, DEVICE = 10_000, 70, 0


def made_up(rows: int, stacks: int) -> Trace:
    """A trace with so many rows and about so many distinct stacks of GPU work."""
    strings = StringTable()
    count = rows // (PARTS + 1)
    number = np.arange(count)
    names = [strings.add_all([f"{kind}_{each}" for each in range(stacks)]) for kind in ("aten::outer", "aten::op", "k")]
    launch = strings.add("cudaLaunchKernel")
    start = 1_700_000_000_000_000_000 + number * STEP_NS
    which = number % stacks
    outer, inner = 2 * number, 2 * number + 1
    ops = make_table(
        "cpu_op",
        2 * count,
        {
            "start": np.concatenate([start, start + 100]),
            "duration": np.repeat([9000, 4000], count),
            "name": np.concatenate([names[0][which // 8], names[1][which]]),
            "thread": np.full(2 * count, THREAD),
            "sequence": np.full(2 * count, -1),
            "finished": np.ones(2 * count),
            "id": np.concatenate([outer, inner]) + 1,
        },
    )
    same = {"correlation": number + 1}
    calls = make_table(
        "cuda_runtime",
        count,
        {**same, "start": start + 500, "duration": np.full(count, 300), "name": np.full(count, launch),
         "thread": np.full(count, THREAD)},
    )  # fmt: skip
    kernels = make_table(
        "kernel", count, {**same, "start": start + 2000, "duration": 1000 + which, "name": names[2][which]}
    )
    tables = {table.kind: table for table in (ops, calls, kernels, _samples(count, stacks, strings))}
    target = TargetInfo(capture_id="bench", host="host", pid=1, process_name="python", threads={THREAD: "MainThread"})
    end = int(start[-1]) + STEP_NS
    return Trace(
        target=target, strings=strings.strings, tables=tables, window_start_ns=int(start[0]), window_end_ns=end,
        sample_period_ns=STEP_NS,
    )  # fmt: skip


def _samples(count: int, stacks: int, strings: StringTable) -> Table:
    """Frames of Python on another thread: callers and what they called, each seen once."""
    half = count // 2
    number = np.arange(half)
    callers = strings.add_all([f"/app/a.py({each}): outer_{each}" for each in range(64)])
    callees = strings.add_all([f"/app/b.py({each}): inner_{each}" for each in range(stacks)])
    lines = strings.add_all([f"{each}: 1 running" for each in range(stacks)])
    start = 1_700_000_000_000_000_000 + number * 2 * STEP_NS
    return make_table(
        "python_function",
        2 * half,
        {
            "start": np.concatenate([start, start]),
            "duration": np.full(2 * half, STEP_NS),
            "name": np.concatenate([callers[number % stacks % 64], callees[number % stacks]]),
            "thread": np.full(2 * half, THREAD + 1),
            "parent": np.concatenate([np.full(half, -1), number]),
            "depth": np.repeat([0, 1], half),
            "samples": np.ones(2 * half),
            "self_samples": np.repeat([0, 1], half),
            "running": np.repeat([0, 1], half),
            "lines": np.concatenate([np.full(half, -1), lines[number % stacks]]),
        },
    )


def main() -> None:
    """Prints one line per format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--stacks", type=int, default=2_000)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    trace = made_up(options.rows, options.stacks)
    print(f"{sum(map(len, trace.tables.values())):,} rows, {options.stacks:,} stacks of GPU work")
    flame_s, flame_bytes = 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        for suffix in FORMATS:
            path = Path(folder, f"trace{suffix}")
            best = float("inf")
            for _ in range(options.repeat):
                gc.collect()
                began = time.process_time()
                export_trace(trace, path)
                best = min(best, time.process_time() - began)
            size = path.stat().st_size
            flame_s, flame_bytes = flame_s or best, flame_bytes or size
            ratios = f"{best / flame_s:.2f} of the flame graphs' time, {size / flame_bytes:.2f} of their size"
            print(f"{suffix:18} {best:6.2f} s  {size / 1e6:7.2f} MB  {ratios}")


if __name__ == "__main__":
    main()
