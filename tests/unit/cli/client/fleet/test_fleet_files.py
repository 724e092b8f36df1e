"""Files of many hosts on their way here."""

import time
from pathlib import Path
from typing import Any

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.catalog.first_screen import first_screen_of
from kinetoctl.client.fleet import fleet_files
from kinetoctl.client.fleet.host_run import Fleet, HostRun
from kinetoctl.client.host_targets import Place
from kinetoctl.client.tracing import Quiet
from support.service.fake_profiler import WAIT_FOR_CANCEL, FakeProfiler, serve
from support.waiting import scaled, until

H200 = Path(__file__).parents[4] / "data/h200"


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


def downloaded(*paths: Path) -> Fleet:
    """A fleet of one host, with a process for each of these traces."""
    targets = [pb.Target(pid=number, start_time_ns=1) for number in range(len(paths))]
    member = HostRun(place=Place("n1", "unix:/n1.sock"), capture=pb.Capture(id="c1", host="n1", targets=targets))
    member.paths |= {(number, 1, "chrome"): path for number, path in enumerate(paths)}
    return Fleet("f1", [member])


def test_the_answer_of_a_job_is_that_of_its_report() -> None:
    paths = sorted((H200 / "ddp4").iterdir())[:2]
    fleet = downloaded(*paths)
    fleet_files.find_answer(fleet, Quiet())
    assert fleet.answer.verdict == first_screen_of(paths).verdict
    assert fleet.answer.verdict.startswith("A step takes 20 ms on average on each of 2 ranks. Matrix products do not")


def test_ctrl_c_ends_only_the_search_for_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(_paths: list[Path]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kineto_trace.catalog.first_screen.first_screen_of", leave)
    fleet = downloaded(tmp_path / "a.json")
    fleet_files.find_answer(fleet, Quiet())
    assert fleet.interrupted and fleet.answer == pb.CaptureAnswer()


@pytest.mark.parametrize("error", [MemoryError(), OSError(28, "No space left on device")])
def test_an_analysis_that_fails_leaves_the_result_without_an_answer(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_paths: list[Path]) -> None:
        raise error

    monkeypatch.setattr("kineto_trace.catalog.first_screen.first_screen_of", fail)
    fleet = downloaded(tmp_path / "a.json")
    fleet_files.find_answer(fleet, Quiet())
    assert not fleet.interrupted and fleet.answer == pb.CaptureAnswer()


def test_traces_that_cannot_be_read_or_are_too_many_have_no_answer(tmp_path: Path) -> None:
    torn = tmp_path / "torn.json"
    torn.write_text("{")
    for fleet in (downloaded(), downloaded(torn), downloaded(*[torn] * (fleet_files.MOST_ANSWERED + 1))):
        fleet_files.find_answer(fleet, Quiet())
        assert fleet.answer == pb.CaptureAnswer()
