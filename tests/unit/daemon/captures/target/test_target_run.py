"""One target of one capture, without an agent."""

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.base.errors import VerdictReason
from kinetod.captures.target.buffer_memory import Promises
from kinetod.captures.target.target_run import TargetRun
from kinetod.processes.identity import ProcessKey, start_time_ns
from support.agent.agent_daemon import start_request


class Agent:
    """As much of a connected agent as a run needs that fails at once. busy: with these captures."""

    def __init__(self) -> None:
        self.key = ProcessKey(os.getpid(), start_time_ns(os.getpid()))
        self.hello = SimpleNamespace(sources={})
        self.busy: list[str] = []

    def attach(self, capture_id: str, _listener: object) -> None:
        self.busy.append(capture_id)

    def detach(self, capture_id: str) -> None:
        self.busy.remove(capture_id)


async def broken(*_arguments: Any) -> None:
    raise LookupError("a fault of the daemon")


def test_an_agent_is_free_again_after_a_fault_of_the_daemon(tmp_path: Path) -> None:
    agent, target = Agent(), pb.Target(pid=os.getpid())
    services = SimpleNamespace(
        config=SimpleNamespace(max_trace_bytes=1 << 20, min_free_bytes=0, agent_deadline_ns=10**9),
        promises=Promises(),
        free_bytes=lambda: 1 << 30,
        files=SimpleNamespace(in_thread=broken),
    )

    async def run() -> list[str]:
        one = TargetRun(
            cast(Any, services),
            capture_id="c1",
            target=target,
            agent=cast(Any, agent),
            start=start_request("c1"),
            formats=(),
            labels={},
            directory=tmp_path,
            on_change=lambda: None,
        )
        one.attach()
        before = list(agent.busy)
        await one.run()
        return before

    assert asyncio.run(run()) == ["c1"]
    assert agent.busy == []
    assert (target.verdict, target.reason_code) == (pb.VERDICT_FAILED, VerdictReason.INTERNAL)
