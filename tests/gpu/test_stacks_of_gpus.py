"""On a GPU from Hopper on: `kinetoctl stacks` tells one that waits from one that computes and from an idle one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.machine.gpus import torch_with_driver
from support.service.cli import kinetoctl
from support.service.daemon import child_environ, running_daemon

torch = torch_with_driver()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="needs an NVIDIA GPU from Hopper on",
    ),
]
PROGRAM = """
import sys, threading
import torch

kind, data = sys.argv[1], torch.ones(16384, 16384, device="cuda", dtype=torch.bfloat16) / 16384
(data @ data).sum().item()
print("begun", flush=True)
if kind == "waits":
    torch.cuda._sleep(1 << 37)  # spins for a minute
elif kind == "rests":
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
while True:
    for _ in range(300 if kind == "computes" else 1):
        data = data @ data
    if float(data.sum()) < 0:
        break
"""
WAITS = "is busy without floating-point work or memory traffic, as when a kernel waits"


@pytest.mark.parametrize(
    ("kind", "wait", "does"),
    [
        ("waits", "WAIT_GPU", WAITS),
        ("computes", "WAIT_GPU", r"is busy [\d.]+ % of the time"),
        ("rests", "", "is idle"),
    ],
)
def test_what_the_gpu_does_for_which_a_thread_waits_is_told(tmp_path: Path, kind: str, wait: str, does: str) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    with (
        running_daemon() as daemon,
        subprocess.Popen(
            [sys.executable, str(file), kind], env=child_environ(), stdout=subprocess.PIPE, text=True
        ) as program,
    ):
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == "begun\n"
            for options in (["-o", "json"], []):
                looked = subprocess.run(
                    kinetoctl(*options, "stacks", str(program.pid)),
                    env=daemon.client_environ(),
                    capture_output=True,
                    text=True,
                    timeout=60,
                )
                print(looked.stdout[-6000:], looked.stderr)
                if options:
                    found = json.loads(looked.stdout)
        finally:
            program.kill()
    (process,) = found["processes"]
    (gpu,) = process["gpus"]
    print(json.dumps({"kind": kind, **{name: value for name, value in gpu.items() if name.endswith("active")}}))
    where = rf"waits for the GPU \(cuStreamSynchronize\) in <module> \(program.py:\d+\); its GPU {does}\.$"
    assert bool(re.search(where, found["verdict"])) == bool(wait), found["verdict"]
    assert re.search(rf"\n  GPU {gpu['gpu'].get('index', 0)} {does}\n", looked.stdout)
    assert [each["wait"] for each in process["threads"][:1]] == [wait or "WAIT_LOCK"]
