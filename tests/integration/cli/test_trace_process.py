"""kinetoctl against a real daemon and a real agent in a real process."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.service.cli import Result, kinetoctl, run_process, wait_for_agent, wait_for_records
from support.service.daemon import Daemon, running_daemon
from support.targets.programs import crunching, program
from support.waiting import scaled

PLAIN_PROGRAM = "import sys; print('ready', flush=True); sys.stdin.read()"


@pytest.fixture
def child(daemon: Daemon) -> Iterator[subprocess.Popen[str]]:
    with program(crunching(), daemon, quiet=True) as started:
        wait_for_agent(daemon, started.pid)
        yield started


def run(daemon: Daemon, *arguments: str, cwd: Path | None = None) -> Result:
    return run_process(list(arguments), daemon.client_environ(), cwd)


def start_trace(daemon: Daemon, pid: int, folder: Path, duration: str) -> subprocess.Popen[str]:
    """A trace whose target is collecting now."""
    process = subprocess.Popen(
        kinetoctl("trace", "--pid", str(pid), "--duration", duration),
        env=daemon.client_environ(),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    seen = ""
    while "COLLECT" not in seen:
        line = process.stderr.readline()
        assert line, seen
        seen += line
    return process


def traced_functions(path: Path) -> set[str]:
    with gzip.open(path, "rt") as stream:
        events = json.load(stream)["traceEvents"]
    return {event["name"] for event in events if event.get("cat") == "python_function"}


def test_a_process_is_traced_by_its_pid(daemon: Daemon, child: subprocess.Popen[str], tmp_path: Path) -> None:
    result = run(daemon, "trace", "--pid", str(child.pid), "--duration", "2s", cwd=tmp_path)
    assert result.code == 0, result
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("kineto-")
    assert path.name.endswith(".json.gz")
    assert any("crunch_numbers" in name for name in traced_functions(path))
    assert f"{path.name} (" in result.stdout
    assert "SHA-256 verified" in result.stdout
    assert "crunch_numbers" in result.stdout
    last = result.stderr.removesuffix("analysing\n").splitlines()[-1]
    assert re.fullmatch(rf"pid {child.pid}: DONE, [0-9.]+ s of 2 s, [0-9,]+ records, [0-9.]+ .?i?B, 0 dropped", last)
    assert "\r" not in result.stderr


def test_json_output_is_one_document_and_nothing_else(
    daemon: Daemon, child: subprocess.Popen[str], tmp_path: Path
) -> None:
    arguments = ["trace", "--pid", str(child.pid), "--duration", "200ms", "--label", "team=vision", "-o", "json"]
    result = run(daemon, *arguments, cwd=tmp_path)
    document = result.json()
    assert result.code == 0
    assert document["status"] == "CAPTURE_STATUS_DONE"
    assert document["spec"]["duration_ns"] == 200_000_000
    (target,) = document["targets"]
    assert target["verdict"] == "VERDICT_DONE"
    (file,) = target["files"]
    assert (tmp_path / file["path"]).stat().st_size == file["size_bytes"]
    assert target["summary"]["window_end_ns"] - target["summary"]["window_start_ns"] == 200_000_000


def test_iterations_are_counted_in_the_process(daemon: Daemon, child: subprocess.Popen[str], tmp_path: Path) -> None:
    result = run(daemon, "trace", "--pid", str(child.pid), "--iterations", "20", "-o", "json", cwd=tmp_path)
    assert (result.code, result.json()["status"]) == (0, "CAPTURE_STATUS_DONE")


def test_a_stored_trace_can_be_listed_shown_fetched_and_deleted(
    daemon: Daemon, child: subprocess.Popen[str], tmp_path: Path
) -> None:
    arguments = ["trace", "--pid", str(child.pid), "--duration", "100ms", "--no-fetch", "-o", "json"]
    capture_id = run(daemon, *arguments).json()["id"]
    assert capture_id in run(daemon, "captures", "list").stdout
    assert f"capture {capture_id} on " in run(daemon, "captures", "show", capture_id).stdout
    assert run(daemon, "captures", "fetch", capture_id, cwd=tmp_path).code == 0
    assert run(daemon, "captures", "fetch", capture_id, cwd=tmp_path).code == 0  # the file is there already
    assert len(list(tmp_path.iterdir())) == 1
    assert run(daemon, "captures", "delete", capture_id).code == 0
    assert run(daemon, "captures", "show", capture_id).code == 3


def test_no_such_pid_is_code_3(daemon: Daemon, tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    result = run(daemon, "trace", "--pid", str(gone.pid), cwd=tmp_path)
    assert (result.code, result.stdout) == (3, "")
    assert f"there is no process {gone.pid} on this host [NO_SUCH_PROCESS]" in result.stderr


def test_a_process_without_agent_says_exactly_what_to_do(daemon: Daemon, tmp_path: Path) -> None:
    with program([sys.executable, "-c", PLAIN_PROGRAM], daemon, quiet=True) as plain:
        result = run(daemon, "trace", "--pid", str(plain.pid), "--no-attach", cwd=tmp_path)
        assert result.code == 5
        assert "[NO_AGENT]" in result.stderr
        assert "start it with `kinetoctl run -- <command>`" in result.stderr
        assert str(plain.pid) not in run(daemon, "ps").stdout
        assert "attach" in run(daemon, "ps", "--all", "--pid", str(plain.pid)).stdout


@pytest.mark.slow
def test_a_second_trace_of_the_same_process_is_busy(
    daemon: Daemon, child: subprocess.Popen[str], tmp_path: Path
) -> None:
    with start_trace(daemon, child.pid, tmp_path, "60s") as first:
        second = run(daemon, "trace", "--pid", str(child.pid), cwd=tmp_path)
        first.send_signal(signal.SIGINT)
        first.communicate(timeout=scaled(30))
    assert second.code == 5
    assert "[BUSY]" in second.stderr


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_recorded_and_the_process_can_be_traced_again(
    daemon: Daemon, child: subprocess.Popen[str], tmp_path: Path
) -> None:
    with start_trace(daemon, child.pid, tmp_path, "60s") as process:
        wait_for_records(daemon, child.pid)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=scaled(30))
    assert process.returncode == 130
    assert "keeping what was recorded" in stderr
    assert "PARTIAL" in stdout
    (path,) = tmp_path.iterdir()
    assert any("crunch_numbers" in name for name in traced_functions(path))
    wait_for_agent(daemon, child.pid)
    assert run(daemon, "trace", "--pid", str(child.pid), "--duration", "100ms", cwd=tmp_path).code == 0


def test_a_killed_process_leaves_a_partial_trace_and_code_4(
    daemon: Daemon, child: subprocess.Popen[str], tmp_path: Path
) -> None:
    run(daemon, "trace", "--pid", str(child.pid), "--duration", "100ms", "--no-fetch")  # its functions are known now
    with start_trace(daemon, child.pid, tmp_path, "60s") as process:
        wait_for_records(daemon, child.pid)
        child.kill()
        stdout, _stderr = process.communicate(timeout=scaled(60))
    assert process.returncode == 4
    assert "[TARGET_EXITED]" in stdout
    (path,) = tmp_path.iterdir()
    assert any("crunch_numbers" in name for name in traced_functions(path))


@pytest.mark.slow
def test_a_capture_cancelled_by_somebody_else_is_code_8(
    daemon: Daemon, child: subprocess.Popen[str], tmp_path: Path
) -> None:
    with start_trace(daemon, child.pid, tmp_path, "60s") as process:
        capture_id = run(daemon, "ps", "--pid", str(child.pid), "-o", "json").json()[0]["busy_capture_id"]
        assert run(daemon, "captures", "cancel", capture_id).code == 0
        process.communicate(timeout=scaled(30))
    assert process.returncode == 8


@pytest.mark.slow
def test_a_day_is_refused_by_the_daemon_with_its_limit(
    daemon: Daemon, child: subprocess.Popen[str], tmp_path: Path
) -> None:
    result = run(daemon, "trace", "--pid", str(child.pid), "--duration", "24h", cwd=tmp_path)
    assert result.code == 2
    assert "--duration:" in result.stderr
    assert "kinetod --max-duration" in result.stderr


@pytest.mark.slow
def test_a_daemon_that_restarts_does_not_lose_the_capture(tmp_path: Path) -> None:
    with running_daemon() as own, program(crunching(), own, quiet=True) as child:
        wait_for_agent(own, child.pid)
        with start_trace(own, child.pid, tmp_path, "60s") as process:
            own.kill()
            own.start()
            stdout, stderr = process.communicate(timeout=scaled(60))
    assert process.returncode in (4, 5), stderr
    assert "DAEMON_RESTARTED" in stdout


def test_the_host_knows_its_agents(daemon: Daemon, child: subprocess.Popen[str]) -> None:
    host = run(daemon, "host", "-o", "json").json()
    assert host["agents"] >= 1
    assert host["agent_socket"] == str(daemon.agent_socket)


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="needs root to be another user")
def test_a_process_of_another_user_is_denied(tmp_path: Path) -> None:
    nobody = 65534
    with running_daemon(uid=nobody) as own, program([sys.executable, "-c", PLAIN_PROGRAM], own, quiet=True) as roots:
        result = run(own, "trace", "--pid", str(roots.pid), cwd=tmp_path)
    assert result.code == 6
    assert "[NOT_YOUR_PROCESS]" in result.stderr
