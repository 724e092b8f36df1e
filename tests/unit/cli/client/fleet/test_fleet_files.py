"""Files of many hosts on their way here."""

import time
from pathlib import Path
from typing import Any

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl.client.fleet import fleet_files
from kinetoctl.client.fleet.host_run import Fleet, HostRun
from kinetoctl.client.host_targets import Place
from kinetoctl.client.tracing import Quiet
from support.service.fake_profiler import WAIT_FOR_CANCEL, FakeProfiler, serve
from support.waiting import scaled, until


def test_who_leaves_does_not_wait_for_a_host_that_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = pb.TraceFile(format="chrome-json-gz", size_bytes=1000, sha256="0" * 64)
    capture = pb.Capture(id="c1", host="n1", targets=[pb.Target(pid=7, files=[file])])
    with serve(FakeProfiler(content=b"x" * 1000, fetch_limits=[WAIT_FOR_CANCEL])) as server:
        member = HostRun(place=Place("n1", server.address), capture=capture)

        def leave(*_: Any, **__: Any) -> None:
            until(lambda: bool(server.profiler.requests), "the file is asked for")
            raise KeyboardInterrupt

        monkeypatch.setattr(fleet_files, "wait", leave)
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            fleet_files.fetch_all(Fleet("f1", [member]), tmp_path, Quiet(), timeout_s=30)
        assert time.monotonic() - began < scaled(15)
    assert (member.paths, member.problems) == ({}, [])
