"""What was sent to libkineto comes, whatever its polls say; a file that nobody wants is removed."""

import asyncio
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from kineto_agent.protocol import wire
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.spool.kineto_file import OnDemandRequest
from kinetod.attach.attach_types import Approval
from kinetod.base.errors import VerdictReason
from kinetod.captures.kineto_target import kineto_recorder
from kinetod.captures.kineto_target.config_text import TraceDestination
from kinetod.captures.kineto_target.kineto_recorder import FreePolls, KinetoRecorder
from kinetod.captures.kineto_target.kineto_run import KinetoRun
from kinetod.captures.kineto_target.on_demand_trace import FolderLooked, OfferReady, OfferSent
from kinetod.captures.result.verdict import Ending, EndState
from kinetod.captures.target.services import Services
from kinetod.config.settings import Config
from kinetod.kineto_files.direct_folders import DirectTraceFolders
from kinetod.kineto_files.interface import Sight
from kinetod.kineto_ipc.poller_registry import OfferedConfiguration, OfferEvent, PollingProcess
from kinetod.processes import credentials
from kinetod.processes.identity import ProcessKey, start_time_ns
from support.waiting import soon

CONFIG = Config(listen=(), agent_socket=Path("agent.sock"), state_dir=Path("state"))
START = wire.Start("c1", [], 10**9, None, None, 0, 0, 0, 0, 1 << 20, None, {})


@dataclass
class PolledByHand:
    """This process as one that polls when a test says so."""

    key: ProcessKey
    uid: int = 0
    gid: int = 0
    pids: tuple[int, ...] = ()
    job_id: int = 0
    last_poll_ns: int = 1
    tracing: bool = False

    def offer(self, _configuration: bytes, _on_event: Callable[[OfferEvent], None]) -> OfferedConfiguration:
        """Sends it at once; the event loop does not know it yet."""
        return JustSent()

    def get(self, key: ProcessKey) -> "PolledByHand | None":
        """This one, if the key is its own."""
        return self if key == self.key else None

    def all(self) -> list[PollingProcess]:
        """This one."""
        return [self]


class JustSent:
    """An offer that a poll was answered with."""

    times_sent = 1

    def withdraw(self) -> None:
        """Comes too late."""


@pytest.fixture
def process() -> PolledByHand:
    return PolledByHand(ProcessKey(os.getpid(), start_time_ns(os.getpid())))


def test_polls_count_that_say_free_one_after_the_other(process: PolledByHand) -> None:
    polls = FreePolls(1)
    counted = []
    for process.last_poll_ns, process.tracing in (
        (1, False),
        (2, False),
        (2, False),
        (3, True),
        (4, False),
        (5, False),
    ):
        counted.append(polls.count(process))
    assert counted == [0, 1, 1, 0, 1, 2]
    assert polls.count(None) == 2


def test_a_file_that_comes_after_a_poll_that_says_free_is_removed(
    process: PolledByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kineto_recorder, "_STRAY_PERIOD_S", 0.01)
    looks: list[int] = []

    async def run(path: Path) -> None:
        recorder = KinetoRecorder(process, DirectTraceFolders())
        folder = await recorder.folders.reopen(process.key, str(path), "x.json", uid=os.geteuid())
        look = folder.look

        async def noted() -> Sight:
            looks.append(process.last_poll_ns)
            return await look()

        monkeypatch.setattr(folder, "look", noted)
        recorder.remove_later(process, folder, since_ns=1, within_s=60)
        process.last_poll_ns = 2  # it reads an answer that had come too late for the poll before
        await soon(lambda: looks[-3:] == [2, 2, 2], "the file is still awaited")
        (path / "x.json").write_text("{}")
        await soon(lambda: not (path / "x.json").exists(), "the file is removed")
        await recorder.stop()

    with tempfile.TemporaryDirectory() as name:
        asyncio.run(run(Path(name)))


def test_what_was_begun_is_removed_when_its_time_has_passed_though_no_poll_comes(process: PolledByHand) -> None:
    async def run(path: Path) -> None:
        recorder = KinetoRecorder(process, DirectTraceFolders())
        folder = await recorder.folders.reopen(process.key, str(path), "x.json", uid=os.geteuid())
        (path / "x.json.tmp").touch()
        recorder.remove_later(process, folder, since_ns=1, within_s=0)
        await soon(lambda: not (path / "x.json.tmp").exists(), "the file is removed")
        await recorder.stop()

    with tempfile.TemporaryDirectory() as name:
        asyncio.run(run(Path(name)))


def made_run(process: PolledByHand) -> KinetoRun:
    """A run of one second's recording whose request has been sent."""
    made = KinetoRun(
        cast("Services", SimpleNamespace(config=CONFIG)),
        KinetoRecorder(process, DirectTraceFolders()),
        capture_id="c1",
        target=pb.Target(pid=os.getpid()),
        process=process,
        start=START,
        spec=pb.CaptureSpec(),
        formats=(),
        directory=Path("unused"),
        approval=Approval(credentials.read(os.getpid())),
        on_change=lambda: None,
    )
    made._destination = TraceDestination(folder="/tmp", stem="kinetod-c1", trace_id=1)
    made._handle(OfferReady())
    return made


def test_polls_that_say_free_before_the_recording_do_not_end_it(process: PolledByHand) -> None:
    async def run() -> list[bool]:
        made = made_run(process)
        made._handle(FolderLooked(Sight(0, False)))  # the file has been opened
        opened_ns, found = made._withdrawn_ns, []
        for process.last_poll_ns, process.tracing in (
            (opened_ns + 1, False),
            (opened_ns + 10**10, False),
            (opened_ns + 2 * 10**10, True),
            (opened_ns + 3 * 10**10, False),
        ):
            found.append(made._is_free_again())
        return found

    assert asyncio.run(run()) == [False, False, False, True]


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "empty"])
def test_a_file_is_removed_for_another_try_only_if_it_is_empty(process: PolledByHand, *, whole: bool) -> None:
    async def run(path: Path) -> tuple[bool, bool]:
        made = made_run(process)
        made._folder = await made._recorder.folders.reopen(process.key, str(path), "x.json", uid=os.geteuid())
        made._asked = OnDemandRequest(trace_id=1, folder=str(path), name="x.json", until_ns=0)
        (path / "x.json.tmp").touch()
        made._handle(OfferSent())
        await made._look()
        for after_s in (10, 20):  # two polls that say free, when the recording must be over
            process.last_poll_ns = made._withdrawn_ns + after_s * 10**9
            made._polls.count(process)
        if whole:
            (path / "x.json.tmp").rename(path / "x.json")
        await made._look()
        found = (path / "x.json").exists(), (path / "x.json.tmp").exists()
        made._folder.close()
        return found

    with tempfile.TemporaryDirectory() as name:
        assert asyncio.run(run(Path(name))) == (whole, False)


def test_a_cancellation_that_overtakes_the_news_of_the_sending_leaves_a_file_to_remove(process: PolledByHand) -> None:
    async def run() -> tuple[str, bool]:
        made = made_run(process)
        made.stop(Ending(EndState.CANCELLED, VerdictReason.CANCELLED, "cancelled"))
        ending = made._trace.ending()
        return ending.reason if ending is not None else "", made._trace.leaves_file

    reason, leaves_file = asyncio.run(run())
    assert reason.startswith("cancelled; libkineto cannot be stopped")
    assert leaves_file
