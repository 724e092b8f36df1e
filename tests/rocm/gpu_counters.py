"""The part of the proof that samples hardware counters of an AMD GPU, beside the program that launches kernels."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).parents[1]))

from kinetod.counters.amdgpu_backend import LEAST_NS
from kinetod.processes.drm_gpus import drm_gpus
from support.counters.gpu_metrics_tables import PlayedAmdgpu
from support.rocm.program import RocmProgram
from support.service.cli import run_process
from support.service.daemon import Daemon

PERIOD_S = 2
BUSIER = 1.0  # points by which a GPU must be busier when the program launches
_TABLE = "gpu_metrics"


class Findings(Protocol):
    """Where checks are written."""

    def add(self, name: str, passed: bool | None, text: str, **figures: Any) -> None:
        """One check."""


@contextmanager
def played_gpu() -> Iterator[PlayedAmdgpu]:
    """A GPU for the proof without one."""
    with tempfile.TemporaryDirectory(prefix="kineto-amdgpu-") as folder:
        played = PlayedAmdgpu(Path(folder), (1, 8))
        with played.alive():
            yield played


def prove_counters(
    report: Findings, daemon: Daemon, running: RocmProgram, launches: int, played: PlayedAmdgpu | None
) -> None:
    """Samples every AMD GPU while nothing runs and while the program launches; the tables themselves are in the report.

    played: becomes busy when the program does.
    """
    listed = _asked(daemon, "counters", "list")
    gpus = {gpu["gpu"]["uuid"]: gpu for gpu in listed["gpus"] if gpu["chip"].startswith("gfx")}
    refused = {uuid: gpu["reason"] for uuid, gpu in gpus.items() if gpu.get("reason")}
    if not gpus or len(refused) == len(gpus):
        report.add("counters", None, f"no GPU of AMD can be sampled: {refused or 'none is listed'}", listed=listed)
        return
    tables = [_tables(played)]
    idle = _watched(daemon)
    alone = running.order(f"launch {launches}")
    end, costs = threading.Event(), list[float]()

    def launch() -> None:
        while not end.is_set():
            told = running.order(f"launch {launches}")
            costs.append((told["ended"] - told["began"]) / launches / 1000)

    if played is not None:
        played.instead["average_gfx_activity"] = 90
    thread = threading.Thread(target=launch)
    thread.start()
    try:
        busy = _watched(daemon)
    finally:
        end.set()
        thread.join()
    tables.append(_tables(played))
    most = {uuid: _mean(gpu, "GPU busy") - _mean(idle[uuid], "GPU busy") for uuid, gpu in busy.items() if uuid in idle}
    room = PERIOD_S * 1e9 / LEAST_NS
    samples = [gpu["samples"] for gpu in busy.values()]
    report.add(
        "counters", max(most.values(), default=0.0) > BUSIER and all(samples),
        f"{len(busy)} GPUs; the busiest one was {max(most.values(), default=0.0):.1f} points busier while the program "
        f"launched; {samples} samples of {room:.0f} in {PERIOD_S} s", idle=idle, busy=busy, refused=refused,
        gpu_metrics=tables,
    )  # fmt: skip
    before = (alone["ended"] - alone["began"]) / launches / 1000
    report.add(
        "cost of a launch while counters are sampled", None,
        f"{before:.2f} us without, {min(costs, default=0.0):.2f} us with, every {LEAST_NS / 1e6:g} ms",
    )  # fmt: skip


def _watched(daemon: Daemon) -> dict[str, Any]:
    found = _asked(daemon, "counters", "watch", "--once", "--interval", f"{PERIOD_S}s")
    return {gpu["uuid"]: gpu for gpu in found["gpus"] if any("gfx" in each["name"] for each in gpu["metrics"])}


def _asked(daemon: Daemon, *words: str) -> Any:
    """Raises ValueError."""
    done = run_process([*words, "-o", "json"], daemon.client_environ())
    if done.code != 0:
        raise ValueError(f"kinetoctl {' '.join(words)}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def _mean(gpu: Any, label: str) -> float:
    labels = [metric["label"] for metric in gpu["metrics"]]
    return float(gpu["means"][labels.index(label)]) if label in labels else 0.0


def _tables(played: PlayedAmdgpu | None) -> dict[str, str]:
    """The bytes of each GPU's table, for whoever knows a version that is not known here."""
    folders = played.folders if played is not None else [gpu.folder for gpu in drm_gpus() if gpu.vendor == "amd"]
    found = {}
    for folder in folders:
        done = subprocess.run(["cat", str(folder / _TABLE)], capture_output=True, check=False)
        found[folder.name] = done.stdout.hex() or done.stderr.decode(errors="replace").strip()
    return found
