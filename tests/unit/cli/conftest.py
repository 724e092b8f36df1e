"""kinetoctl in this process against a scripted daemon; a file that needs another daemon has a `server` of its own."""

from collections.abc import Iterator

import pytest
from support.service import captures
from support.service.cli import Run, run_here
from support.service.fake_profiler import FakeProfiler, FakeServer, serve


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serve(FakeProfiler(content=captures.CONTENT, created=captures.capture())) as running:
        yield running


@pytest.fixture
def run(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> Run:
    return lambda *arguments: run_here(capsys, server.address, *arguments)
