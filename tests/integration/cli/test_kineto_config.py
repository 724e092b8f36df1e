"""Kineto's and Dynolog's configurations through a real daemon and a real agent."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.service.cli import Result, run_process, wait_for_agent
from support.service.daemon import Daemon
from support.targets.programs import crunching, program

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pid(daemon: Daemon) -> Iterator[int]:
    """A process that crunches numbers in iterations; its agent is ready."""
    with program(crunching(), daemon) as child:
        wait_for_agent(daemon, child.pid)
        yield child.pid


def trace(daemon: Daemon, pid: int, folder: Path, *arguments: str) -> Result:
    return run_process(["trace", "--pid", str(pid), *arguments], daemon.client_environ(), folder)


def test_what_dynolog_sends_gives_the_file_that_it_names(daemon: Daemon, pid: int, tmp_path: Path) -> None:
    config = (
        f"ACTIVITIES_LOG_FILE={tmp_path}/traces/x.json\nPROFILE_START_TIME=0\nACTIVITIES_DURATION_MSECS=2000\n"
        "PROFILE_REPORT_INPUT_SHAPES=false\nPROFILE_PROFILE_MEMORY=false\nPROFILE_WITH_STACK=true\n"
        "PROFILE_WITH_FLOPS=false\nPROFILE_WITH_MODULES=false\nREQUEST_TRACE_ID=7fe21c\n"
    )
    result = trace(daemon, pid, tmp_path, "--kineto-config", config, "-o", "json")
    assert result.code == 0, result
    assert "kineto config:" not in result.stderr
    path = tmp_path / "traces" / f"x_{pid}.json"
    events = json.loads(path.read_text())["traceEvents"]
    assert any("crunch_numbers" in event["name"] for event in events if event.get("cat") == "python_function")
    document = result.json()
    summary = document["targets"][0]["summary"]
    assert summary["window_end_ns"] - summary["window_start_ns"] == 2_000_000_000
    assert document["spec"]["labels"] == {"request_trace_id": "7fe21c"}
    assert [file["path"] for file in document["targets"][0]["files"]] == [str(path)]
    assert [each.name for each in tmp_path.iterdir()] == ["traces"]


def test_an_iteration_request_of_dynolog_starts_at_a_multiple(daemon: Daemon, pid: int, tmp_path: Path) -> None:
    (tmp_path / "kineto.conf").write_text(
        "ACTIVITIES_LOG_FILE=x.pt.trace.json\nPROFILE_START_ITERATION=0\nPROFILE_START_ITERATION_ROUNDUP=10\n"
        "ACTIVITIES_ITERATIONS=5\n"
    )
    result = trace(daemon, pid, tmp_path, "--kineto-config", "kineto.conf")
    assert result.code == 0, result
    assert (tmp_path / f"x_{pid}.pt.trace.json").exists()


def test_a_second_trace_to_the_same_name_is_kept_beside_the_first(daemon: Daemon, pid: int, tmp_path: Path) -> None:
    config = ("--kineto-config", "ACTIVITIES_LOG_FILE=x.json,ACTIVITIES_DURATION_MSECS=50")
    assert trace(daemon, pid, tmp_path, *config).code == 0
    first = (tmp_path / f"x_{pid}.json").read_bytes()
    second = trace(daemon, pid, tmp_path, *config)
    assert second.code == 0, second
    assert "using the usual file name" in second.stderr
    assert (tmp_path / f"x_{pid}.json").read_bytes() == first
    assert len(list(tmp_path.iterdir())) == 2


def test_a_whole_file_of_a_site_works_with_its_old_and_foreign_keys(daemon: Daemon, pid: int, tmp_path: Path) -> None:
    (tmp_path / "libkineto.conf").write_text(
        "# /etc/libkineto.conf of a cluster\nENABLE_IPC_FABRIC=YES\nENABLE_SIGUSR2=NO\nEVENTS_ENABLED_DEVICES=0,1\n"
        "ACTIVITIES_ENABLED=YES\nACTIVITIES_MAX_GPU_BUFFER_SIZE_MB=32\nACTIVITIES_DURATION_MSECS=100\nNEWER_KEY=1\n"
    )
    result = trace(daemon, pid, tmp_path, "--kineto-config", "libkineto.conf", "-o", "json")
    assert result.code == 0, result
    assert result.json()["spec"]["buffer_limit_bytes"] == 32 << 20
    assert len([line for line in result.stderr.splitlines() if line.startswith("kineto config: libkineto.conf:")]) == 4
