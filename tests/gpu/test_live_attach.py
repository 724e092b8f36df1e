"""On a real GPU: processes that nobody prepared are traced by their pid, and are none the worse for it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench import overhead  # its control of programs and of kinetoctl
from support.machine.gpus import torch_with_driver
from support.service.daemon import running_daemon

torch = torch_with_driver()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
NVCC = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
LOOP_CU = Path(__file__).with_name("launch_loop.cu")


def trace(environ: dict[str, str], pid: int, folder: Path, *arguments: str) -> dict[str, Any]:
    """The only target of a trace of half a second."""
    command = ["trace", "--pid", str(pid), "--duration", "0.5s", "--output-dir", str(folder), *arguments]
    (target,) = json.loads(overhead.control(environ, *command).stdout)["targets"]
    assert isinstance(target, dict)
    return target


@pytest.mark.parametrize("work", ["launch", "compute"])
def test_a_plain_python_training_is_traced_by_its_pid(work: str, tmp_path: Path) -> None:
    with running_daemon() as daemon:
        environ = daemon.client_environ()
        loop = overhead.start_loop(environ, work, tmp_path / "log.json", agent=False, extra=[])
        targets = [trace(environ, loop.pid, tmp_path, "--keep-agent", "0s") for _ in range(5)]
        logged = overhead.end_loop(loop, tmp_path / "log.json")
    assert loop.returncode == 0
    assert len(logged["steps"]) > 20
    for target in targets:
        assert target["verdict"] == "VERDICT_DONE", target["reason"]
        assert target["attach"]["method"] in ("pending-call", "native-thread")
        assert int(target["summary"]["activities"]["kernel"]) > 100
        assert int(target["summary"]["activities"]["python_function"]) > 10


@pytest.mark.skipif(not Path(NVCC).exists(), reason="needs nvcc")
def test_a_compiled_cuda_program_is_traced_by_its_pid(tmp_path: Path) -> None:
    program = tmp_path / "launch_loop"
    subprocess.run([NVCC, "-O2", "-o", str(program), str(LOOP_CU)], check=True)
    with running_daemon() as daemon:
        environ = daemon.client_environ()
        process = subprocess.Popen([str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        targets = [trace(environ, process.pid, tmp_path, "--keep-agent", "0s") for _ in range(3)]
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert output.endswith("right\n")
    print(output, json.dumps([target.get("attach") for target in targets]), file=sys.stderr)
    for target in targets:
        assert target["verdict"] == "VERDICT_DONE", target["reason"]
        assert target["attach"]["method"] == "collector"
        assert int(target["summary"]["activities"]["kernel"]) > 100
        assert int(target["summary"]["activities"]["cuda_runtime"]) > 100
