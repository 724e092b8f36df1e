"""What a program does after a trace, while the agent stays: the agent's hooks run on its threads then."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.machine.kernel import allowed_to_trace
from support.machine.native import fake_graph_driver
from support.service.cli import kinetoctl, run_process, wait_for_agent
from support.service.daemon import Daemon
from support.targets.live_target import pythons
from support.targets.python_versions import other_versions_slow
from support.waiting import scaled, scaled_option

pytestmark = pytest.mark.skipif(not allowed_to_trace(), reason="the kernel does not let us trace (ptrace_scope?)")
PROGRAM = Path(__file__).parents[2] / "campaign" / "attach_targets" / "afterwards.py"
USED_S = 1.0  # of processor time: the program's thread slept for three times as long
HOOKED = ["CUDAGraph.capture_begin", "CUDAGraph.capture_end", "Profile.step", "StepTraceAnnotation.__init__", "step"]


@contextmanager
def running(command: list[str], environ: dict[str, str]) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def afterwards(daemon: Daemon, process: "subprocess.Popen[str]", folder: Path, *options: str) -> dict[str, Any]:
    """What the program says after a trace."""
    arguments = ["--pid", str(process.pid), "--duration", scaled_option(0.3), "--output-dir", str(folder), *options]
    traced = run_process(["trace", *arguments], daemon.client_environ())
    assert traced.code == 0, traced.stderr
    output, _ = process.communicate("go on\n", timeout=60)
    assert process.returncode == 0
    found: dict[str, Any] = json.loads(output)
    return found


def harm(found: dict[str, Any]) -> dict[str, Any]:
    """The things that took as long as the program had run, or did what they must not do."""
    assert found.pop("hooked") == HOOKED
    return {name: (took_s, events) for name, (took_s, events) in found.items() if events or took_s > scaled(USED_S)}


def cuda_library(folder: Path) -> str:
    """A library of the name by which a torch with CUDA is known."""
    return str(shutil.copy(fake_graph_driver(), folder / "libc10_cuda.so"))


@pytest.mark.parametrize("python", other_versions_slow(pythons()))
def test_hooks_load_open_start_and_wait_for_nothing_on_the_programs_thread(
    daemon: Daemon, tmp_path: Path, python: str
) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("KINETO", "PYTHON"))}
    with running([python, str(PROGRAM), str(USED_S), cuda_library(tmp_path)], environ) as process:
        assert harm(afterwards(daemon, process, tmp_path)) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [("--activities", "python_function"), ("--with-stack=trace",), ("--record-shapes",)], ids=" ".join
)
def test_the_same_holds_after_every_kind_of_trace(daemon: Daemon, tmp_path: Path, options: tuple[str, ...]) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("KINETO", "PYTHON"))}
    with running([sys.executable, str(PROGRAM), str(USED_S), cuda_library(tmp_path)], environ) as process:
        assert harm(afterwards(daemon, process, tmp_path, *options)) == {}


def test_the_same_holds_in_a_program_that_was_started_with_the_agent(daemon: Daemon, tmp_path: Path) -> None:
    command = kinetoctl("--quiet", "run", "--", sys.executable, str(PROGRAM), str(USED_S), cuda_library(tmp_path))
    with running(command, daemon.client_environ()) as process:
        wait_for_agent(daemon, process.pid)
        assert harm(afterwards(daemon, process, tmp_path)) == {}
