"""On two GPUs or more: what all-reduces move over NVLink, by hardware counters, is what the arithmetic says.

Prints one line of JSON for each rank.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from gpu.collective_work import BYTES
from kineto_trace import open_trace
from kineto_trace.analysis.counters.hardware_counter_views import collective_counters
from kineto_trace.model.context import Context
from support.machine.gpus import torch_with_driver
from support.service.cli import run_process
from support.service.daemon import child_environ, running_daemon

torch = torch_with_driver()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]
RANKS = 2


@contextmanager
def job() -> Iterator[list[int]]:
    """The pids of its ranks, which work."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "gpu.collective_work", str(rank), str(RANKS), str(port)],
                    env=child_environ(),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in range(RANKS)
        ]
        for rank in ranks:
            assert rank.stdout is not None
            assert json.loads(rank.stdout.readline())["ready"]
        yield [rank.pid for rank in ranks]
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.close()


def test_an_all_reduce_moves_over_nvlink_what_its_bus_bandwidth_says(tmp_path: Path) -> None:
    with running_daemon() as daemon, job() as pids:
        named = [argument for pid in pids for argument in ("--pid", str(pid))]
        command = ["trace", *named, "--counters=interconnect", "--duration", "3s", "-o", "json"]
        result = run_process([*command, "--output-dir", str(tmp_path)], daemon.client_environ(), tmp_path)
    assert result.code == 0, result.stderr
    print(
        json.dumps([{key: each.get(key) for key in ("gpu", "samples", "reason")} for each in result.json()["counters"]])
    )
    paths = sorted(tmp_path.glob("*.json.gz"))
    assert len(paths) == RANKS
    for path in paths:
        rows = collective_counters(Context(open_trace(path))).rows()
        (row,) = (row for row in rows if row["bytes"] == BYTES)
        print(json.dumps(row))
        assert row["nvlink_sent_gb_s"] > 50, row["why"]
        assert 95 < row["nvlink_pct"] < 125  # headers and flags come on top
