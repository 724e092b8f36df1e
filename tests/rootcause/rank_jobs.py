"""Runs a job of two ranks untraced and traced, and says how long its steps took and what the analyses of it say."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kineto_trace as kt
from kineto_trace.analysis.findings.common_findings import common_findings
from kineto_trace.catalog.view_runner import Request, run_views
from support.service.cli import kinetoctl
from support.service.daemon import Daemon

RANKS = 2
UNTRACED_S = 1.5
TRACED_S = 1.5
END_DEADLINE_S = 30
DUMP_DEADLINE_S = 5  # for a process to write where its threads are
VIEWS = ("ranks", "rank_what_if", "rank_time_causes", "stragglers", "collective_summary", "rank_waits", "findings")


@dataclass(frozen=True, slots=True)
class MeasuredJob:
    """step_ms: mean without recording. views: rows and notes of each, findings as in the report of a job."""

    step_ms: float
    views: dict[str, dict[str, Any]]
    traces: tuple[Path, ...]

    @property
    def findings(self) -> list[dict[str, Any]]:
        """The rows of the findings."""
        rows: list[dict[str, Any]] = self.views["findings"]["rows"]
        return rows


def measure_job(daemon: Daemon, job: str, folder: Path) -> MeasuredJob:
    """Runs a job such as `ddp/sleep`. Raises RuntimeError if one of its processes or the capture fails."""
    environ = {
        **daemon.client_environ(),
        "ROOTCAUSE_FOLDER": str(folder),
        "WORLD_SIZE": str(RANKS),
        "PYTHONFAULTHANDLER": "1",  # says where a rank hangs
    }
    command = kinetoctl("--quiet", "run", "--", sys.executable, "-m", "rootcause.programs", "ranks", job)
    with ExitStack() as stack:
        processes = []
        for rank in range(RANKS):
            process = subprocess.Popen(
                command,
                env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stack.enter_context((folder / f"rank{rank}.log").open("wb")),
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        for rank, process in enumerate(processes):
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError(f"{job}: rank {rank} did not come up: {_logs(folder)}")
        begun = time.time_ns()
        time.sleep(UNTRACED_S)
        ended = time.time_ns()
        traces = _traced(environ, folder)
        starts = _ended(processes, folder)
    return MeasuredJob(_mean_step_ms(starts, begun, ended), _views(traces), traces)


def _logs(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted(folder.glob("rank*.log")))


def _traced(environ: dict[str, str], folder: Path) -> tuple[Path, ...]:
    """Traces the job as a user would: all its ranks, for the same time."""
    target = folder / "job"
    ranks = ",".join(str(rank) for rank in range(RANKS))
    arguments = ["-o", "json", "trace", "--rank", ranks, "--duration", f"{TRACED_S}s", "--output-dir", str(target)]
    done = subprocess.run(kinetoctl(*arguments), env=environ, capture_output=True, text=True, check=False)
    paths = sorted(target.glob("**/*.json.gz"))
    if done.returncode or len(paths) != RANKS:
        raise RuntimeError(f"no trace of the job: {done.stderr[-2000:]}{done.stdout[-2000:]}")
    return tuple(paths)


def _ended(processes: Sequence[subprocess.Popen[str]], folder: Path) -> list[int]:
    """Ends the job. Returns when the steps of its first rank ended."""
    assert processes[0].stdin is not None
    processes[0].stdin.write("\n")
    processes[0].stdin.flush()
    try:
        told = [process.communicate(timeout=END_DEADLINE_S)[0] for process in processes]
        starts: list[int] = json.loads(told[0])["starts"]
    except (subprocess.TimeoutExpired, ValueError, OSError) as exc:
        for process in processes:
            process.send_signal(signal.SIGABRT)
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(DUMP_DEADLINE_S)
        raise RuntimeError(f"the job did not end well: {exc} {_logs(folder)}") from exc
    return starts


def _mean_step_ms(ends: Sequence[int], begun: int, ended: int) -> float:
    inside = [end for end in ends if begun <= end <= ended]
    if len(inside) < 2:
        raise RuntimeError(f"fewer than two steps in {UNTRACED_S:g} s")
    return statistics.mean(after - before for before, after in zip(inside, inside[1:], strict=False)) / 1e6


def _views(traces: Sequence[Path]) -> dict[str, dict[str, Any]]:
    sources = kt.find_traces(*traces)
    results = run_views([Request(view=name) for name in VIEWS], sources)
    what_if = next(result for result in results if result.view == "rank_what_if")
    found = {}
    for result in results:
        told = common_findings(result, len(sources), what_if) if result.view == "findings" else result
        found[result.view] = {"rows": told.rows(), "notes": list(told.notes), "failure": told.failure}
    return found


def gpus() -> int:
    """The number of GPUs that programs here can use."""
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    return int(subprocess.run(command, env=os.environ, capture_output=True, text=True, check=True).stdout)
