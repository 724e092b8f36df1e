"""Speed of the event model (tree, attribution, links, annotations and tensor ids), compared with PyTorch's own.

    python tests/bench/tree.py [--events 2000000] [--repeat 3] [--skip-torch]

The events are ops of four threads: random nesting, once in the order of recording and once in random order, and (with
torch) the ops of a real training loop on the CPU, repeated. Every third op has a call with a kernel. Figures are
events (ops, calls and kernels together) per CPU second of one core, the best of some repetitions. PyTorch's figure is
the time of its _disable_profiler, which builds the same tree (and makes its trace's activities), and of returning the
tree as experimental_event_tree().
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.traces import cpu
from kineto_trace.analysis.tensor_views import tensor_ids
from kineto_trace.model.trace import Table, make_table
from kineto_trace.structure.activity_links import forward_backward
from kineto_trace.structure.nesting import attribute, build, gpu_annotations

THREADS = 4
MAX_DEPTH = 12
GOAL = 2_000_000  # events per second for the tree and the attribution together
OPS_PER_ANNOTATION = 200
UNORDERED = "in no order"  # no recorder gives that; it is here to show the worst case

Columns = dict[str, Any]


def random_walk(count: int, seed: int) -> Columns:
    """Ops of one thread: at every moment an op begins or the innermost one ends."""
    random = np.random.default_rng(seed)
    times = np.cumsum(random.integers(20, 400, 2 * count)).tolist()
    coins = (random.random(2 * count) < 0.5).tolist()
    start, end = [0] * count, [0] * count
    stack: list[int] = []
    begun = 0
    for now, begins in zip(times, coins, strict=True):
        if begun < count and (not stack or (begins and len(stack) < MAX_DEPTH)):
            start[begun] = now
            stack.append(begun)
            begun += 1
        else:
            end[stack.pop()] = now
    return {"start": np.array(start), "end": np.array(end)}


def synthetic(count: int) -> Columns:
    """Random ops of all threads, thread by thread."""
    return joined([random_walk(count // THREADS, seed) for seed in range(THREADS)])


def joined(threads: list[Columns]) -> Columns:
    columns = {name: np.concatenate([thread[name] for thread in threads]) for name in threads[0]}
    return {**columns, "thread": np.repeat(np.arange(len(threads)) + 100, [len(t["start"]) for t in threads])}


def shuffled(columns: Columns) -> Columns:
    order = np.random.default_rng(5).permutation(len(columns["start"]))
    return {name: column[order] for name, column in columns.items()}


def real(count: int) -> Columns:
    """The ops of a training loop, one copy after the other, in every thread."""
    from support.targets.torch_profile import nodes_of, train
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        train(20)
    nodes = nodes_of(profiler.profiler.kineto_results.experimental_event_tree())
    start, end = (np.array([node[name] for node in nodes]) for name in ("start", "end"))
    start, end = start - start.min(), end - start.min()
    copies = -(-count // THREADS // len(nodes))
    shift = np.repeat(np.arange(copies) * int(end.max() + 1), len(nodes))
    thread = {"start": np.tile(start, copies) + shift, "end": np.tile(end, copies) + shift}
    return joined([thread] * THREADS)


def tables_of(ops: Columns) -> dict[str, Table]:
    """The ops with annotations, calls, kernels and inputs."""
    count = len(ops["start"])
    number = np.arange(count)
    random = np.random.default_rng(7)
    common = {"start": ops["start"], "duration": ops["end"] - ops["start"], "thread": ops["thread"]}
    common |= {"id": number + 1, "finished": np.ones(count)}
    backward = number % 10 == 9
    sequences = {"sequence": number // 10, "torch_thread": ops["thread"] - 99, "scope": backward}
    sequences |= {"forward_thread": np.where(backward, ops["thread"] - 99, 0)}
    cpu_op = make_table("cpu_op", count, {**common, **sequences})
    annotation = make_table("user_annotation", count, {**common, "id": number + 1 + count})
    launching = number[::3]
    launches = len(launching)
    calls = {"start": ops["start"][launching] + 1, "thread": ops["thread"][launching], "duration": np.full(launches, 5)}
    correlation = np.arange(launches) + 1
    kernels = {"start": ops["start"][launching] + 5000, "duration": np.full(launches, 3), "correlation": correlation}
    using = np.repeat(number[::2], 2)
    inputs = {"op": using + 1, "storage": random.integers(1, 5000, len(using)) * 64}
    inputs["impl"] = inputs["storage"] * 1000 + random.integers(0, 3, len(using))
    return {
        "cpu_op": cpu_op,
        "user_annotation": annotation.take(number[::OPS_PER_ANNOTATION]),
        "cuda_runtime": make_table("cuda_runtime", launches, {**calls, "correlation": correlation}),
        "kernel": make_table("kernel", launches, {**kernels, "stream": number[launching] % 3 + 7}),
        "op_tensor": make_table("op_tensor", len(using), inputs),
    }


def measure(name: str, tables: Mapping[str, Table], repeat: int) -> tuple[list[str], float]:
    """Rows of the report, and events per second of the tree and the attribution together."""
    window_end = int(tables["cpu_op"].end().max()) + 1
    works: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
        "tree": (lambda: build(tables, window_end), ("cpu_op", "user_annotation")),
        "attribution": (lambda: attribute(tables), ("cpu_op", "user_annotation", "cuda_runtime", "kernel")),
        "GPU annotations": (lambda: gpu_annotations(tables), ("user_annotation", "cuda_runtime", "kernel")),
        "forward-backward links": (lambda: forward_backward(tables), ("cpu_op",)),
        "tensor ids": (lambda: tensor_ids(tables), ("op_tensor",)),
    }
    seconds = {work: cpu(run, repeat) for work, (run, _) in works.items()}
    rows = []
    for work, (_, kinds) in works.items():
        events = sum(len(tables[kind]) for kind in kinds)
        rows.append(f"| {name}: {work} | {events:,} | {seconds[work]:.3f} s | {events / seconds[work] / 1e6:.1f} |")
    total = sum(len(tables[kind]) for kind in ("cpu_op", "user_annotation", "cuda_runtime", "kernel"))
    both = seconds["tree"] + seconds["attribution"]
    rows.append(f"| {name}: tree and attribution | {total:,} | {both:.3f} s | {total / both / 1e6:.1f} |")
    return rows, total / both


def pytorch(events: int) -> list[str]:
    """PyTorch's own tree of about the given number of events."""
    import torch
    from support.targets.torch_profile import train
    from torch._C._autograd import _disable_profiler, _enable_profiler, _prepare_profiler
    from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

    config = ProfilerConfig(ProfilerState.KINETO, False, False, False, False, False, _ExperimentalConfig())
    activities = {torch._C._profiler.ProfilerActivity.CPU}
    _prepare_profiler(config, activities)
    _enable_profiler(config, activities)
    train(events // 110)
    begin = time.process_time()
    result = _disable_profiler()
    stopped = time.process_time()
    result.experimental_event_tree()
    done = time.process_time()
    count = len(result.events())
    seconds = {"_disable_profiler": stopped - begin, "experimental_event_tree": done - stopped}
    return [f"| PyTorch: {name} | {count:,} | {t:.3f} s | {count / t / 1e6:.2f} |" for name, t in seconds.items()]


def main() -> int:
    """Prints the table. Exit status 1 if the tree and the attribution of ordered events together missed the goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=2_000_000, help="ops")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--skip-torch", action="store_true", help="leave PyTorch and its ops out")
    options = parser.parse_args()
    ops = synthetic(options.events)
    inputs = {"in order": ops, UNORDERED: shuffled(ops)}
    if not options.skip_torch:
        inputs["real ops"] = real(options.events)
    rows, speeds = [], {}
    for name, columns in inputs.items():
        report, speeds[name] = measure(name, tables_of(columns), options.repeat)
        rows += report
    if not options.skip_torch:
        rows += pytorch(200_000)
    print("| what | events | CPU time | million events per s |\n|---|---|---|---|")
    print("\n".join(rows))
    return 0 if min(speed for name, speed in speeds.items() if name != UNORDERED) >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
