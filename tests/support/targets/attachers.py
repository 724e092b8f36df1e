"""The ways to attach that the harness compares: ours, as the daemon does it."""

import asyncio
import contextlib
import socket
import time

from campaign.parts.attach_harness import DEADLINE_S, NO_HELLO, Attempt
from kineto_agent.protocol import wire
from kinetod.attach.attach_types import AttachError
from kinetod.attach_helper.attach_pool import AttachHelpers
from kinetod.processes.identity import PROC, ProcessKey, start_time_ns

from support.agent.agent_daemon import Connection
from support.service.approvals import approval_of
from support.waiting import scaled


class HelperAttacher:
    """A warm helper process, the bootstrap, the agent, its Hello; then the channel is closed and the agent leaves."""

    name = "kinetod"

    def __init__(self, deadline_s: float = DEADLINE_S, *, wait_for_leave: bool = False) -> None:
        self._deadline_s = deadline_s
        self._wait_for_leave = wait_for_leave
        self._runner = asyncio.Runner()
        self._helpers = AttachHelpers(1)
        self._runner.run(self._helpers.start())

    def attach(self, pid: int) -> Attempt:
        """Attaches, waits for the agent's Hello, and detaches."""
        try:
            key = ProcessKey(pid, start_time_ns(pid, PROC))
        except OSError as exc:
            return Attempt(outcome="refused", reason=f"it has no start time: {exc.strerror}")
        begin = time.perf_counter_ns()
        try:
            attached, channel = self._runner.run(
                self._helpers.attach(key, approval_of(pid), deadline_s=scaled(self._deadline_s))
            )
        except AttachError as exc:
            outcome = "failed" if exc.code in ("ATTACH_FAILED",) else "refused"
            return Attempt(outcome=outcome, reason=f"{exc.code}: {exc.reason}".replace(str(pid), "PID"))
        agent_ns = time.perf_counter_ns() - begin
        outcome, reason = self._greet(channel)
        return Attempt(
            outcome=outcome,
            reason=reason.replace(str(pid), "PID"),
            method=attached.method,
            latency_ns=attached.latency_ns,
            agent_ns=agent_ns,
            stopped_ns=attached.stopped_ns,
        )

    def _greet(self, channel: socket.socket) -> tuple[str, str]:
        connection = Connection(channel)
        try:
            connection.expect(wire.Hello)
            connection.send(wire.Welcome("0.0.0"))
            if self._wait_for_leave:
                channel.shutdown(socket.SHUT_WR)
                connection.expect_end()
        except (AssertionError, OSError, wire.WireError) as exc:
            return "failed", f"{NO_HELLO}: {exc!r}"
        finally:
            connection.close()
        return "success", ""

    def pids(self) -> set[int]:
        """Pids of the helper processes."""
        return self._helpers.pids()

    def close(self) -> None:
        """Ends the helper processes."""
        with contextlib.suppress(RuntimeError):
            self._runner.run(self._helpers.stop())
        self._runner.close()
