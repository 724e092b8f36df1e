"""Attaches the agent to a process: connects the attach helper, the link that adopts its channel, and the hub.

A process without Python gets the collector alone; its agent is a process of ours (`proxy_pool.py`). Concurrent callers
for the same process share one attempt. An attempt continues when its caller goes away: the agent then serves the next
caller, or leaves if there is none.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable

from kineto_trace.base.quantities import format_duration

from kinetod.agents.agent_hub import AgentHub, ConnectedAgent
from kinetod.agents.link import Connection, LinkServer
from kinetod.agents.proxy_pool import Proxies
from kinetod.attach.attach_types import Approval, AttachCode, Attached, AttachError, Helpers
from kinetod.base import metrics
from kinetod.base.fair_slots import FairSlots
from kinetod.processes.credentials import Credentials
from kinetod.processes.identity import ProcessKey, Unidentified, identity_of

log = logging.getLogger(__name__)

AT_A_TIME = 6  # and two for others; as many as there are helpers (attach_pool.MAX_HELPERS)
COLLECTOR = "collector"  # the method whose channel leads to a collector without an agent


class _Attempt:
    """One attempt and its waiting callers. Its agent is held until each of them has continued with it."""

    def __init__(self, task: "asyncio.Task[ConnectedAgent]") -> None:
        self.task = task
        self._waiting = 0
        self._hold = contextlib.ExitStack()
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[ConnectedAgent]") -> None:
        if not task.cancelled() and task.exception() is None:
            self._hold.enter_context(task.result().held())
        self._let_go()

    async def agent(self) -> ConnectedAgent:
        """Returns the agent, which the caller must hold before its next await, or it may leave. Raises AttachError."""
        self._waiting += 1
        try:
            return await asyncio.shield(self.task)
        finally:
            self._waiting -= 1
            self._let_go()

    def _let_go(self) -> None:
        if self.task.done() and not self._waiting:
            self._hold.close()


class Attacher:
    """Attaches agents to processes. Durations are nanoseconds."""

    def __init__(
        self,
        helpers: Helpers,
        link: LinkServer,
        hub: AgentHub,
        *,
        deadline_ns: int,
        keep_ns: int,
        own_pids: Callable[[], Iterable[int]] = tuple,
        proxies: Proxies | None = None,
    ) -> None:
        self._helpers = helpers
        self._link = link
        self._hub = hub
        self._deadline_ns = deadline_ns
        self._keep_ns = keep_ns
        self._own_pids = own_pids
        self._proxies = proxies or Proxies()
        self._attempts: dict[tuple[ProcessKey, Approval], _Attempt] = {}
        self._turns = FairSlots(AT_A_TIME, spare=2)

    def configure(self, *, deadline_ns: int, keep_ns: int) -> None:
        """Sets the options of future attempts."""
        self._deadline_ns = deadline_ns
        self._keep_ns = keep_ns

    async def attach(self, key: ProcessKey, approval: Approval) -> ConnectedAgent:
        """Returns the agent in this process, which may have connected by itself in between. Raises AttachError."""
        attempt = self._attempts.get((key, approval))
        if attempt is None:
            task = asyncio.create_task(self._attach(key, approval), name=f"attach {key}")
            attempt = self._attempts[key, approval] = _Attempt(task)
            task.add_done_callback(lambda done: self._done(key, approval, done))
        return await attempt.agent()

    def _done(self, key: ProcessKey, approval: Approval, attempt: "asyncio.Task[ConnectedAgent]") -> None:
        del self._attempts[key, approval]
        if not attempt.cancelled() and (error := attempt.exception()) is not None:  # the caller may be gone
            log.info("process %d: %s", key.pid, error)
            metrics.ATTACH_FAILURES.labels(str(error.code) if isinstance(error, AttachError) else "INTERNAL").inc()

    async def _attach(self, key: ProcessKey, approval: Approval) -> ConnectedAgent:
        if key.pid in (os.getpid(), *self._own_pids(), *self._proxies.pids()):
            raise AttachError(
                AttachCode.UNSUITABLE,
                f"process {key.pid} is this daemon itself or one of its helpers, which cannot be traced; choose "
                "another process",
            )
        async with self._turns.turn():
            return await self._attach_now(key, approval)

    async def _attach_now(self, key: ProcessKey, approval: Approval) -> ConnectedAgent:
        end = time.monotonic() + self._deadline_ns / 1e9
        attached, channel = await self._helpers.attach(key, approval, deadline_s=self._deadline_ns / 1e9)
        left_s = max(1.0, end - time.monotonic())
        connection = await self._connect(key, approval.credentials, attached, channel, left_s)
        try:
            async with asyncio.timeout(left_s):
                agent = await self._hub.introduction(connection)
        except TimeoutError:
            connection.close("it did not send Hello in time")
            raise AttachError(
                AttachCode.TIMEOUT,
                f"the agent was injected into process {key.pid} but did not start within "
                f"{format_duration(self._deadline_ns)} (kinetod --attach-deadline); is the process in a long call that "
                "holds the GIL, or does it release the GIL for only microseconds at a time? Try again",
            ) from None
        if agent.attached is not None:
            metrics.attached(attached.method, attached.latency_ns, attached.stopped_ns)
            agent.keep_ns = self._keep_ns
        return agent

    async def _connect(
        self, key: ProcessKey, approved: Credentials, attached: Attached, channel: socket.socket, left_s: float
    ) -> Connection:
        if attached.method != COLLECTOR:
            return self._link.adopt(channel, key, attached, approved, handshake_s=left_s)
        try:
            identity = identity_of(key)
        except Unidentified as exc:
            channel.close()
            raise AttachError(AttachCode.GONE, f"{exc} during the attach") from exc
        try:
            link = await self._proxies.start(key, channel)
        except BaseException:
            identity.close()
            raise
        return self._link.adopt(link, key, attached, approved, handshake_s=left_s, identity=identity)

    async def stop(self) -> None:
        """Cancels attempts in progress."""
        attempts = [attempt.task for attempt in self._attempts.values()]
        for attempt in attempts:
            attempt.cancel()
        await asyncio.gather(*attempts, return_exceptions=True)
        await self._proxies.stop()
