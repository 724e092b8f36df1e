"""Our in-process stack sampler against py-spy from outside, at the same rate, on the same loops.

    python tests/bench/stack_sampler.py [--json]

For each loop, fresh processes in turn: undisturbed, with ours, with `py-spy record --nonblocking` (as a daemon would
drive it) and with py-spy's default, which stops the process for each sample. Printed: the step time while sampled
over the step time of the same process before, samples taken of those due, the share of the samples in the loop's two
functions beside the share of the time that these really take, the sampler's own CPU time per second, and the time
from the start command to the first sample.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Dict, Iterator, List, NamedTuple, Tuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "agent"), str(ROOT / "tests")]

from kineto_agent import wire  # noqa: E402 - found through the line above
from support.agent_daemon import Daemon, start_request  # noqa: E402

S = 1_000_000_000

TARGET = """
import sys, time
kind, seconds = sys.argv[1], float(sys.argv[2])
if kind == "torch":
    import torch
    torch.manual_seed(0); torch.set_num_threads(1)
    layers = [torch.nn.Linear(256, 256) for _ in range(8)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.randn(64, 256)
    def heavy():
        optimizer.zero_grad(); model(data).square().mean().backward()
    def light():
        optimizer.step()
else:
    def spin(count):
        total = 0
        for number in range(count): total += number * number
        return total
    def heavy(): spin(15000)
    def light(): spin(5000)
clock = time.perf_counter_ns
def loop(times, spent, until):
    while True:
        begin = clock(); heavy(); middle = clock(); light(); end = clock()
        times.append(end - begin); spent[0] += middle - begin; spent[1] += end - middle
        if time.monotonic() > until: return
loop([], [0, 0], time.monotonic() + 0.5)
before = []; loop(before, [0, 0], time.monotonic() + seconds)
print("ready", flush=True); sys.stdin.readline()
during, spent = [], [0, 0]; loop(during, spent, time.monotonic() + seconds)
before.sort(); during.sort()
print(before[len(before) // 2], during[len(during) // 2], sum(during) / len(during) / (sum(before) / len(before)),
      during[-1], spent[0] / sum(spent), flush=True)
sys.stdin.readline()
"""


class Figures(NamedTuple):
    """One run."""

    median_ratio: float
    mean_ratio: float
    longest_ms: float
    heavy_time: float  # share of the loop's time
    heavy_samples: float  # share of the loop's samples; 0: none taken
    complete: float  # samples of the main thread / samples due
    cpu_share: float  # of one core
    first_sample_ms: float


class Samples(NamedTuple):
    """What a sampler saw of the main thread."""

    heavy: int
    light: int
    total: int
    cpu_s: float
    first_sample_ms: float


@contextlib.contextmanager
def target(kind: str, seconds: float, env: Dict[str, str]) -> "Iterator[subprocess.Popen[str]]":
    """The loop in its own interpreter, at the point where the sampling is to begin."""
    child = subprocess.Popen(
        [sys.executable, "-c", TARGET, kind, str(seconds)],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def ready(child: "subprocess.Popen[str]") -> None:
    """Wait for its measured calm part to end."""
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"


def go(child: "subprocess.Popen[str]") -> None:
    """Let it run the sampled part."""
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()


def result(child: "subprocess.Popen[str]", samples: Samples, due: float, seconds: float) -> Figures:
    """Join what the loop and the sampler say."""
    assert child.stdout is not None
    before, during, mean_ratio, longest, heavy_time = map(float, child.stdout.readline().split())
    counted = samples.heavy + samples.light
    return Figures(
        median_ratio=during / before,
        mean_ratio=mean_ratio,
        longest_ms=longest / 1e6,
        heavy_time=heavy_time,
        heavy_samples=samples.heavy / counted if counted else 0.0,
        complete=samples.total / due,
        cpu_share=samples.cpu_s / seconds,
        first_sample_ms=samples.first_sample_ms,
    )


def undisturbed(kind: str, seconds: float, hz: int, folder: str) -> Figures:
    """No sampler: the noise of the machine."""
    with target(kind, seconds, dict(os.environ)) as child:
        ready(child)
        go(child)
        return result(child, Samples(0, 0, 0, 0.0, 0.0), seconds * hz, seconds)


def ours(kind: str, seconds: float, hz: int, folder: str) -> Figures:
    """The agent's sampler, driven over the link as by the daemon."""
    with Daemon(folder + "/agent.sock") as daemon:
        env = {
            **os.environ,
            "KINETO_AGENT_SOCKET": daemon.path,
            "PYTHONPATH": str(ROOT / "agent/kineto_agent/boot/inject"),
        }
        with target(kind, seconds, env) as child:
            connection, _hello = daemon.welcome()
            ready(child)
            asked_ns = time.time_ns()
            connection.send(start_request(duration_ns=int(seconds * S), options={"stack_sample_hz": hz}))
            go(child)
            seen = []
            end = connection.receive()
            while not isinstance(end, wire.Result):
                end = connection.receive()
            seen = [sample for sample in connection.arenas[0].samples() if sample.thread_id == child.pid]
            count = Counter("heavy" if "heavy" in sample.stack else "light" for sample in seen if loop_in(sample.stack))
            samples = Samples(
                count["heavy"],
                count["light"],
                sum(end.window_start_ns <= sample.time_ns < end.window_end_ns for sample in seen),
                end.overhead["agent_cpu_ns"] / S,
                (seen[0].time_ns - asked_ns) / 1e6,
            )
            return result(child, samples, seconds * hz, seconds)


def loop_in(stack: Tuple[str, ...]) -> bool:
    """Is this a sample of one of the two functions?"""
    return "heavy" in stack or "light" in stack


def py_spy(kind: str, seconds: float, hz: int, folder: str, *, blocking: bool = False) -> Figures:
    """py-spy from outside."""
    raw = Path(folder, "raw.txt")
    command = [
        shutil.which("py-spy") or str(Path(sys.executable).with_name("py-spy")), "record", "--rate", str(hz),
        "--duration", "%d" % seconds, "--format", "raw", "--idle", "--output", str(raw),
        *([] if blocking else ["--nonblocking"]),
    ]  # fmt: skip
    with target(kind, seconds, dict(os.environ)) as child:
        ready(child)
        began = time.monotonic()
        before = os.times()
        sampler = subprocess.Popen(
            [*command, "--pid", str(child.pid)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        go(child)
        _output, errors = sampler.communicate()
        elapsed = time.monotonic() - began
        after = os.times()
        if sampler.returncode != 0:
            raise SystemExit("py-spy failed: " + errors)
        cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
        samples = parse_raw(raw, cpu_s, max(elapsed - seconds, 0) * 1000)
        return result(child, samples, seconds * hz, seconds)


def py_spy_blocking(kind: str, seconds: float, hz: int, folder: str) -> Figures:
    """py-spy's default: it stops the process for each sample."""
    return py_spy(kind, seconds, hz, folder, blocking=True)


def parse_raw(path: Path, cpu_s: float, start_ms: float) -> Samples:
    """Folded stacks of py-spy: "a (f:1);b (f:2) 17"."""
    heavy = light = total = 0
    for line in path.read_text().splitlines():
        stack, _space, count = line.rpartition(" ")
        names = [frame.partition(" (")[0] for frame in stack.split(";")]
        if "loop" not in names:
            continue
        total += int(count)
        heavy += int(count) * ("heavy" in names)
        light += int(count) * ("light" in names)
    return Samples(heavy, light, total, cpu_s, start_ms)


COLUMNS = (
    "loop", "sampler", "step, median", "step, mean", "longest step, ms", "complete", "heavy: time / samples", "CPU",
    "first sample, ms",
)  # fmt: skip
SAMPLERS = {"none": undisturbed, "ours": ours, "py-spy --nonblocking": py_spy, "py-spy": py_spy_blocking}


def measure(kinds: List[str], seconds: float, hz: int, runs: int) -> "Dict[Tuple[str, str], Figures]":
    """Medians of the runs, samplers in turn."""
    rows: Dict[Tuple[str, str], List[Figures]] = {}
    for kind in kinds:
        for _ in range(runs):
            for name, sampler in SAMPLERS.items():
                with tempfile.TemporaryDirectory() as folder:
                    rows.setdefault((kind, name), []).append(sampler(kind, seconds, hz, folder))
    return {key: Figures(*map(median, zip(*figures))) for key, figures in rows.items()}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--hz", type=int, default=100)
    parser.add_argument("--loops", nargs="+", default=["python", "torch"], choices=["python", "torch"])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    table = measure(arguments.loops, arguments.seconds, arguments.hz, arguments.runs)
    if arguments.json:
        print(json.dumps({" ".join(key): figures._asdict() for key, figures in table.items()}))
        return 0
    print("| " + " | ".join(COLUMNS) + " |")
    print("|---" * len(COLUMNS) + "|")
    for (kind, name), row in table.items():
        print(
            "| %s | %s | x%.3f | x%.3f | %.1f | %.0f %% | %.3f / %.3f | %.2f %% | %.0f |"
            % (
                kind, name, row.median_ratio, row.mean_ratio, row.longest_ms, 100 * row.complete, row.heavy_time,
                row.heavy_samples, 100 * row.cpu_share, row.first_sample_ms,
            )
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
