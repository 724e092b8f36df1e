"""Captures at their end: verdicts that the disk has no room for are stored once it has, and what is saved may go."""

import asyncio
import errno
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.agents.agent_hub import AgentHub
from kinetod.base.fair_slots import FairSlots
from kinetod.captures.manager import CaptureManager
from kinetod.captures.result.decode_pool import WorkerPool
from kinetod.captures.result.lifecycle import Keeping
from kinetod.captures.target.services import Conflicts, Services
from kinetod.config.settings import Config, Settings
from kinetod.permissions.role_policy import Caller, Role, Via
from kinetod.selection.process_registry import Registry
from kinetod.store.capture_store import Store, key_of
from kinetod.store.retention import Retention
from kinetod.uploads.upload_queue import Uploader
from kinetod.uploads.worker_client import RemoteReader, UploadWorker
from kinetod.uploads.worker_protocol import WorkerOptions
from support.waiting import scaled

ADMIN = Caller(uid=0, user="root", roles=frozenset({Role.ADMIN}), via=Via.UNIX)
FULL_S = 60.0  # much longer than one write is tried again


class TightStore(Store):
    """One whose disk has no room for some of these: the verdicts of targets, and the ends and answers of captures."""

    full_for: frozenset[str] = frozenset()

    def save_target(self, capture_id: str, number: int, target: pb.Target) -> None:
        """Raises OSError while there is no room for it."""
        self._check("target")
        super().save_target(capture_id, number, target)

    def save_end(self, capture: pb.Capture) -> None:
        """Raises OSError while there is no room for it."""
        self._check("end")
        super().save_end(capture)

    def save_answer(self, capture_id: str, answer: pb.CaptureAnswer) -> None:
        """Raises OSError while there is no room for it."""
        self._check("answer")
        super().save_answer(capture_id, answer)

    def _check(self, what: str) -> None:
        if what in self.full_for:
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TightStore]:
    opened = TightStore(tmp_path / "state")
    yield opened
    opened.close()


def manager_of(store: Store, executor: ThreadPoolExecutor) -> CaptureManager:
    """Without agents, uploads and decode workers."""
    settings = Settings(Config(listen=(), agent_socket=Path("/s"), state_dir=store.state_dir))
    worker = UploadWorker(store.state_dir / "lock", WorkerOptions)
    services = Services(
        settings=settings,
        workers=WorkerPool(1),
        files=FairSlots(1, threads=executor),
        free_bytes=store.free_bytes,
        host="gpu-7",
        conflicts=Conflicts(store.state_dir),
    )
    keeping = Keeping(store, Retention(settings, store), Uploader(settings, store, worker), RemoteReader(worker))
    return CaptureManager(settings, Registry(AgentHub()), store, services, keeping)


def unfinished(store: Store) -> pb.Capture:
    """What a daemon leaves behind that is killed before anything was recorded."""
    capture = pb.Capture(id="c1", created_ns=1, status=pb.CAPTURE_STATUS_RUNNING, host="gpu-7")
    capture.targets.add(pid=7, start_time_ns=70, state=pb.TARGET_STATE_COLLECT)
    store.insert(capture, key="", request_hash="h")
    return capture


@pytest.mark.parametrize("full_for", [{"target"}, {"target", "end"}], ids=["the verdict", "verdict and end"])
def test_a_verdict_that_the_disk_has_no_room_for_is_stored_once_it_has(
    store: TightStore, monkeypatch: pytest.MonkeyPatch, full_for: set[str]
) -> None:
    capture = unfinished(store)
    folder = store.target_dir(capture.id, key_of(capture.targets[0]))
    store.full_for = frozenset(full_for)
    seen = list[tuple[pb.Verdict, bool, int]]()

    def look(manager: CaptureManager) -> None:
        stored = store.get(capture.id)
        assert stored is not None
        seen.append((stored.targets[0].verdict, folder.is_dir(), manager.running))

    _pass_time(monkeypatch, FULL_S, lambda: setattr(store, "full_for", frozenset()))

    async def scenario() -> list[pb.Capture]:
        ended = list[pb.Capture]()
        with ThreadPoolExecutor(1) as executor:
            manager = manager_of(store, executor)

            def on_end(capture: pb.Capture) -> None:
                ended.append(capture)
                look(manager)

            manager.on_end = on_end
            await manager.recover()
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
            look(manager)
        return ended

    (told,) = asyncio.run(scenario())
    # Callers were told at once; the capture went on until its verdict was stored, and only then the folder went.
    assert (told.status, told.targets[0].reason_code) == (pb.CAPTURE_STATUS_FAILED, "DAEMON_RESTARTED")
    assert seen == [(pb.VERDICT_UNSPECIFIED, True, 1), (pb.VERDICT_FAILED, False, 0)]
    stored = store.get(capture.id)
    assert stored is not None
    assert stored.status == pb.CAPTURE_STATUS_FAILED
    assert stored.targets[0] == told.targets[0]
    assert store.unfinished() == []


@pytest.mark.parametrize("verdict", ["It waits.", ""], ids=["known", "unknown"])
def test_an_answer_that_the_disk_has_no_room_for_is_seen_at_once_and_stored_later(
    store: TightStore, monkeypatch: pytest.MonkeyPatch, verdict: str
) -> None:
    capture = unfinished(store)
    capture.targets[0].verdict = pb.VERDICT_DONE
    capture.targets[0].files.add(format="x", name="x")
    store.save_target(capture.id, 0, capture.targets[0])
    store.full_for = frozenset({"answer"})
    _pass_time(monkeypatch, FULL_S, lambda: setattr(store, "full_for", frozenset()))
    found = pb.CaptureAnswer(verdict=verdict) if verdict else None
    seen = list[asyncio.Task[tuple[bool, list[pb.Capture]]]]()

    async def answer(*_: object) -> pb.CaptureAnswer | None:
        return found

    async def scenario() -> None:
        with ThreadPoolExecutor(1) as executor:
            manager = manager_of(store, executor)
            monkeypatch.setattr(WorkerPool, "answer", answer)

            async def look() -> tuple[bool, list[pb.Capture]]:
                full, got = bool(store.full_for), await manager.get(capture.id)
                (listed,), _ = await manager.page({}, 0, "", ADMIN)
                return full, [got, listed]

            manager.on_answer = lambda _: seen.append(asyncio.ensure_future(look()))
            await manager.recover()
            while others := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.gather(*others)

    asyncio.run(scenario())
    (task,) = seen
    full, captures = task.result()
    assert full
    captures.append(store.get(capture.id) or pb.Capture())
    assert [(each.HasField("answer"), each.answer.verdict) for each in captures] == [(True, verdict)] * 3


def test_a_capture_that_has_ended_can_be_deleted_while_it_is_being_saved(
    store: TightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = unfinished(store)
    save_end, deletes = store.save_end, list[Future[None]]()

    async def scenario() -> int:
        loop, begun = asyncio.get_running_loop(), threading.Event()
        with ThreadPoolExecutor(1) as executor:
            manager = manager_of(store, executor)

            def saved_while_it_is_deleted(ended: pb.Capture) -> None:
                deletes.append(asyncio.run_coroutine_threadsafe(manager.delete(ended.id), loop))
                loop.call_soon_threadsafe(lambda: loop.call_soon(begun.set))
                assert begun.wait(scaled(10))
                save_end(ended)

            monkeypatch.setattr(store, "save_end", saved_while_it_is_deleted)
            await manager.recover()
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
            await asyncio.wrap_future(deletes[0])
            return manager.running

    assert asyncio.run(scenario()) == 0
    assert store.get(capture.id) is None


def _pass_time(monkeypatch: pytest.MonkeyPatch, after_s: float, then: Callable[[], None]) -> None:
    """Nobody waits; once `after_s` have been slept, something happens."""
    slept = list[float]()
    sleep = asyncio.sleep

    async def pass_time(seconds: float) -> None:
        slept.append(seconds)
        if sum(slept) >= after_s:
            then()
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", pass_time)
