"""A program that stands in a call of ours: `captures show`, `doctor`, `ps` and the audit log say so while it lasts."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.machine.native import FAKES, fake_cupti
from support.service.cli import kinetoctl, run_process, wait_for_agent
from support.service.daemon import Daemon, running_daemon
from support.waiting import scaled_option, until

pytestmark = pytest.mark.slow  # a call is told once it has lasted 3 s
FOR_EVER_MS = 3_600_000


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon whose audit log is tmp_path/audit."""
    environ = {"KINETOD_ACCESS_AUDIT_FILE": str(tmp_path / "audit"), "KINETOD_AGENT_DEADLINE": scaled_option(6)}
    with running_daemon(environ=environ) as daemon:
        yield daemon


@pytest.fixture
def app(watched: Daemon, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A "training" loop that stands in the fake CUPTI, where it is told to, until tmp_path/gate is opened."""
    os.mkfifo(tmp_path / "gate")
    command = [sys.executable, str(FAKES / "fake_cuda_app.py"), "--gate", str(tmp_path / "gate")]
    environ = {**watched.client_environ(), "KINETO_CUPTI_LIBRARY": str(fake_cupti())}
    run = kinetoctl("--quiet", "run", "--", *command)
    with subprocess.Popen(run, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["ready"]
            wait_for_agent(watched, process.pid)
            yield process
        finally:
            process.kill()


def traced(daemon: Daemon, app: subprocess.Popen[str], fault: str, folder: Path) -> tuple[str, Any]:
    """The id and the only target of a capture of a program with this fault."""
    assert app.stdin is not None
    assert app.stdout is not None
    app.stdin.write(f"{fault} {FOR_EVER_MS}\n")
    app.stdin.flush()
    assert json.loads(app.stdout.readline()) == {"set": fault}
    options = ["--duration", "100ms", "--activities", "kernel", "-o", "json"]
    done = run_process(["trace", "--pid", str(app.pid), *options], daemon.client_environ(), folder)
    capture = done.json()
    (target,) = capture["targets"]
    return capture["id"], target


def said(daemon: Daemon, *arguments: str) -> str:
    """What kinetoctl says, on one line."""
    return " ".join(run_process(arguments, daemon.client_environ()).stdout.split())


def audited(folder: Path) -> list[tuple[str, str, str, int]]:
    lines = [json.loads(line) for line in (folder / "audit").read_text().splitlines()]
    found = [line for line in lines if line["call"] == "(standing call)"]
    return [(line["decision"], line["vendor_call"], line["capture"], line["target_pid"]) for line in found]


def test_a_program_inside_cuptifinalize_is_named_until_that_has_returned(
    watched: Daemon, app: subprocess.Popen[str], tmp_path: Path
) -> None:
    capture_id, target = traced(watched, app, "finalize_delay_ms", tmp_path)
    assert (target["verdict"], target["reason_code"]) == ("VERDICT_PARTIAL", "INCOMPLETE")
    where = f"a thread of process {app.pid} has been inside cuptiFinalize for "
    assert where in said(watched, "captures", "show", capture_id)
    assert where in said(watched, "doctor", str(app.pid))
    assert where in said(watched, "doctor")
    assert "no: inside cuptiFinalize" in said(watched, "ps", "--pid", str(app.pid))
    assert audited(tmp_path) == [("stands", "cuptiFinalize", capture_id, app.pid)]
    (tmp_path / "gate").write_bytes(b"")
    until(lambda: where not in said(watched, "captures", "show", capture_id), "it has returned")
    assert "standing_call" not in said(watched, "doctor", str(app.pid))
    assert audited(tmp_path)[1:] == [("returned", "cuptiFinalize", capture_id, app.pid)]


def test_an_agent_inside_cuptis_first_call_is_named_until_that_has_returned(
    watched: Daemon, app: subprocess.Popen[str], tmp_path: Path
) -> None:
    capture_id, target = traced(watched, app, "subscribe_delay_ms", tmp_path)
    assert (target["verdict"], target["reason_code"]) == ("VERDICT_FAILED", "GPU_DOES_NOT_DRAIN")
    where = f"a thread of the agent in process {app.pid} has been inside cuptiSubscribe for "
    until(lambda: where in said(watched, "captures", "show", capture_id), "it has lasted 3 s")
    assert where in said(watched, "doctor", str(app.pid))
    (tmp_path / "gate").write_bytes(b"")
    until(lambda: where not in said(watched, "doctor", str(app.pid)), "it has returned")
    assert [decision for decision, *_ in audited(tmp_path)] == ["stands", "returned"]
