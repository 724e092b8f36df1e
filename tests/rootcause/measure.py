"""Runs a program untraced and traced, and says how long its steps took and what the findings of its trace are."""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kineto_trace as kt
from support.machine.cpu_group import cpu_group
from support.service.cli import kinetoctl
from support.service.daemon import Daemon

UNTRACED_S = 2.0
TRACED_S = 2.5
QUOTA_CORES, QUOTA_PERIOD_MS = 0.6, 10
CPU_QUOTA = "cpu_quota"  # this cause is planted from outside
NO_CPU = (CPU_QUOTA, "one_core", "too_many_threads")  # here the wait for a processor is the cause


@dataclass(frozen=True, slots=True)
class Measured:
    """step_ms: mean without recording. findings: rows of the view. trace: where the trace lies.

    waited_pct: the share of the traced time in which the main thread waited for a processor, as the kernel counts it.
    """

    step_ms: float
    findings: list[dict[str, Any]]
    trace: Path
    waited_pct: float


def measure(daemon: Daemon, program: str, planted: str, folder: Path, options: Sequence[str] = ()) -> Measured:
    """Runs `program` with the planted cause ("": none). Raises RuntimeError if the program or its capture fails."""
    inside = "" if planted == CPU_QUOTA else planted
    command = kinetoctl("--quiet", "run", "--", sys.executable, "-m", "rootcause.programs", program, inside)
    environ = daemon.client_environ()
    with ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=(folder / "program.log").open("wb"),
                text=True,
            )
        )
        stack.callback(process.kill)
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{program} {planted} did not come up: {(folder / 'program.log').read_text()[-2000:]}")
        if planted == CPU_QUOTA:
            group = stack.enter_context(cpu_group(f"rootcause-{process.pid}"))
            stack.callback(process.wait)
            stack.callback(process.kill)
            group.limit(QUOTA_CORES, QUOTA_PERIOD_MS)
            group.add([process.pid, *_threads(process.pid)])
        begun, before = time.time_ns(), _run_delay_ns(process.pid)
        time.sleep(UNTRACED_S)
        ended, between = time.time_ns(), _run_delay_ns(process.pid)
        trace = _traced(environ, process.pid, folder, options)
        waited = (_run_delay_ns(process.pid) - between) / (time.time_ns() - ended)
        starts = _ended(process)
    lost = 0.0 if planted in NO_CPU else (between - before) / (ended - begun)
    found = kt.run_view("findings", kt.open_trace(trace))
    return Measured(_mean_step_ms(starts, begun, ended) * (1 - lost), found.rows(), trace, 100 * waited)


def _ended(process: subprocess.Popen[str]) -> list[int]:
    """Ends the program. Returns when its steps ended."""
    try:
        told = process.communicate("\n", timeout=60)[0]
        starts: list[int] = json.loads(told)["starts"]
    except (subprocess.TimeoutExpired, ValueError) as exc:
        raise RuntimeError(f"the program did not end well: {exc}") from exc
    return starts


def _run_delay_ns(pid: int) -> int:
    """How long the main thread has been ready to run without a processor: other programs take it, not the cause."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1])


def _threads(pid: int) -> list[int]:
    return [int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()]


def _traced(environ: dict[str, str], pid: int, folder: Path, options: Sequence[str]) -> Path:
    arguments = ["-o", "json", "trace", "--pid", str(pid), "--duration", f"{TRACED_S}s", "--output-dir", str(folder)]
    done = subprocess.run(kinetoctl(*arguments, *options), env=environ, capture_output=True, text=True, check=False)
    paths = sorted(folder.glob("**/*.json.gz"))
    if done.returncode or len(paths) != 1:
        raise RuntimeError(f"no trace of {pid}: {done.stderr[-2000:]}{done.stdout[-2000:]}")
    return paths[0]


def _mean_step_ms(starts: list[int], begun: int, ended: int) -> float:
    inside = [start for start in starts if begun <= start <= ended]
    if len(inside) < 2:
        raise RuntimeError(f"fewer than two steps in {UNTRACED_S:g} s")
    return statistics.mean(after - before for before, after in zip(inside, inside[1:], strict=False)) / 1e6
