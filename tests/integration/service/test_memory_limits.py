"""Jobs that are near the limit of their memory control group, traced through a real daemon: none is killed."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.agent.python_child import environment
from support.losses import without_losses
from support.machine.cgroups import MIB, RealGroup, real_group
from support.machine.kernel import allowed_to_trace
from support.service.cli import Result, run_process
from support.service.daemon import Daemon
from support.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not allowed_to_trace(), reason="the kernel does not let us trace (ptrace_scope?)"),
]

PROGRAM = """
import os, sys
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
ballast = bytearray(20 << 20)
ballast[::4096] = b"x" * len(ballast[::4096])
print("ready", flush=True)
while True:
    sum(range(1000))
"""


@contextmanager
def job(name: str, left: int) -> "Iterator[tuple[subprocess.Popen[str], RealGroup]]":
    """A process with so much memory left, which must live to the end of the test."""
    with real_group("memory", name) as group:
        command = [sys.executable, "-c", PROGRAM, str(group.folder)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(), text=True)
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            group.write("memory.limit_in_bytes", group.number("memory.usage_in_bytes") + left)
            yield process, group
            assert process.poll() is None
        finally:
            process.kill()
            process.communicate()
            until(lambda: not (group.folder / "cgroup.procs").read_text(), "it is gone")


def trace(daemon: Daemon, pid: int, folder: Path, duration: str = "500ms") -> Result:
    arguments = ("trace", "--pid", str(pid), "--duration", duration, "--output-dir", str(folder), "-o", "json")
    return run_process(arguments, daemon.client_environ())


def test_a_job_whose_memory_is_used_up_is_refused_and_lives(daemon: Daemon, tmp_path: Path) -> None:
    with job("kineto-full", 3 * MIB) as (process, _group):
        result = trace(daemon, process.pid, tmp_path)
        assert result.code != 0
        assert "ATTACH_LIMIT" in result.stderr
        assert "of the control group /kineto-full; an attach with a small trace needs 12 MiB" in result.stderr
        told = run_process(["doctor", str(process.pid)], daemon.client_environ())
        assert "of the control group /kineto-full" in told.stdout


def test_buffers_are_shrunk_to_what_is_left_and_the_verdict_says_so(daemon: Daemon, tmp_path: Path) -> None:
    with job("kineto-near", 16 * MIB) as (process, _group):
        (target,) = trace(daemon, process.pid, tmp_path).json()["targets"]
        assert target["verdict"] == "VERDICT_DONE", target["reason"]
        (warning,) = without_losses(target["warnings"])
        assert warning.startswith("the buffers were reduced from 128 MiB to 2 MiB for each source")


def test_a_capture_ends_early_when_the_memory_becomes_short(daemon: Daemon, tmp_path: Path) -> None:
    with job("kineto-short", 64 * MIB) as (process, group):
        results: list[Result] = []
        tracing = threading.Thread(target=lambda: results.append(trace(daemon, process.pid, tmp_path, "60s")))
        tracing.start()
        collects = "TARGET_STATE_COLLECT"
        until(lambda: collects in _captures(daemon), "it collects")
        group.write("memory.limit_in_bytes", group.number("memory.usage_in_bytes") + 3 * MIB)
        tracing.join()
        (target,) = results[0].json()["targets"]
        assert (target["verdict"], target["reason_code"]) == ("VERDICT_PARTIAL", "MEMORY_SHORT")
        assert (
            "was running out of memory, so the capture was ended before the kernel could kill a process"
            in target["reason"]
        )


def _captures(daemon: Daemon) -> str:
    return run_process(["captures", "list", "-o", "json"], daemon.client_environ()).stdout
