"""On a real GPU: a torch program that nobody prepared is traced with hardware counters, which are those of its own GPU.

Run it with `pytest -s tests/gpu/test_trace_counters.py`; each test prints a line of JSON with its figures.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from kineto_trace import open_trace
from kineto_trace.model.trace import Trace
from kinetod.counters.counter_client import CounterClient
from support.counters import gpu_proof as proof
from support.machine.gpus import torch_with_driver
from support.service.cli import Result, run_process
from support.service.daemon import Daemon, child_environ, running_daemon

torch = torch_with_driver()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
PHASE_S = 12  # longer than the attachment and the trace


@contextmanager
def working(phase: str, **environ: str) -> Iterator[int]:
    """The pid of a program that is in this phase of support.counters.gpu_work."""
    process = subprocess.Popen(
        [sys.executable, "-m", "support.counters.gpu_work"],
        env=child_environ(**environ), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout is not None and process.stdin is not None
        assert json.loads(process.stdout.readline())["ready"]
        process.stdin.write(f"{phase} {PHASE_S}\n")
        process.stdin.flush()
        yield process.pid
        process.kill()


def traced(daemon: Daemon, folder: Path, *arguments: str, pids: list[int]) -> Any:
    named = [argument for pid in pids for argument in ("--pid", str(pid))]
    command = ["trace", *named, "--counters", "--duration", "2s", "-o", "json", *arguments]
    result: Result = run_process(command, daemon.client_environ(), folder)
    assert result.code == 0, result.stderr
    return result.json()


def stored(daemon: Daemon, capture: Any, pid: int) -> Trace:
    (path,) = (daemon.state_dir / "captures" / capture["id"] / "targets").glob(f"{pid}-*")
    return open_trace(path)


def values(trace: Trace, label: str) -> npt.NDArray[np.float64]:
    """Of device 0."""
    rows = trace.table("counter")
    chosen = (rows["name"] == trace.strings.index(label)) & (rows["device"] == 0)
    found: npt.NDArray[np.float64] = rows["value"][chosen]
    return found


def test_matmuls_show_the_tensor_pipe_and_samples_cover_the_window(tmp_path: Path) -> None:
    with running_daemon() as daemon, working("matmul") as pid:
        capture = traced(daemon, tmp_path, pids=[pid])
        (target,), (sampled,) = capture["targets"], capture["counters"]
        trace = stored(daemon, capture, pid)
        found = {
            label: round(float(np.nanmean(values(trace, label))), 1) for label in ("Tensor pipe", "DRAM", "SM busy")
        }
        told = {name: sampled[name] for name in ("samples", "gaps", "lost_ns", "dropped_samples", "reason_code")}
        print(json.dumps({"means": found, **told, "warnings": target["warnings"]}))
        assert (target["verdict"], target["warnings"], sampled["reason_code"]) == ("VERDICT_DONE", [], "")
        assert sampled["gpu"]["uuid"] == f"GPU-{torch.cuda.get_device_properties(0).uuid}"
        assert target["summary"]["activities"]["kernel"] > 0
        assert found["Tensor pipe"] > 80
        assert 1990 <= len(values(trace, "Tensor pipe")) <= 2010


def test_who_holds_the_counters_keeps_them_and_the_trace_goes_on(tmp_path: Path) -> None:
    async def held(client: CounterClient, uuid: str) -> Any:
        begun = await proof.recording(client, uuid, proof.MS)
        try:
            return await asyncio.to_thread(_traced_beside, tmp_path)
        finally:
            assert (await proof.stopped(begun)).losses.code == ""

    async def ask() -> Any:
        async with proof.sampler() as (client, uuid):
            return await held(client, uuid)

    capture = asyncio.run(ask())
    (target,), (sampled,) = capture["targets"], capture["counters"]
    print(json.dumps({"reason": sampled["reason"], "kernels": target["summary"]["activities"]["kernel"]}))
    assert (target["verdict"], sampled["reason_code"]) == ("VERDICT_DONE", "COUNTERS_BUSY")
    assert any("hardware counters of GPU" in warning for warning in target["warnings"])
    assert target["summary"]["activities"]["kernel"] > 0


def _traced_beside(folder: Path) -> Any:
    with running_daemon() as daemon, working("matmul") as pid:
        return traced(daemon, folder, pids=[pid])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
def test_each_of_two_processes_has_the_counters_of_its_own_gpu(tmp_path: Path) -> None:
    with (
        running_daemon() as daemon,
        working("matmul", CUDA_VISIBLE_DEVICES="1") as busy,
        working("sleep", CUDA_VISIBLE_DEVICES="0") as idle,
    ):
        capture = traced(daemon, tmp_path, pids=[busy, idle])
        found = {
            name: float(np.nanmean(values(stored(daemon, capture, pid), "Tensor pipe")))
            for name, pid in (("busy", busy), ("idle", idle))
        }
        print(json.dumps({"tensor pipe": found, "gpus": [each["gpu"] for each in capture["counters"]]}))
        assert found["busy"] > 80 and found["idle"] < 1
        assert len(capture["counters"]) == 2
