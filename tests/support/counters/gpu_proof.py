"""What hardware counters are held against on a real GPU. Each function returns its figures; nothing here decides."""

import asyncio
import contextlib
import csv
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from kineto_trace.spool.counter_samples import read_counter_samples
from kinetod.counters.backend_group import CUPTI
from kinetod.counters.counter_client import CounterClient, CountersChild
from kinetod.counters.counter_recording import CounterRecording, RecordedGpu, record_counters
from kinetod.counters.interface import OVERVIEW, SETS, CounterError, WantedCounters
from kinetod.counters.power.interface import POWER, SM_CLOCK
from kinetod.counters.power.power_process import NvmlPower, open_nvml

from support.machine.native import ROOT

MS = 1_000_000
WANTED = WantedCounters(set_name=OVERVIEW)
MOST_S = 600.0  # of steps
MARGIN_NS = 50 * MS  # at both ends of a phase
NCU_KERNELS = {  # of each phase, the name of its kernel
    "matmul": "gemm|nvjet|cutlass",
    "add": "vectorized_elementwise",
    "softmax": "softmax",
    "attention": "flash|fmha|attention",
}
NCU_METRICS = {
    "SM busy": "sm__cycles_active.avg.pct_of_peak_sustained_elapsed",
    "Tensor pipe": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "DRAM": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "Occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "Instructions": "sm__inst_executed.avg.pct_of_peak_sustained_elapsed",
}
NCU_CLOCK = "gpc__cycles_elapsed.avg.per_second"
NCU, NVCC = "/usr/local/cuda/bin/ncu", "/usr/local/cuda/bin/nvcc"
KERNELS = """
#include <cstdio>
__global__ void spin(float *x) { for (int i = 0; i < 20000; i++) { *x = *x * 1.0001f; } }
int main(int argc, char **argv) {
    float *x;
    cudaMalloc(&x, 4);
    for (int i = 0; i < (argc > 1 ? 300 : 2); i++) {
        spin<<<1, 1>>>(x);
        cudaDeviceSynchronize();
        if (argc > 1 && i == 0) { fclose(fopen(argv[1], "w")); }
    }
    return cudaGetLastError();
}
"""


def _environ() -> dict[str, str]:
    """In which support.counters.gpu_work is found."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])}


class GpuWork:
    """A process of support.counters.gpu_work."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.counters.gpu_work"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environ(), text=True,
        )  # fmt: skip
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def begin(self, phase: str, seconds: float) -> None:
        """Starts a phase."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{phase} {seconds}\n")
        self._process.stdin.flush()

    async def do(self, phase: str, seconds: float) -> dict[str, Any]:
        """A phase, to its end."""
        self.begin(phase, seconds)
        return await self.end()

    async def end(self) -> dict[str, Any]:
        """The end of the phase that was begun."""
        return await asyncio.to_thread(self._answer)

    def close(self) -> None:
        with self._process:  # closes its pipes and waits for its end
            pass


@contextlib.contextmanager
def gpu_work() -> Iterator[GpuWork]:
    work = GpuWork()
    try:
        yield work
    finally:
        work.close()


@contextlib.asynccontextmanager
async def sampler(backend: str = CUPTI) -> AsyncIterator[tuple[CounterClient, str]]:
    """A kinetod-counters of its own, and the first GPU that it can sample."""
    client = CounterClient(CountersChild(("--backend", backend)))
    try:
        yield client, next(gpu.uuid for gpu in (await client.gpus()).gpus if not gpu.problem)
    finally:
        await client.stop()


async def recording(
    client: CounterClient, uuid: str, interval_ns: int, wanted: WantedCounters = WANTED
) -> CounterRecording:
    """Records into a new folder. Raises CounterError."""
    begun = await record_counters(client, {uuid: [Path(tempfile.mkdtemp())]}, wanted, interval_ns)
    if begun.refused:
        raise AssertionError(begun.refused)
    return begun


async def stopped(begun: CounterRecording) -> RecordedGpu:
    (result,) = await begun.stop()
    begun.close()
    return result


async def inventory(client: CounterClient, uuid: str) -> dict[str, Any]:
    """What this GPU has of each set."""
    listed = await client.gpus()
    found: dict[str, Any] = {"library": listed.library_version, "gpus": [gpu.chip for gpu in listed.gpus]}
    found["base_metrics"] = len(await client.base_metrics(uuid))
    for name in SETS:
        plan = await client.plan(uuid, WantedCounters(set_name=name))
        found[name] = {"metrics": len(plan.metrics), "left_out": [f"{each.name}: {each.why}" for each in plan.left_out]}
    return found


async def phases(
    client: CounterClient,
    uuid: str,
    work: GpuWork,
    names: Sequence[str] = ("matmul", "copy", "sleep"),
    seconds: float = 1.2,
) -> dict[str, Any]:
    """Means of the overview by phase, and the losses."""
    begun = await recording(client, uuid, MS)
    times = {name: await work.do(name, seconds) for name in names}
    result = await stopped(begun)
    (path,) = result.files
    samples = read_counter_samples(path)
    labels = [metric.label for metric in samples.header.metrics]
    found: dict[str, Any] = {}
    for name, at in times.items():
        inside = (samples.start_ns > at["begin_ns"] + MARGIN_NS) & (samples.end_ns < at["end_ns"] - MARGIN_NS)
        means = np.nanmean(samples.values[inside], axis=0) if inside.any() else np.full(len(labels), np.nan)
        found[name] = {"samples": int(inside.sum()), **dict(zip(labels, map(float, means), strict=True))}
    found["losses"] = _losses(result)
    return found


def _losses(result: RecordedGpu) -> dict[str, Any]:
    each = result.losses
    return {
        "rows": each.rows, "gaps": each.gaps, "lost_ms": each.lost_ns / MS, "dropped": each.dropped_rows,
        "reason": each.reason,
    }  # fmt: skip


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def cost(client: CounterClient, uuid: str, work: GpuWork, interval_ns: int, seconds: float) -> dict[str, Any]:
    """The share of a core that kinetod-counters takes, and what it lost, beside matmuls."""
    begun = await recording(client, uuid, interval_ns)
    (pid,) = client.pids()
    before = cpu_seconds(pid)
    at = await work.do("matmul", seconds)
    used = cpu_seconds(pid) - before
    result = await stopped(begun)
    return {"cpu_share": used / ((at["end_ns"] - at["begin_ns"]) / 1e9), **_losses(result)}


async def kills(client: CounterClient, uuid: str, count: int) -> dict[str, Any]:
    """Starts, kills and starts again: how often a start failed, and the slowest one."""
    failed, slowest, loop = [], 0.0, asyncio.get_running_loop()
    for _ in range(count):
        began = loop.time()
        try:
            session = await client.start(uuid, WANTED, MS)
        except CounterError as exc:
            failed.append(exc.reason)
            continue
        slowest = max(slowest, loop.time() - began)
        (pid,) = client.pids()
        os.kill(pid, signal.SIGKILL)
        await session.stop()
        session.close()
    return {"kills": count, "failed": failed, "slowest_start_s": slowest}


def build_kernels(folder: Path) -> Path:
    source = folder / "spin.cu"
    source.write_text(KERNELS)
    subprocess.run([NVCC, "-o", str(folder / "spin"), str(source)], check=True, capture_output=True)
    return folder / "spin"


async def ncu(program: Path, *arguments: str) -> tuple[int, str]:
    """Exit status and output of ncu over the program."""
    command = [NCU, "--metrics", "sm__cycles_active.avg", "--clock-control", "none", str(program), *arguments]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


async def beside_ncu(client: CounterClient, uuid: str, program: Path) -> dict[str, Any]:
    """ncu before, during and after a sampling; and a sampling while ncu has the counters."""
    before = await ncu(program)
    begun = await recording(client, uuid, MS)
    during = await ncu(program)
    losses = _losses(await stopped(begun))
    after = await ncu(program)
    busy, mark = "", program.with_name("measured")
    profiled = asyncio.create_task(ncu(program, str(mark)))
    while not mark.exists() and not profiled.done():
        await asyncio.sleep(0.01)
    if not profiled.done():
        try:
            session = await client.start(uuid, WANTED, MS)
            await session.stop()
            session.close()
        except CounterError as exc:
            busy = f"{exc.code}: {exc.reason}"
    ended = await profiled
    said = next((line for line in during[1].splitlines() if "unavailable" in line or "ERROR" in line), "")
    return {
        "before": before[0], "during": [during[0], said.strip()], "losses": losses, "after": after[0],
        "busy": busy, "ncu_meanwhile": ended[0],
    }  # fmt: skip


async def two_samplers(client: CounterClient, uuid: str) -> dict[str, Any]:
    """What a second kinetod-counters is told, and what the first one loses."""
    begun = await recording(client, uuid, MS)
    async with sampler() as (second, _):
        try:
            await (await second.start(uuid, WANTED, MS)).stop()
            told = "it was given the counters"
        except CounterError as exc:
            told = f"{exc.code}: {exc.reason}"
    return {"second": told, "losses": _losses(await stopped(begun))}


async def paired_steps(
    client: CounterClient,
    uuid: str,
    work: GpuWork,
    phase: str,
    *,
    pairs: int,
    seconds: float,
    wanted: WantedCounters = WANTED,
    interval_ns: int = MS,
) -> dict[str, Any]:
    """Length of the steps of a program that goes on while it is sampled and not, in turns.

    ratio: the mean over the turns with sampling of their mean step over that of the turns before and after them, with
    half its 95 % interval. longest_ms: the longest step of all without sampling, with it, and while it begins or ends.
    watt, mhz: means without and with.
    """
    turns, read = [], PowerReader(uuid)
    await work.do(phase, 1)  # what it has to make is made
    work.begin(phase, MOST_S)
    for number in range(2 * pairs + 1):
        begun = await recording(client, uuid, interval_ns, wanted) if number % 2 else None
        began = time.time_ns()
        with read.turn(bool(number % 2)):
            await asyncio.sleep(seconds)
        turns.append((began, time.time_ns()))
        if begun is not None:
            await stopped(begun)
    work.begin("end", 0)
    ends = np.array((await work.end())["ends_ns"])
    await work.end()
    lengths = np.diff(ends) / 1e6
    place = np.full(len(lengths), -1)
    for number, (began, ended) in enumerate(turns):
        place[(ends[:-1] >= began) & (ends[1:] <= ended)] = number
    means = [float(lengths[place == number].mean()) for number in range(len(turns))]
    ratios = [2 * means[at] / (means[at - 1] + means[at + 1]) for at in range(1, len(means), 2)]
    groups = place < 0, (place >= 0) & (place % 2 == 0), (place >= 0) & (place % 2 == 1)
    between, without, with_ = (float(lengths[chosen].max(initial=0)) for chosen in groups)
    return {
        "ratio": statistics.mean(ratios), "half_interval": _half_interval(ratios), "pairs": pairs,
        "step_ms": statistics.mean(means[::2]), "longest_ms": [without, with_, between], **read.means(),
    }  # fmt: skip


class PowerReader:
    """Power and clock of a GPU in turns without and with sampling."""

    def __init__(self, uuid: str) -> None:
        self._source = NvmlPower(open_nvml(), uuid)
        self._found: tuple[list[tuple[float, float]], ...] = ([], [])

    @contextlib.contextmanager
    def turn(self, sampled: bool) -> Iterator[None]:
        done = threading.Event()
        labels = [metric.label for metric in self._source.metrics]

        def read() -> None:
            while not done.wait(0.1):
                values = dict(zip(labels, self._source.read(), strict=True))
                self._found[sampled].append((values[POWER] or 0.0, (values[SM_CLOCK] or 0.0) / 1e6))

        thread = threading.Thread(target=read)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def means(self) -> dict[str, list[float]]:
        watt, mhz = zip(*(np.mean(each, axis=0).tolist() for each in self._found), strict=True)
        return {"watt": [round(each, 1) for each in watt], "mhz": [round(each, 1) for each in mhz]}


def _half_interval(values: Sequence[float]) -> float:
    """Half the 95 % interval of their mean. Student's factor for n values is within 1 % of this from ten on."""
    if len(values) < 2:
        return float("nan")
    factor = 1.96 + 2.6 / (len(values) - 1)
    return float(factor * statistics.stdev(values) / len(values) ** 0.5)


async def against_ncu(client: CounterClient, uuid: str, work: GpuWork, seconds: float = 1.2) -> dict[str, Any]:
    """By phase and label what was sampled, and what ncu says of the same kernel: [sampled, ncu], in per cent.

    "MHz" are the clocks of both: a GPU that works without a pause has lower ones than where ncu runs a kernel now and
    then, so that a kernel out of memory executes more per cycle, and one that computes moves less per second.
    """
    sampled = await phases(client, uuid, work, tuple(NCU_KERNELS), seconds)
    found: dict[str, Any] = {}
    for phase, kernel in NCU_KERNELS.items():
        said = await asyncio.to_thread(_ncu_of_phase, phase, kernel)
        own = sampled[phase]
        found[phase] = {label: [round(own[label], 1), round(said[metric], 1)] for label, metric in NCU_METRICS.items()}
        found[phase]["MHz"] = [round(own["GPC clock"] / 1e6), round(said[NCU_CLOCK] / 1e6)]
    return found


def _ncu_of_phase(phase: str, kernel: str) -> dict[str, float]:
    """The mean of each metric over three launches of this kernel, after three others."""
    command = [
        NCU, "--csv", "--print-units", "base", "--clock-control", "none", "--cache-control", "none",
        "--metrics", ",".join([*NCU_METRICS.values(), NCU_CLOCK]),
        "--kernel-name", f"regex:{kernel}", "--launch-skip", "3", "--launch-count", "3", "--kill", "yes",
        sys.executable, "-m", "support.counters.gpu_work",
    ]  # fmt: skip
    done = subprocess.run(command, input=f"{phase} 2\n", capture_output=True, text=True, check=False, env=_environ())
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    values: dict[str, list[float]] = {}
    for row in csv.DictReader(lines):
        values.setdefault(row["Metric Name"], []).append(float(row["Metric Value"].replace(",", "")))
    if not values:
        raise AssertionError(f"ncu measured no kernel {kernel!r}: {done.stdout[-500:]} {done.stderr[-500:]}")
    return {name: statistics.mean(each) for name, each in values.items()}
