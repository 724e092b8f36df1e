"""Traces where a client asked for them: which are promised, kept across a restart, and refused with a reason."""

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.store.output_formats import parse_log_file
from kinetod.access.audit_log import AuditLog
from kinetod.attach.attach_types import Finding, Status
from kinetod.base.fair_slots import FairSlots
from kinetod.config.addresses import ListenAddress
from kinetod.config.settings import Config, Settings
from kinetod.dynolog_door.door_service import DynologService, MatchedProcesses, TraceAsked
from kinetod.dynolog_door.log_files import BackgroundTasks, LogFiles
from kinetod.permissions.role_policy import Caller
from kinetod.processes.identity import ProcessKey
from support.service.callers import caller
from support.waiting import scaled

OWN = os.getuid()
TRACE = b'{"traceEvents": []}'
ME = caller(OWN)
NOT_ENABLED = (
    "this daemon runs as uid 61001 and cannot write files as uid 61002; the writer service could, but is not "
    "enabled: enable it with `systemctl enable --now kinetod-writer.socket`"
)
log = logging.getLogger(__name__)


class Place:
    """A store with the trace of one target, and a folder where traces may be written."""

    def __init__(self, folder: Path) -> None:
        self.state, self.logs, self.lines = folder / "state", folder / "logs", folder / "audit"
        for made in (self.state, self.logs):
            made.mkdir()
        self.stored = self.target_dir("c", ProcessKey(7, 1))
        self.stored.mkdir(parents=True)
        (self.stored / "trace.json").write_bytes(TRACE)
        config = Config(listen=(ListenAddress(path=Path("/x")),), agent_socket=Path("/y"), state_dir=self.state)
        self.settings = Settings(replace(config, dynolog_log_roots=(self.logs,), dynolog_writer_socket=folder / "none"))
        self.capture = pb.Capture(id="c")
        target = self.capture.targets.add(pid=7, start_time_ns=1)
        target.process.uid = OWN
        target.files.add(format="chrome-json")

    def target_dir(self, capture_id: str, key: Any) -> Path:
        return self.state / "captures" / capture_id / str(key)

    def play(self, work: Callable[[LogFiles], Awaitable[Any]], **how: Any) -> Any:
        """Runs `work` with the files of a daemon, waits for what it began, and closes the audit log."""
        audit = AuditLog(self.lines)

        async def played() -> Any:
            files = LogFiles(self.settings, audit, self.target_dir, **how)
            result = await work(files)
            while begun := files._tasks._tasks:
                await asyncio.wait(begun)
            return result

        try:
            return asyncio.run(played())
        finally:
            audit.close()

    def audited(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines.read_text().splitlines()]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_promise_is_kept_when_the_capture_has_ended_and_noted(place: Place) -> None:
    log_file = parse_log_file(str(place.logs / "t.json"))

    async def work(files: LogFiles) -> None:
        assert await files.problem(log_file, ME) == ""
        files.promise(place.capture, log_file, ME)
        files.capture_ended(place.capture)
        files.capture_ended(place.capture)

    place.play(work)
    assert (place.logs / "t_7.json").read_bytes() == TRACE
    assert list((place.state / "dynolog").iterdir()) == []
    (line,) = place.audited()
    assert (line["call"], line["decision"], line["path"]) == ("(trace file)", "written", f"{place.logs}/t_7.json")


def test_the_next_daemon_keeps_the_promise(place: Place) -> None:
    log_file = parse_log_file(str(place.logs / "t.json"))

    async def promised(files: LogFiles) -> None:
        files.promise(place.capture, log_file, ME)

    async def kept(files: LogFiles) -> None:
        assert await asyncio.to_thread(files.load) == ["c"]
        files.capture_ended(place.capture)

    place.play(promised)
    (place.state / "dynolog" / "broken.json").write_text("{")
    place.play(kept)
    assert (place.logs / "t_7.json").read_bytes() == TRACE
    assert list((place.state / "dynolog").iterdir()) == []


@pytest.mark.parametrize(
    ("path", "who", "why"),
    [
        ("/elsewhere/t.json", ME, "/elsewhere is not inside any folder of dynolog.log_roots"),
        ("{logs}/../t.json", ME, "{logs}/.. is not inside any folder of dynolog.log_roots"),
        ("t.json", ME, ". is not an absolute path"),
        ("{logs}/t.json", caller(61002), NOT_ENABLED),
        ("{logs}/t.json", caller(None, name="CN:x"), "the certificate CN:x is not a user of this host"),
    ],
)
def test_what_cannot_be_written_is_said_when_it_is_asked_for(place: Place, path: str, who: Caller, why: str) -> None:
    log_file = parse_log_file(path.format(logs=place.logs))

    async def work(files: LogFiles) -> str:
        return await files.problem(log_file, who)

    own_uid = 61001 if who.uid == 61002 else OWN
    assert place.play(work, own_uid=own_uid) == why.format(logs=place.logs)


@pytest.mark.parametrize(
    ("folder", "told", "noted"),
    [
        ("{logs}", "", ["written"]),
        ("/elsewhere", "not written: /elsewhere is not inside any folder of dynolog.log_roots", []),
    ],
)
def test_only_a_file_that_can_be_written_is_promised(
    place: Place, monkeypatch: pytest.MonkeyPatch, folder: str, told: str, noted: list[str]
) -> None:
    monkeypatch.setattr("kinetod.dynolog_door.log_files.CHECK_S", scaled(20))
    config = f"ACTIVITIES_LOG_FILE={folder.format(logs=place.logs)}/t.json"
    asked = TraceAsked(config=config, pids=frozenset({7}), job_id=0, process_limit=1)

    async def matched(_asked: object, _caller: object) -> MatchedProcesses:
        return MatchedProcesses(free=(7,))

    async def create(*_request: object, **_how: object) -> pb.Capture:
        return place.capture

    async def work(files: LogFiles) -> str:
        others: Any = SimpleNamespace(matched=matched, create=create)
        service = DynologService(
            place.settings, others, others, others, others, files, FairSlots(1), healthy=lambda: True
        )
        found = await service._trace(asked, ME)
        files.capture_ended(place.capture)
        return found.log_file

    assert place.play(work) == told
    assert [line["decision"] for line in place.audited()] == noted


def test_a_trace_that_is_not_there_or_cannot_be_read_is_noted_with_the_reason(place: Place) -> None:
    log_file = parse_log_file(str(place.logs / "t.json"))
    (place.stored / "trace.json").unlink()
    failed = place.capture.targets.add(pid=8, start_time_ns=1, reason="it has ended")
    failed.process.uid = OWN

    async def work(files: LogFiles) -> None:
        files.promise(place.capture, log_file, ME)
        files.capture_ended(place.capture)

    place.play(work)
    problems = {line["path"]: line["problem"] for line in place.audited()}
    assert problems == {
        f"{place.logs}/t_8.json": "there is no trace: it has ended",
        f"{place.logs}/t_7.json": "the stored trace cannot be read: No such file or directory",
    }


def test_a_writer_that_fails_or_hangs_is_a_reason_too(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    log_file = parse_log_file(str(place.logs / "t.json"))
    for command, why in (
        (("/bin/false",), "the writing process failed: exit status 1"),
        (("/bin/echo", "[1]"), "the writing process failed: exit status 0"),
        (("/bin/sleep", "60"), "the folder did not respond within 0.2 s"),
        (("/nonexistent",), "the writing process failed: [Errno 2]"),
    ):
        check_s = 0.2 if "/bin/sleep" in command else scaled(20)
        monkeypatch.setattr("kinetod.dynolog_door.log_files.CHECK_S", check_s)

        async def work(files: LogFiles) -> str:
            return await files.problem(log_file, caller(OWN or 61001))

        found = place.play(work, writer=command)
        assert found.startswith(why), found


@pytest.mark.parametrize(
    ("own_uid", "everybody", "status", "detail"),
    [
        (0, True, Status.OK, "this daemon writes traces below {logs}"),
        (OWN, False, Status.OK, "this daemon writes traces below {logs}"),
        (61001, True, Status.PROBLEM, f"traces cannot be written below {{logs}}: {NOT_ENABLED}"),
    ],
)
def test_a_diagnosis_says_whether_traces_can_be_written(
    place: Place, own_uid: int, everybody: bool, status: Status, detail: str
) -> None:
    async def work(files: LogFiles) -> list[Finding]:
        return await files.findings(everybody=everybody)

    (found,) = place.play(work, own_uid=own_uid)
    assert (found.name, found.status) == ("dynolog_files", status)
    assert found.detail == detail.format(logs=place.logs).replace("uid 61002", "other users")


def test_without_roots_a_diagnosis_says_nothing_of_them(place: Place) -> None:
    place.settings = Settings(replace(place.settings.current, dynolog_log_roots=()))

    async def work(files: LogFiles) -> list[Finding]:
        return await files.findings(everybody=True)

    assert place.play(work) == []


def test_roots_that_change_before_the_capture_ends_are_those_that_count(place: Place) -> None:
    log_file = parse_log_file(str(place.logs / "t.json"))

    async def work(files: LogFiles) -> None:
        assert await files.problem(log_file, ME) == ""
        files.promise(place.capture, log_file, ME)
        files._settings = Settings(replace(place.settings.current, dynolog_log_roots=(place.state,)))
        files.capture_ended(place.capture)

    place.play(work)
    assert list(place.logs.iterdir()) == []
    (line,) = place.audited()
    assert line["problem"] == f"{place.logs} is not inside any folder of dynolog.log_roots"


async def fails() -> None:
    raise ValueError("not today")


def test_a_failure_is_logged_with_its_exception(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        tasks = BackgroundTasks(log, "the work failed")
        tasks.begin(fails())
        await tasks.stop(grace_s=5)

    asyncio.run(run())
    (record,) = caplog.records
    assert record.message == "the work failed"
    assert record.exc_info is not None and isinstance(record.exc_info[1], ValueError)


def test_a_stop_gives_time_first_and_ends_what_still_runs(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> list[str]:
        ended: list[str] = []

        async def waits_for(event: asyncio.Event, name: str) -> None:
            try:
                await event.wait()
            except asyncio.CancelledError:
                ended.append(f"{name} was cancelled")
                raise
            ended.append(f"{name} is done")

        tasks, happened = BackgroundTasks(log, "the work failed"), asyncio.Event()
        tasks.begin(waits_for(happened, "first"))
        tasks.begin(waits_for(asyncio.Event(), "second"))
        asyncio.get_running_loop().call_soon(happened.set)
        await tasks.stop(grace_s=0.2)
        return ended

    assert asyncio.run(run()) == ["first is done", "second was cancelled"]
    assert not caplog.records
