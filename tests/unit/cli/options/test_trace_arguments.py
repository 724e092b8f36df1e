"""The id of a capture where a trace is asked for: its columns in the store, else its fetched files."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.formats.trace_export import export_trace
from kineto_trace.open.trace_opener import open_trace
from support.service import captures
from support.service.cli import Result, Run, run_here
from support.service.fake_profiler import FakeProfiler, FakeServer, serve
from support.service.stored import store

CAPTURE = "20261120-180200-197-c64e6c"
ROWS = [{"name": "gemm", "calls": 2}]


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("stored")
    path = folder / "trace.json.gz"
    export_trace(open_trace(store(folder / "columns")), path)
    return path.read_bytes()


@pytest.fixture
def server(content: bytes) -> Iterator[FakeServer]:
    with serve(FakeProfiler(content=content)) as running:
        capture = captures.capture(captures.done_target(content=content), status=pb.CAPTURE_STATUS_DONE)
        capture.id = CAPTURE
        running.profiler.stored = capture
        yield running


def kernels(run: Run, *arguments: str) -> Result:
    return run("query", "SELECT name, count(*) AS calls FROM kernel GROUP BY name", *arguments, "-o", "json")


def test_columns_in_a_store_that_may_be_read_are_used_where_they_are(
    server: FakeServer, run: Run, tmp_path: Path
) -> None:
    store(tmp_path / "captures" / CAPTURE / "targets" / "4242-1" / "columns")
    server.profiler.host = pb.Host(store_path=str(tmp_path))
    assert kernels(run, CAPTURE).json() == ROWS
    assert not any(isinstance(request, pb.FetchTraceRequest) for request in server.profiler.requests)


def test_otherwise_the_files_are_fetched(server: FakeServer, run: Run, tmp_path: Path) -> None:
    server.profiler.host = pb.Host(store_path=str(tmp_path / "elsewhere"))
    assert kernels(run, CAPTURE).json() == ROWS
    assert any(isinstance(request, pb.FetchTraceRequest) for request in server.profiler.requests)


def test_a_capture_without_a_trace_says_so(server: FakeServer, run: Run) -> None:
    server.profiler.host = pb.Host()
    stored = server.profiler.stored
    assert isinstance(stored, pb.Capture)
    stored.ClearField("targets")
    result = kernels(run, CAPTURE)
    assert (result.code, f"capture {CAPTURE} has no trace" in result.stderr) == (3, True)


def test_without_a_daemon_the_id_needs_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_here(capsys, f"unix:{tmp_path}/none.sock", "report", CAPTURE)
    assert (result.code, "no daemon at" in result.stderr) == (7, True)
