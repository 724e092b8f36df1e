"""Cost of a trace to the training job: ours by pid, and torch.profiler in the script, in one run.

usage: overhead.py [--work launch,compute] [--trace-s 3] [--traces 3] [--rows gpu,ops] [--json FILE]
                                                            (needs an NVIDIA GPU and torch)
       overhead.py --work cpu                               (anywhere)

For each kind of work, the same loop runs without an agent, then with an idle agent, then traced several times with
`kinetoctl trace --pid` in the ways of TRACES (the medians of the traces are shown, because a single trace on a
virtual machine says little), and then with torch.profiler in the script. --rows selects some of these.
Columns: step = median step time in ms before the trace; during, after = median step time divided by that of
before; quiet, entry, stall = longest step in ms in the 4 s before the request, from it to the first activity
(including the attach), from it on; lost = seconds of training lost until the file was there; first = request to
the first activity that can be in the trace; file = end of collection to the finished file; size = that file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.service.daemon import running_daemon

LOOP = Path(__file__).with_name("training_loop.py")
GPU_TYPES = "kernel,gpu_memcpy,gpu_memset,cuda_runtime,cuda_driver,overhead"
OP_TYPES = "cpu_op,user_annotation"
BEFORE_S, AFTER_S = 5.0, 5.0


class Way(NamedTuple):
    """One way to trace. live: an unprepared loop, to which each trace attaches anew."""

    title: str
    arguments: tuple[str, ...]
    live: bool = False
    gpu: bool = False  # makes no sense without one


TRACES = {
    "gpu": Way("GPU activities", ("--activities", GPU_TYPES), gpu=True),
    "ops": Way("PyTorch operators and GPU", ("--activities", f"{OP_TYPES},{GPU_TYPES}"), gpu=True),
    "ops-only": Way("PyTorch operators only", ("--activities", OP_TYPES)),
    "all": Way("all that is on by default", ()),
    "shapes": Way("the same, with shapes", ("--record-shapes",)),
    "stack-trace": Way("every call of Python", ("--with-stack=trace",)),
    "live-stacks": Way("live attach, Python stacks only", ("--activities", "python_function"), live=True),
    "live-gpu": Way("live attach, GPU activities", ("--activities", GPU_TYPES), live=True, gpu=True),
}
OTHERS = ("bare", "idle", "torch.profiler")


def control(environ: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs kinetoctl. Raises RuntimeError with its message if it fails."""
    command = [sys.executable, "-m", "kinetoctl", "-o", "json", *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"kinetoctl {' '.join(arguments)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done


def start_loop(environ: dict[str, str], work: str, log: Path, *, agent: bool, extra: list[str]) -> Any:
    """Starts the training loop as a child process and waits until it is warm."""
    command = [sys.executable, str(LOOP), work, str(log), *extra]
    if agent:
        command = [sys.executable, "-m", "kinetoctl", "run", "--", *command]
    loop = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert loop.stdout is not None
    if (line := loop.stdout.readline()) != "ready\n":
        raise RuntimeError(f"the loop did not come up: {line!r}")
    return loop


def end_loop(loop: Any, log: Path) -> dict[str, Any]:
    """Ends the loop and reads what it logged."""
    loop.communicate(timeout=120)
    return read_log(log)


def await_loop(loop: Any, log: Path) -> dict[str, Any]:
    """Waits for a loop that ends by itself and reads what it logged."""
    loop.wait(300)
    loop.communicate()
    return read_log(log)


def read_log(log: Path) -> dict[str, Any]:
    """Reads what the loop wrote at its end."""
    result: dict[str, Any] = json.loads(log.read_text())
    return result


def durations(steps: list[int], begin: int, end: int) -> list[int]:
    """Step times in ns of the steps that overlap the window."""
    return [b - a for a, b in zip(steps, steps[1:], strict=False) if begin < b and a < end]


def figures(logged: dict[str, Any], marks: dict[str, int], size_bytes: int) -> dict[str, float]:
    """The columns of the module's docstring."""
    steps = logged["steps"]
    during = durations(steps, marks["collecting"], marks["collected"])
    quiet = durations(steps, marks["requested"] - 4_000_000_000, marks["requested"])
    before = statistics.median(quiet)
    entry = durations(steps, marks["requested"], marks["collecting"])
    since = durations(steps, marks["requested"], steps[-1])
    until_file = durations(steps, marks["requested"], marks["stored"])
    after = durations(steps, marks["stored"] + 1_000_000_000, steps[-1])
    return {
        "step_ms": before / 1e6,
        "during": statistics.median(during) / before if during else float("nan"),
        "after": statistics.median(after) / before if after else float("nan"),
        "quiet_ms": max(quiet) / 1e6,
        "entry_ms": max(entry, default=0) / 1e6,
        "stall_ms": max(since) / 1e6,
        "lost_s": sum(d - before for d in until_file) / 1e9,
        "first_s": (marks["collecting"] - marks["requested"]) / 1e9,
        "file_s": (marks["stored"] - marks["collected"]) / 1e9,
        "size_mb": size_bytes / 1e6,
    }


def untouched(environ: dict[str, str], work: str, log: Path, *, agent: bool) -> dict[str, float]:
    """Step times of an untraced loop."""
    loop = start_loop(environ, work, log, agent=agent, extra=[])
    time.sleep(BEFORE_S)
    steps = end_loop(loop, log)["steps"]
    return {"step_ms": statistics.median(durations(steps, steps[0], steps[-1])) / 1e6}


def traced(environ: dict[str, str], work: str, log: Path, options: argparse.Namespace, way: Way) -> dict[str, Any]:
    """Traces one loop by pid several times: the medians, and all values of the figures that vary most."""
    loop = start_loop(environ, work, log, agent=not way.live, extra=[])
    arguments = ["--duration", f"{options.trace_s}s", *way.arguments]
    if way.live:
        arguments += ["--keep-agent", "0s"]
    captures = []
    for _ in range(options.traces):
        time.sleep(BEFORE_S)
        captures.append(trace_once(environ, loop.pid, log.parent, arguments))
    time.sleep(AFTER_S)
    logged = end_loop(loop, log)
    ends = [marks["requested"] for marks, _ in captures[1:]] + [logged["steps"][-1]]
    rows = []
    for (marks, target), end in zip(captures, ends, strict=True):
        part = {"steps": [step for step in logged["steps"] if step <= end]}
        rows.append(figures(part, marks, int(target["files"][0]["size_bytes"])))
    last = captures[-1][1]
    result: dict[str, Any] = {column: statistics.median(row[column] for row in rows) for column in rows[0]}
    for column in ("quiet_ms", "entry_ms", "stall_ms"):
        result[column] = max(row[column] for row in rows)
    result["all during"] = [round(row["during"], 3) for row in rows]
    result["all after"] = [round(row["after"], 3) for row in rows]
    result["verdicts"] = [target["verdict"] for _, target in captures]
    result["last"] = {key: last.get(key) for key in ("overhead", "warnings", "attach")} | last["summary"]["activities"]
    return result


def trace_once(
    environ: dict[str, str], pid: int, folder: Path, arguments: list[str]
) -> tuple[dict[str, int], dict[str, Any]]:
    """Runs `kinetoctl trace` once; returns its points in time, and the target as it reports it."""
    requested = time.time_ns()
    done = control(environ, "trace", "--pid", str(pid), "--output-dir", str(folder), *arguments)
    capture = json.loads(done.stdout)
    target = capture["targets"][0]
    marks = {
        "requested": requested,
        "collecting": int(target["summary"]["window_start_ns"]),
        "collected": int(target["summary"]["window_end_ns"]),
        "stored": int(target["stored_ns"]),
    }
    return marks, target


def incumbent(environ: dict[str, str], work: str, log: Path, trace_s: float) -> dict[str, float]:
    """Measures torch.profiler in the script, with CPU and GPU, exported as Chrome JSON."""
    trace = log.with_suffix(".trace.json")
    loop = start_loop(environ, work, log, agent=False, extra=["--torch-profiler", f"{BEFORE_S},{trace_s},{trace}"])
    logged = await_loop(loop, log)
    return figures(logged, logged["marks"], trace.stat().st_size)


def report(work: str, rows: dict[str, dict[str, Any]]) -> None:
    """Prints one table."""
    columns = ["step_ms", "during", "after", "quiet_ms", "entry_ms", "stall_ms"]
    columns += ["lost_s", "first_s", "file_s", "size_mb"]
    print(f"\n{work:<34}" + "".join(f"{column:>10}" for column in columns))
    for name, row in rows.items():
        print(f"{name:<34}" + "".join(f"{row[c]:>10.3f}" if c in row else f"{'':>10}" for c in columns))
    for name, row in rows.items():
        for key in ("all during", "all after", "verdicts", "last"):
            if key in row:
                print(f"  {name}: {key} {row[key]}")


def main() -> int:
    """Runs every variant and prints the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", default="launch,compute")
    parser.add_argument("--trace-s", type=float, default=3.0)
    parser.add_argument("--traces", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", default=",".join((*OTHERS, *TRACES)))
    options = parser.parse_args()
    everything = {}
    with tempfile.TemporaryDirectory(prefix="kineto-") as folder, running_daemon() as daemon:
        environ = daemon.client_environ()
        for work in options.work.split(","):
            log = Path(folder, f"{work}.json")
            rows: dict[str, dict[str, Any]] = {}
            for name in options.rows.split(","):
                if name == "torch.profiler":
                    rows["torch.profiler in the script"] = incumbent(environ, work, log, options.trace_s)
                elif name in OTHERS:
                    agent = name == "idle"
                    rows["idle agent" if agent else "no agent"] = untouched(environ, work, log, agent=agent)
                elif work != "cpu" or not TRACES[name].gpu:
                    rows[TRACES[name].title] = traced(environ, work, log, options, TRACES[name])
            report(work, rows)
            everything[work] = rows
    if options.json:
        options.json.write_text(json.dumps(everything, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
