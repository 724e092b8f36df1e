"""Programs that profile themselves with CUPTI, with and without captures of ours: `python tests/gpu/foreign_cupti.py`.

For jax.profiler, a user of CUPTI through ctypes and torch.profiler: the GPU events of each own trace, in a row without
a capture and in a row with captures before, between, during and after them. The own traces must not be poorer.
Exits with 1 if one is. Names of programs as arguments choose among them; `fake` needs no GPU.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import grpc
from campaign.parts.profiler_stress import KINDS, capture, offered
from kineto_agent.system import env
from kineto_protos.v1 import profiler_pb2 as pb
from support.machine.native import fake_cupti
from support.service.daemon import Daemon, running_daemon

PROGRAM = Path(__file__).parents[1] / "support" / "targets" / "self_profiling.py"
SESSIONS = 10
DURATIONS_MS = (30, 200, 700)
POORER = 0.98  # of the median without captures
EVERYTHING = KINDS[0]


def start(daemon: Daemon, mode: str) -> subprocess.Popen[str]:
    """The program, with its agent connected to the daemon."""
    environ = {**daemon.client_environ(), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if mode == "fake":
        environ[env.CUPTI_LIBRARY] = str(fake_cupti())
    command = [sys.executable, "-W", "ignore", str(PROGRAM), mode, str(SESSIONS)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=environ, text=True)


def events_of(process: subprocess.Popen[str]) -> list[int]:
    """GPU events of its own traces, once it has ended. Raises CalledProcessError."""
    output, _ = process.communicate()
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return [json.loads(line)["events"] for line in output.splitlines()]


def captures_until_end(daemon: Daemon, process: subprocess.Popen[str]) -> Counter[str]:
    """Captures in a row; how they ended."""
    verdicts: Counter[str] = Counter()
    offered(daemon.stub(), process.pid)
    while process.poll() is None:
        try:
            ended = capture(daemon.stub(), process.pid, EVERYTHING, DURATIONS_MS[verdicts.total() % len(DURATIONS_MS)])
        except grpc.RpcError:
            break  # it has ended
        verdicts[f"{pb.Verdict.Name(ended.verdict).removeprefix('VERDICT_')} {ended.reason_code}".rstrip()] += 1
    return verdicts


def compare(daemon: Daemon, mode: str) -> bool:
    """Print both rows; whether the second is as rich as the first."""
    alone = events_of(start(daemon, mode))
    process = start(daemon, mode)
    verdicts = captures_until_end(daemon, process)
    beside = events_of(process)
    whole = min(beside) >= POORER * statistics.median(alone)
    row = "{:8s} {:9s} {}"
    print(row.format(mode, "alone", " ".join(map(str, alone))))
    print(row.format("", "captured", " ".join(map(str, beside))), "whole" if whole else "POORER")
    print(row.format("", "captures", ", ".join(f"{n} {name}" for name, n in sorted(verdicts.items()))))
    return whole


def main() -> int:
    """All that are named."""
    with running_daemon() as daemon:
        results = [compare(daemon, mode) for mode in sys.argv[1:] or ("jax", "ctypes", "torch")]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
