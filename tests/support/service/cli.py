"""Runs kinetoctl for tests: in this process, or as a real one."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl.__main__ import main

from support.service.daemon import IMPORT_PATH, Daemon
from support.waiting import scaled, until

DEADLINE_S = 60
CALL_S = 10
PAUSE_S = 0.1  # a daemon limits the requests a second


@dataclass(frozen=True)
class Result:
    """Exit status and output of a run of kinetoctl."""

    code: int
    stdout: str
    stderr: str

    def json(self) -> Any:
        """Standard output, which must be one JSON value and nothing else."""
        return json.loads(self.stdout)


Run = Callable[..., Result]


def run_here(capsys: pytest.CaptureFixture[str], address: str, *arguments: str) -> Result:
    """Run `kinetoctl --address ADDRESS ARGUMENTS...` in this process."""
    code = main(["--address", address, *arguments])
    captured = capsys.readouterr()
    return Result(code, captured.out, captured.err)


def kinetoctl(*arguments: str) -> list[str]:
    """The command line of a kinetoctl process."""
    return [sys.executable, "-m", "kinetoctl", *arguments]


def environment(**changes: str) -> dict[str, str]:
    """This process's environment with the packages of the repository importable."""
    return {**os.environ, "PYTHONPATH": IMPORT_PATH, **changes}


def run_process(
    arguments: Sequence[str], environ: Mapping[str, str], cwd: Path | None = None, prefix: Sequence[str] = ()
) -> Result:
    """Run kinetoctl as a process of its own. prefix: a command that runs the command behind it."""
    command = [*prefix, *kinetoctl(*arguments)]
    done = subprocess.run(
        command, env=dict(environ), cwd=cwd, capture_output=True, text=True, timeout=scaled(DEADLINE_S)
    )
    return Result(done.returncode, done.stdout, done.stderr)


def watched_counters(environ: Mapping[str, str], *options: str, least: int = 1) -> list[Any]:
    """The GPUs of `counters watch --once`, when a busy machine has let each of them be sampled so often."""

    def sampled() -> list[Any]:
        result = run_process(["counters", "watch", "--once", "-o", "json", *options], environ)
        assert result.code == 0, result
        gpus: list[Any] = result.json()["gpus"]
        return gpus if all(gpu["samples"] >= least for gpu in gpus) else []

    return until(sampled, "all GPUs are sampled", DEADLINE_S)


def wait_for_agent(daemon: Daemon, pid: int) -> None:
    """Waits until the agent in this process can be asked for a trace."""

    def ready() -> bool:
        found = _process(daemon, pid)
        return found is not None and found.agent_state == pb.AGENT_STATE_READY

    until(ready, f"the agent in {pid} is ready", DEADLINE_S, state=daemon.log, pause_s=PAUSE_S)


def wait_for_records(daemon: Daemon, pid: int) -> None:
    """Waits until the daemon has copied a record of the running capture of this process, other than marks of steps."""

    def recorded() -> bool:
        found = _process(daemon, pid)
        if found is None or not found.busy_capture_id:  # its agent may still be on the way
            return False
        capture = daemon.stub().GetCapture(pb.GetCaptureRequest(id=found.busy_capture_id), timeout=CALL_S)
        counts = [count for target in capture.targets for count in target.counts]
        return any(count.records for count in counts if count.source != "steps")

    until(recorded, f"records of process {pid} have come", DEADLINE_S, pause_s=PAUSE_S)


def _process(daemon: Daemon, pid: int) -> pb.Process | None:
    """As `ps` lists it. None: the daemon does not know it yet."""
    request = pb.ListProcessesRequest(selector=pb.Selector(pids=[pid]))
    try:
        found = daemon.stub().ListProcesses(request, timeout=CALL_S).processes
    except grpc.RpcError:
        return None
    return next(iter(found), None)
