"""`kinetoctl memory` and --memory through the real agent, daemon and command line."""

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.service.cli import run_process, wait_for_agent
from support.service.daemon import REPOSITORY, Daemon
from support.waiting import scaled_option

# A torch with CUDA that is a fake in the process; all the rest is real.
WITH_CUDA = f"""
import sys
sys.path.append({str(REPOSITORY / "tests")!r})
from support.targets.fake_torch import FakeTorch
torch = FakeTorch()
for module in (torch.module, torch.module.cuda, torch.module.cuda.memory):
    sys.modules[module.__name__] = module
def step():
    torch.allocate(512, 1000)
    torch.free(512)
"""
WITHOUT_CUDA = """
import torch
def step():
    torch.ones(4).sum()
"""
LOOP = """
import time
import kineto_agent
kineto_agent.start()
while True:
    step()
    time.sleep(0.001)  # other threads run
"""


@contextmanager
def program(daemon: Daemon, setup: str) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", setup + LOOP], env=daemon.client_environ())
    try:
        wait_for_agent(daemon, process.pid)
        yield process.pid
    finally:
        process.kill()
        process.wait()


def test_the_snapshot_arrives_as_torch_made_it(daemon: Daemon, tmp_path: Path) -> None:
    with program(daemon, WITH_CUDA) as pid:
        arguments = ("memory", "--pid", str(pid), "--duration", scaled_option(0.3), "--output-dir", str(tmp_path))
        result = run_process([*arguments, "-o", "json"], daemon.client_environ())
        assert result.code == 0, result.stdout + result.stderr
        (target,) = result.json()["targets"]
        (file,) = target["files"]
        assert file["format"] == "memory-snapshot"
        snapshot = pickle.loads(Path(file["path"]).read_bytes())
        assert set(snapshot) == {"segments", "device_traces", "allocator_settings"}
        assert "alloc" in {entry["action"] for entry in snapshot["device_traces"][0]}
        assert "allocations and frees, snapshot made in" in target["counts"][0]["way"]
        again = run_process([*arguments], daemon.client_environ())
        assert again.code == 0, again.stdout + again.stderr
        assert "https://pytorch.org/memory_viz" in again.stdout
        shown = run_process(
            ["report", "--view", "snapshot_devices", "-o", "json", result.json()["id"]], daemon.client_environ()
        )
        assert shown.json()["snapshot_devices"]["rows"][0]["segments"] == 1, shown.stderr


@pytest.mark.slow
def test_allocations_are_in_the_trace(daemon: Daemon, tmp_path: Path) -> None:
    with program(daemon, WITH_CUDA) as pid:
        arguments = ("trace", "--pid", str(pid), "--duration", scaled_option(0.3), "--output-dir", str(tmp_path))
        result = run_process([*arguments, "--memory", "--format", "chrome-json", "-o", "json"], daemon.client_environ())
        assert result.code == 0, result.stdout + result.stderr
        (target,) = result.json()["targets"]
        assert any("cover CUDA only" in warning for warning in target["warnings"])
        events = json.loads(Path(target["files"][0]["path"]).read_text())["traceEvents"]
        sizes = [event["args"]["Bytes"] for event in events if event.get("name") == "[memory]"]
        assert {1000, -1000} == set(sizes)
        assert abs(sum(sizes)) <= 1000


@pytest.mark.slow
@pytest.mark.torch
def test_a_process_without_cuda_is_refused_with_the_reason(daemon: Daemon, tmp_path: Path) -> None:
    with program(daemon, WITHOUT_CUDA) as pid:
        arguments = ("memory", "--pid", str(pid), "--duration", scaled_option(0.2), "--output-dir", str(tmp_path))
        result = run_process(arguments, daemon.client_environ())
        assert result.code == 5
        assert "[NO_CUDA]" in result.stdout
        assert not list(tmp_path.iterdir())
