"""Processes that nothing else gives away are known by the polls of their libkineto."""

import asyncio
import os
import subprocess
from collections.abc import Iterator

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.agents.agent_hub import AgentHub
from kinetod.kineto_ipc.poll_sockets import Sender
from kinetod.kineto_ipc.poller_registry import Poll, PollerRegistry
from kinetod.permissions.role_policy import Caller, Role, Via
from kinetod.selection.process_registry import Registry, checked_selector, is_targeted

CALLER = Caller(uid=os.getuid(), user="me", roles=frozenset({Role.ADMIN}), via=Via.UNIX)
BUSY = 1


@pytest.fixture
def sleeper() -> Iterator[int]:
    """A process that is neither Python nor on a GPU."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()


def listed(pid: int, *, polls: bool, everything: bool = False) -> pb.Process | None:
    async def ask() -> pb.Process | None:
        polling = PollerRegistry(asyncio.get_running_loop())
        if polls:
            sender = Sender(pid, os.getuid(), os.getgid(), b"\0a\0")
            polling.polled(Poll(BUSY, 77, (pid,)), sender, now_s=0, now_ns=123)
        try:
            found = await Registry(AgentHub(), polling=polling).processes(
                checked_selector(pb.Selector()), CALLER, include_without_agent=everything, trainers=not everything
            )
        finally:
            polling.close()
        return next((each for each in found if each.pid == pid), None)

    return asyncio.run(ask())


@pytest.mark.parametrize("everything", [False, True])
def test_a_process_that_polls_is_listed_whatever_it_is(
    sleeper: int, everything: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kinetod.selection.process_registry.foreign_pids", lambda _proc: {sleeper})
    found = listed(sleeper, polls=True, everything=everything)
    assert found is not None
    assert found.kineto == pb.KinetoPolling(last_poll_ns=123, tracing=True, job_id=77)
    assert listed(sleeper, polls=False, everything=everything) is None


def test_a_process_that_polls_is_worth_an_agent(sleeper: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> list[bool]:
        polling = PollerRegistry(asyncio.get_running_loop())
        registry = Registry(AgentHub(), polling=polling)
        match = checked_selector(pb.Selector(user="anybody"))
        meant = []
        for _ in range(2):
            candidate = await registry.candidate(sleeper)
            assert candidate is not None
            meant += [is_targeted(candidate, match, attachable=attachable) for attachable in (False, True)]
            sender = Sender(sleeper, os.getuid(), os.getgid(), b"\0a\0")
            polling.polled(Poll(BUSY, 77, ()), sender, now_s=0, now_ns=123)
        polling.close()
        return meant

    assert asyncio.run(ask()) == [False, False, False, True]
