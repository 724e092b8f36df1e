"""On a real GPU: hardware counters by phases, what they cost, and whom they disturb."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from kinetod.counters.counter_client import CounterClient
from support.counters import gpu_proof as proof
from support.machine.gpus import torch_with_driver

torch = torch_with_driver()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
Ask = Callable[[CounterClient, str], Awaitable[Any]]


def asked(ask: Ask) -> Any:
    async def run() -> Any:
        async with proof.sampler() as (client, uuid):
            return await ask(client, uuid)

    return asyncio.run(run())


def test_phases_of_work_look_as_the_hardware_says() -> None:
    with proof.gpu_work() as work:
        found = asked(lambda client, uuid: proof.phases(client, uuid, work))
    assert found["matmul"]["Tensor pipe"] > 80 and found["matmul"]["DRAM"] < 40
    assert found["copy"]["Tensor pipe"] < 1 and found["copy"]["DRAM"] > 70
    assert found["sleep"]["GPU busy"] < 5
    assert (found["losses"]["lost_ms"], found["losses"]["dropped"]) == (0, 0)


def test_a_second_sampler_is_refused_and_disturbs_nobody() -> None:
    found = asked(proof.two_samplers)
    assert found["second"].startswith("COUNTERS_BUSY")
    assert found["losses"]["lost_ms"] == 0


def test_a_killed_sampler_leaves_the_counters_to_the_next() -> None:
    assert asked(lambda client, uuid: proof.kills(client, uuid, 5))["failed"] == []


@pytest.mark.skipif(not Path(proof.NCU).exists() or not Path(proof.NVCC).exists(), reason="needs ncu and nvcc")
def test_ncu_works_before_and_after_and_is_refused_meanwhile(tmp_path: Path) -> None:
    program = proof.build_kernels(tmp_path)
    found = asked(lambda client, uuid: proof.beside_ncu(client, uuid, program))
    assert (found["before"], found["after"]) == (0, 0)
    assert found["losses"]["lost_ms"] < 5  # ncu's attempt to begin may cost a sample, which is told
    assert found["during"][0] != 0
    assert "Nsight Compute" in found["busy"]
    assert subprocess.run([str(program)], check=False).returncode == 0
