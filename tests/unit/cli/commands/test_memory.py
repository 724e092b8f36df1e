"""`kinetoctl memory` against a scripted daemon: a capture like any other, with a pickle for a file."""

from pathlib import Path

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from support.service import captures
from support.service.captures import CONTENT
from support.service.cli import Result, run_here
from support.service.fake_profiler import FakeServer

NAME = "kineto-gpu-7-4242-c0ffee.memory_snapshot.pickle"


def snapshot_target() -> pb.Target:
    target = captures.done_target()
    target.files[0].format = "memory-snapshot"
    target.files[0].name = "x.memory_snapshot.pickle"
    target.counts.add(source="memory_snapshot", records=3, way="9 allocations and frees, snapshot made in 12.5 ms")
    return target


def memory(server: FakeServer, capsys: pytest.CaptureFixture[str], *arguments: str) -> Result:
    done = captures.capture(snapshot_target(), status=pb.CAPTURE_STATUS_DONE)
    server.profiler.watches = [[captures.snapshot(done)]]
    return run_here(capsys, server.address, "memory", *arguments)


def test_the_capture_is_one_of_memory_snapshot_alone(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert memory(server, capsys, "--pid", "4242", "--output-dir", str(tmp_path)).code == 0
    assert server.profiler.requests[0].spec == pb.CaptureSpec(
        selector=pb.Selector(pids=[4242]),
        duration_ns=10_000_000_000,
        activity_types=["memory_snapshot"],
        options=pb.Options(),
        recorder=pb.RECORDER_AGENT,
    )


def test_options_become_those_of_the_capture(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--rank", "0,1", "--duration", "30s", "--with-stack", "--buffer-limit", "64MiB", "--no-attach")
    memory(server, capsys, *given, "--keep-agent", "0", "--output-dir", str(tmp_path))
    assert server.profiler.requests[0].spec == pb.CaptureSpec(
        selector=pb.Selector(ranks=[0, 1]),
        duration_ns=30_000_000_000,
        activity_types=["memory_snapshot"],
        options=pb.Options(with_stack=True),
        buffer_limit_bytes=64 << 20,
        recorder=pb.RECORDER_AGENT,
        no_attach=True,
        keep_agent_ns=0,
    )


def test_it_says_where_the_pickle_is_what_it_cost_and_how_to_open_it(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = memory(server, capsys, "--pid", "4242", "--output-dir", str(tmp_path))
    path = tmp_path / NAME
    assert path.read_bytes() == CONTENT
    assert f"{path} (300.0 KiB, SHA-256 verified)" in result.stdout
    assert "9 allocations and frees, snapshot made in 12.5 ms" in result.stdout
    assert f"kinetoctl web {path}" in result.stdout
    assert "https://pytorch.org/memory_viz" in result.stdout
    assert f"python -m torch.cuda._memory_viz trace_plot {path} -o memory.html" in result.stdout
    assert "perfetto" not in result.stdout


def test_without_fetching_the_file_stays_in_the_store(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    result = memory(server, capsys, "--pid", "4242", "--no-fetch")
    assert "memory-snapshot, 300.0 KiB in the daemon's store: `kinetoctl captures fetch c0ffee`" in result.stdout


def test_without_a_process_it_says_what_to_give(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    result = memory(server, capsys)
    assert result.code == 2
    assert "no process is selected: give a pid" in result.stderr
