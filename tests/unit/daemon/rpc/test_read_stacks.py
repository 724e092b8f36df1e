"""Whose stacks are read, and what is reported of a process that changes during the reading."""

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.base.errors import InvalidRequest, NotFound, NotPermitted
from kinetod.gpus.gpu_types import GpuActivity, GpuProcess, GpuState, Snapshot
from kinetod.permissions.role_policy import Resource
from kinetod.processes.credentials import Credentials
from kinetod.processes.identity import ProcessKey
from kinetod.rpc import read_stacks
from kinetod.rpc.read_stacks import StackLooker
from kinetod.stacks.stack_reader import AT_ONCE
from kinetod.stacks.thread_stacks import StackFrame, StackReading, ThreadStack
from support.service.callers import caller

OURS = Credentials(uids=(1000,) * 4, gids=(1000,) * 4, capabilities=0, dumpable=True, program="a")
FRAME = StackFrame(function="step", file="/app/train.py", line=3, code="lock.acquire()", own=True)
MAIN = ThreadStack(
    thread=7, name="python", state="SLEEPING", cpu_ns=9, wait="LOCK", waits="waits for a lock", frames=[FRAME]
)
READING = StackReading(time_ns=5, threads=[MAIN])


@dataclass
class Process:
    """As selection knows it; only its user may know of it."""

    pid: int
    uid: int = 1000
    open_gpus: tuple[int, ...] = ()

    @property
    def key(self) -> ProcessKey:
        return ProcessKey(self.pid, 1)

    @property
    def process(self) -> pb.Process:
        return pb.Process(pid=self.pid, uid=self.uid, start_time_ns=1, gpus=self.open_gpus)

    @property
    def facts(self) -> Any:
        return self

    @property
    def credentials(self) -> Credentials:
        return replace(OURS, uids=(self.uid,) * 4)

    plain = True
    job = pod = ""

    def visible_to(self, who: Any) -> bool:
        return bool(who.uid == self.uid)

    def resource(self) -> Any:
        return Resource(uid=self.uid)


class Host:
    """A registry and a reader of these processes. now: the credentials after the reading; None: it has ended."""

    own_uid = 0

    def __init__(self, *processes: Process, now: Credentials | None = OURS) -> None:
        self.processes = processes
        self.now = now
        self.gone: set[int] = set()

    async def candidate(self, pid: int) -> Any:
        return next((each for each in self.processes if each.pid == pid), None)

    async def narrowed(self, _match: Any, found: list[Any]) -> list[Any]:
        return found

    async def selected(self, _match: Any, usable: Any, *, attachable: bool) -> list[Any]:
        assert attachable
        return [each for each in self.processes if usable(each)]

    async def whose(self, _key: ProcessKey) -> Credentials | None:
        return self.now

    async def read(self, key: ProcessKey, uid: int) -> StackReading:
        assert uid == 1000
        if key.pid in self.gone:
            raise ProcessLookupError
        return READING


class Gpus:
    """A reader of three GPUs, of which process 7 has a context on the last two. seconds: at each reading."""

    def __init__(self, *seconds: float) -> None:
        self._seconds = iter(seconds)

    def read(self, *, max_age_s: float, deadline_s: float) -> Snapshot:
        assert max_age_s == 0
        assert deadline_s > 0
        at = next(self._seconds)
        activity = GpuActivity(since_ns=1, seconds=at, totals={"graphics_active": at / 4})
        gpus = [
            GpuState(
                vendor="nvidia",
                index=index,
                uuid=f"GPU-{index}",
                name="H200",
                device=f"nvidia{index}",
                activity=activity,
                processes=(GpuProcess(pid=7),) if index else (),
            )
            for index in range(3)
        ]
        return Snapshot(gpus=tuple(gpus), time_ns=1, monotonic_ns=int(at * 1e9))


def read(host: Host, *, gpus: Any = None, **selector: Any) -> list[pb.ProcessStacks]:
    async def run() -> list[pb.ProcessStacks]:
        look = StackLooker(host, gpus, host)  # type: ignore[arg-type]
        request = pb.ReadStacksRequest(selector=pb.Selector(**selector))
        return [each async for each in look.read(request, caller(1000))]

    return asyncio.run(run())


def test_what_was_read_is_told_in_the_public_form() -> None:
    (found,) = read(Host(Process(7)), pids=[7])
    (thread,) = found.threads
    assert (found.process.pid, found.time_ns, found.reason) == (7, 5, "")
    assert (thread.main, thread.state, thread.wait) == (True, pb.THREAD_STATE_SLEEPING, pb.WAIT_LOCK)
    assert thread.frames[0] == pb.Frame(function="step", file="/app/train.py", line=3, code="lock.acquire()", own=True)


def test_what_its_gpus_did_meanwhile_is_told_of_a_process_that_uses_one() -> None:
    host = Host(Process(7, open_gpus=(0, 1, 2)), Process(8, open_gpus=(0,)), Process(9, open_gpus=(0, 1)), Process(10))
    found = {each.process.pid: each.gpus for each in read(host, gpus=Gpus(1.0, 2.0), pids=[7, 8, 9, 10])}
    told = {pid: [(each.gpu.index, each.graphics_active) for each in gpus] for pid, gpus in found.items()}
    assert told == {7: [(1, 0.25), (2, 0.25)], 8: [(0, 0.25)], 9: [], 10: []}


def test_a_driver_that_does_not_answer_is_asked_once_and_costs_only_what_it_would_have_told() -> None:
    asked = list[float]()

    class Late:
        def read(self, *, max_age_s: float, deadline_s: float) -> Snapshot:
            asked.append(deadline_s - max_age_s)
            return Snapshot()

    (found,) = read(Host(Process(7, open_gpus=(0,))), gpus=Late(), pids=[7])
    assert (len(asked), list(found.gpus)) == (1, [])
    assert found.threads


def test_a_condition_selects_what_the_caller_may_trace() -> None:
    found = read(Host(Process(7), Process(8, uid=1001), Process(9)), command_regex="train")
    assert sorted(each.process.pid for each in found) == [7, 9]


def test_another_users_pid_is_refused_like_none() -> None:
    with pytest.raises(NotPermitted, match="process 8 does not exist or does not belong to"):
        read(Host(Process(7), Process(8, uid=1001)), pids=[7, 8])
    with pytest.raises(NotPermitted, match="process 9 does not exist or does not belong to"):
        read(Host(Process(7)), pids=[7, 9])


@pytest.mark.parametrize("now", [None, replace(OURS, program="another"), replace(OURS, uids=(0,) * 4)])
def test_of_a_process_that_is_another_one_by_now_nothing_is_told(now: Credentials | None) -> None:
    (found,) = read(Host(Process(7), now=now), pids=[7])
    assert not found.threads
    assert found.reason == "it has ended, or executed another program"


def test_one_that_ends_costs_its_own_stacks_alone() -> None:
    host = Host(Process(7), Process(8))
    host.gone = {8}
    found = {each.process.pid: each for each in read(host, pids=[7, 8])}
    assert found[8].reason == "it has ended"
    assert found[7].threads


def test_so_many_are_read_at_once_and_no_more() -> None:
    host = Host(*map(Process, range(1, 40)))
    now, most = 0, 0

    async def read_slowly(key: ProcessKey, uid: int) -> StackReading:
        assert (key.start_time_ns, uid) == (1, 1000)
        nonlocal now, most
        now += 1
        most = max(most, now)
        for _ in range(3):
            await asyncio.sleep(0)  # others have their turns
        now -= 1
        return READING

    host.read = read_slowly  # type: ignore[method-assign]
    assert len(read(host, command_regex="train")) == 39
    assert most == AT_ONCE


def test_no_condition_no_match_and_too_many_matches_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match="must have at least one condition"):
        read(Host(Process(7)))
    with pytest.raises(NotFound, match="no process matches"):
        read(Host(), command_regex="train")
    monkeypatch.setattr(read_stacks, "MAX_PROCESSES", 1)
    with pytest.raises(InvalidRequest, match="matches 2 processes, more than 1"):
        read(Host(Process(7), Process(8)), command_regex="train")
