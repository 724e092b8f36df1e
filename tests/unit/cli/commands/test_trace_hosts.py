"""`kinetoctl trace` with hosts: what is refused before anything is recorded."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from support.service.cli import run_here
from support.service.fake_profiler import FakeProfiler, FakeServer, serve

NOWHERE = "unix:/nowhere.sock"


@pytest.fixture
def old_daemon() -> Iterator[FakeServer]:
    """It does not know GetClock, and would begin an armed capture at once."""
    with serve(FakeProfiler(processes=[pb.Process(pid=7, rank=3)])) as running:
        yield running


def test_a_daemon_that_cannot_wait_for_the_start_is_not_asked_to_record(
    old_daemon: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["trace", "--host", old_daemon.address, "--rank", "all", "--output-dir", str(tmp_path)]
    result = run_here(capsys, NOWHERE, *command)
    assert result.code == 5
    assert "does not know this call" in result.stdout
    assert old_daemon.profiler.requests == []
    assert not list(tmp_path.iterdir())


def test_processes_are_listed_by_host(old_daemon: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_here(capsys, NOWHERE, "ps", "--host", old_daemon.address, "-o", "json")
    assert [(found["host"], found["pid"]) for found in result.json()] == [(old_daemon.address, 7)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--require", "all"), "--require needs several hosts"),
        (("--no-merge",), "--no-merge needs several hosts"),
        (("--host", "a", "--wait-for-user-profiler"), "hosts that start at the same time cannot wait"),
        (("--hosts", "/no/such/file"), "there is no file '/no/such/file'"),
        (("--host", "a", "--host-address", "node:1"), "expected an address with {host}"),
        (("--host", "a", "--require", "most"), "'most' is not one of 'all', 'quorum', 'any'"),
    ],
)
def test_options_that_make_no_sense_are_usage_errors(
    arguments: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_here(capsys, NOWHERE, "trace", "--pid", "7", "--output-dir", str(tmp_path), *arguments)
    assert result.code == 2
    assert message in result.stderr
