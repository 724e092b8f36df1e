"""Runs a program untraced and traced, and says how long its steps took and what the findings of its trace are."""

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import kineto_trace as kt
from kineto_trace.catalog.first_screen import FirstScreen, first_screen_of
from kineto_trace.catalog.view_runner import SameProcess
from support.machine.control_groups import ControlGroup, cpu_group, memory_group, storage_group, swap_space
from support.service.cli import kinetoctl
from support.service.daemon import Daemon

UNTRACED_S = 2.0
TRACED_S = 2.5
READY_S = 120.0
QUOTA_CORES, QUOTA_PERIOD_MS = 0.6, 10
VOLUME, VOLUME_BYTES_PER_S = Path("/var/tmp"), 8 << 20
SWAPPED_BYTES, SWAP_BYTES = 384 << 20, 1 << 30
CPU_QUOTA, SLOW_VOLUME, SWAP = "cpu_quota", "slow_volume", "swap"  # planted from outside, the last two in part
PASSING = ("jit_warm_up",)  # these are over soon: traced at once, and measured meanwhile
NO_CPU = (CPU_QUOTA, "one_core", "few_cores", "too_many_threads")  # here the wait for a processor is the cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a program runs and how long it is measured. device: "" for programs of the CPU. gpu: its number, if any.

    analysed_beside: whether findings may be computed while the next program runs.
    """

    device: str = ""
    gpu: int | None = None
    analysed_beside: bool = False
    untraced_s: float = UNTRACED_S
    traced_s: float = TRACED_S

    def environ(self) -> dict[str, str]:
        """Variables that let a program see its GPU only."""
        return {} if self.gpu is None else {"CUDA_VISIBLE_DEVICES": str(self.gpu)}


CPU = Place()


@dataclass(frozen=True, slots=True)
class Measured:
    """step_ms: mean without recording. trace: where the trace lies.

    waited_pct: the share of the traced time in which the main thread waited for a processor, as the kernel counts it.
    """

    step_ms: float
    trace: Path
    waited_pct: float


def screen_of(trace: Path) -> FirstScreen:
    """The findings of the trace, and where its time goes."""
    return first_screen_of([trace], executor=SameProcess())


def measure(
    daemon: Daemon, program: str, planted: str, folder: Path, options: Sequence[str] = (), place: Place = CPU
) -> Measured:
    """Runs `program` with the planted cause ("": none). Raises RuntimeError if the program or its capture fails."""
    told = ["" if planted == CPU_QUOTA else planted, *([place.device] if place.device else [])]
    command = kinetoctl("--quiet", "run", "--", sys.executable, "-m", "rootcause.programs", program, *told)
    environ = {**daemon.client_environ(), **place.environ()}
    with ExitStack() as stack:
        memory = None
        if planted == SWAP:  # what a process has before it comes into a group does not count there
            stack.enter_context(swap_space(VOLUME / f"rootcause-{os.getpid()}.swap", SWAP_BYTES))
            memory = stack.enter_context(memory_group(f"rootcause-{os.getpid()}"))
            command = ["/bin/sh", "-c", 'echo $$ > "$0"; exec "$@"', str(memory.path / "cgroup.procs"), *command]
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
        patience = threading.Timer(READY_S, process.kill)
        patience.start()
        stack.callback(patience.cancel)
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{program} {planted} did not come up: {(folder / 'program.log').read_text()[-2000:]}")
        patience.cancel()
        if memory is not None:
            stack.callback(process.wait)
            stack.callback(process.kill)
            memory.swap_out(SWAPPED_BYTES)
        if (group := _group(planted, process.pid, stack)) is not None:
            stack.callback(process.wait)
            stack.callback(process.kill)
            group.add([process.pid, *_threads(process.pid)])
        begun, before = time.time_ns(), _run_delay_ns(process.pid)
        if planted not in PASSING:
            time.sleep(place.untraced_s)
        ended, between = time.time_ns(), _run_delay_ns(process.pid)
        trace = _traced(environ, process.pid, folder, options, place.traced_s)
        waited = (_run_delay_ns(process.pid) - between) / (time.time_ns() - ended)
        starts = _ended(process)
    if planted in PASSING:
        opened = kt.open_trace(trace)
        begun, ended, lost = opened.window_start_ns, opened.window_end_ns, waited
    else:
        lost = 0.0 if planted in NO_CPU else (between - before) / (ended - begun)
    return Measured(_mean_step_ms(starts, begun, ended) * (1 - lost), trace, 100 * waited)


def _group(planted: str, pid: int, stack: ExitStack) -> ControlGroup | None:
    """The control group by which a cause is planted from outside."""
    if planted == CPU_QUOTA:
        processors = stack.enter_context(cpu_group(f"rootcause-{pid}"))
        processors.limit(QUOTA_CORES, QUOTA_PERIOD_MS)
        return processors
    if planted == SLOW_VOLUME:
        storage = stack.enter_context(storage_group(f"rootcause-{pid}"))
        storage.limit(VOLUME, VOLUME_BYTES_PER_S)
        return storage
    return None


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


def _traced(environ: dict[str, str], pid: int, folder: Path, options: Sequence[str], traced_s: float) -> Path:
    arguments = ["-o", "json", "trace", "--pid", str(pid), "--duration", f"{traced_s}s", "--output-dir", str(folder)]
    done = subprocess.run(kinetoctl(*arguments, *options), env=environ, capture_output=True, text=True, check=False)
    paths = sorted(folder.glob("**/*.json.gz"))
    if done.returncode or len(paths) != 1:
        raise RuntimeError(f"no trace of {pid}: {done.stderr[-2000:]}{done.stdout[-2000:]}")
    return paths[0]


def _mean_step_ms(starts: list[int], begun: int, ended: int) -> float:
    inside = [start for start in starts if begun <= start <= ended]
    if len(inside) < 2:
        raise RuntimeError(f"fewer than two steps in {(ended - begun) / 1e9:.1f} s")
    return statistics.mean(after - before for before, after in zip(inside, inside[1:], strict=False)) / 1e6
