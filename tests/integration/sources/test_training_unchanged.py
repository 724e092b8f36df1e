"""What a program computes does not depend on being traced."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.service.cli import run_process, wait_for_agent
from support.service.daemon import running_daemon
from support.waiting import scaled, scaled_option

pytestmark = [pytest.mark.slow, pytest.mark.torch]

TRAINING = Path(__file__).with_name("seeded_training.py")
CAPTURES = (
    (),
    ("--record-shapes",),
    ("--with-stack=trace", "--with-modules"),
    ("--activities", "cpu_op,user_annotation,python_function"),
)


def start(environ: dict[str, str], *arguments: str) -> "subprocess.Popen[str]":
    """A training run, past its preparations."""
    command = [sys.executable, str(TRAINING), *arguments]
    process = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def losses(process: "subprocess.Popen[str]") -> list[str]:
    """All of them, exactly, at the end of the run."""
    output, _ = process.communicate(timeout=scaled(200))
    assert process.returncode == 0
    found: list[str] = json.loads(output)["losses"]
    return found


def test_the_losses_of_a_seeded_run_are_bit_identical_with_and_without_captures(tmp_path: Path) -> None:
    with running_daemon() as daemon:
        environ = daemon.client_environ()
        traced = start(environ, "100")
        wait_for_agent(daemon, traced.pid)
        for arguments in CAPTURES:
            command = ["trace", "--pid", str(traced.pid), "--duration", scaled_option(0.2), "--no-fetch", "-o", "json"]
            # Every call of a loop that does nothing else: the default memory is full after 0.1 s of a fast machine.
            result = run_process([*command, "--buffer-limit=1GiB", *arguments], environ, tmp_path)
            (target,) = result.json()["targets"]
            assert target["verdict"] == "VERDICT_DONE", target
            assert target["summary"]["activities"].get("cpu_op", 0) > 0
        with_captures = losses(traced)
        without = losses(start(environ, "--exactly", str(len(with_captures))))
    assert len(with_captures) > 100
    assert with_captures == without
