"""Who is meant by pids, job and limit."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.dynolog_door.process_matching import MatchedProcesses, ProcessMatcher, claims, limited
from kinetod.dynolog_door.requests import TraceAsked
from kinetod.processes.identity import ProcessKey
from support.service.callers import ROOT


def asked(pids: Sequence[int] = (), job_id: int = 0, process_limit: int = 3) -> TraceAsked:
    return TraceAsked(config="", pids=frozenset(pids), job_id=job_id, process_limit=process_limit)


@dataclass
class Poller:
    """A process that polls."""

    key: ProcessKey
    pids: tuple[int, ...] = ()
    job_id: int = 0
    tracing: bool = False
    uid: int = 0
    gid: int = 0
    last_poll_ns: int = 0

    def offer(self, _configuration: bytes, _on_event: object) -> Any:
        raise AssertionError("matching offers nothing")


@dataclass
class Processes:
    """A registry of processes. busy: pids whose agent records."""

    known: dict[int, str] = field(default_factory=dict)  # pid -> job
    busy: set[int] = field(default_factory=set)
    others: set[int] = field(default_factory=set)  # that exist and no capture would take by itself
    asked: list[Any] = field(default_factory=list)

    async def processes(self, match: Any, _caller: object, **_how: bool) -> list[pb.Process]:
        self.asked.append(match)
        return [pb.Process(pid=pid, start_time_ns=1, job_id=job) for pid, job in self.known.items()]

    def agent(self, key: ProcessKey) -> Any:
        return SimpleNamespace(capture_id="c") if key.pid in self.busy else None

    async def candidates(self, pids: Sequence[int]) -> list[Any]:
        found = [pid for pid in pids if pid in self.others]
        return [SimpleNamespace(key=ProcessKey(pid, 1), visible_to=lambda _caller: True) for pid in found]


def matched(processes: Processes, request: TraceAsked, pollers: Sequence[Poller] = ()) -> MatchedProcesses:
    polling: Any = SimpleNamespace(all=lambda: list(pollers))
    matcher = ProcessMatcher(processes, polling)  # type: ignore[arg-type]  # what of it is used
    return asyncio.run(matcher.matched(request, ROOT))


def test_a_limit_counts_processes_that_are_not_traced_yet() -> None:
    found = [(5, False), (3, True), (4, False), (9, False)]
    assert limited(found, 2) == MatchedProcesses(free=(4, 5), busy=1, beyond=1)
    assert limited(found, 0) == MatchedProcesses(free=(), busy=1, beyond=3)
    assert limited(found, -1) == MatchedProcesses(free=(4, 5, 9), busy=1)


def test_pids_mean_processes_and_what_descends_from_them_in_any_job() -> None:
    processes = Processes({7: "77"}, busy={7})
    assert matched(processes, asked([5, 0, -1])) == MatchedProcesses(busy=1)
    assert (processes.asked[0].pids, processes.asked[0].children, processes.asked[0].job_ids) == ({5}, True, set())
    assert matched(processes, asked([-1])) == MatchedProcesses()


def test_without_pids_the_job_0_means_processes_without_a_job() -> None:
    processes = Processes({7: "77", 8: ""})
    assert matched(processes, asked()).free == (8,)
    assert matched(processes, asked(job_id=77)).free == (7, 8)  # the registry selects by the job
    assert processes.asked[1].job_ids == {"77"}


@pytest.mark.parametrize(
    ("request_", "means"),
    [
        (asked([7]), True),
        (asked([1]), True),
        (asked([100]), True),
        (asked([8]), False),
        (asked([7], job_id=77), True),
        (asked([7], job_id=78), False),
        (asked(job_id=77), True),
        (asked(), False),
    ],
)
def test_what_a_polling_process_says_of_itself_counts(request_: TraceAsked, means: bool) -> None:
    assert claims(Poller(ProcessKey(100, 1), pids=(7, 1), job_id=77), request_) is means


def test_a_polling_process_that_nothing_else_shows_is_found_and_may_be_busy() -> None:
    pollers = [Poller(ProcessKey(100, 1)), Poller(ProcessKey(101, 1), tracing=True), Poller(ProcessKey(102, 2))]
    found = matched(Processes({101: ""}, others={100, 102}), asked(), pollers)
    assert found == MatchedProcesses(free=(100,), busy=1)  # 102 is another process by now
