"""The connected agents: their identity, their messages, and the captures that their frames belong to.

Theory of operation
    An agent that the daemon attached (live attach) serves captures only: when it has had none for `keep_ns`, and nobody
    holds it for one that is about to start, its link is closed and it leaves by itself. Agents that connected by
    themselves stay. There is one agent per process: one that connects by itself replaces an attached one, never the
    reverse.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Protocol, Union

from kineto_agent.protocol import wire
from kineto_protos.v1 import profiler_pb2 as pb

from kinetod import __version__
from kinetod.agents.link import Connection
from kinetod.attach.attach_types import AttachCode, Attached, AttachError
from kinetod.base import metrics
from kinetod.base.safe_text import clean
from kinetod.processes.identity import Identity, ProcessKey

log = logging.getLogger(__name__)

MAX_INCOMPATIBLE = 1024
IDENTITY_LINGER_S = 5.0
FRESH_S = 1.0
RECENT_S = 3.0
STANDS_S = 3.0  # a longer call into a vendor's library is reported: the agent itself waits 1.5 s for an idle GPU
_INT32_MAX = 2**31 - 1
_MAX_SOURCES = 32
_MAX_TYPES = 64

CaptureFrame = Union[wire.State, wire.Arena, wire.Result, wire.Rejected]

# the last argument: "stands", or how the call has ended
TellStanding = Callable[["ConnectedAgent", pb.StandingCall, str], None]


class CaptureListener(Protocol):
    """The daemon's side of one capture in one process. Called on the event loop; must not block or raise."""

    def on_frame(self, message: CaptureFrame, fd: int | None) -> None:
        """A frame of this capture. The listener owns `fd`."""

    def on_gone(self, died: bool, reason: str) -> None:
        """The link has ended; `died` if the process did too."""


class ConnectedAgent:
    """One connected agent that speaks our protocol version."""

    def __init__(
        self, connection: Connection, hello: wire.Hello, tell: TellStanding = lambda _agent, _call, _how: None
    ) -> None:
        """tell: reports a stuck call into a vendor's library, and its end."""
        self.standing: pb.StandingCall | None = None  # set once a call has lasted STANDS_S
        self._entered: asyncio.TimerHandle | None = None  # timer of a shorter call
        self._tell = tell
        self.connection = connection
        self.identity: Identity = connection.identity
        self.hello = hello
        self._listeners: dict[str, CaptureListener] = {}
        self._described: asyncio.Future[None] | None = None
        self._answered_at = float("-inf")
        self.keep_ns = 0  # how long an attached agent stays without a capture
        self._holders = 0
        self._leaving: asyncio.TimerHandle | None = None

    @property
    def attached(self) -> Attached | None:
        """How the daemon attached it; None: it connected by itself."""
        return self.connection.attached

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keeps an attached agent until the end of the block, for a capture that is about to start."""
        self._holders += 1
        self._stay_or_leave()
        try:
            yield
        finally:
            self._holders -= 1
            self._stay_or_leave()

    def _stay_or_leave(self) -> None:
        """Starts or stops the timer for an attached agent without a capture."""
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None
        if self.attached is None or self._holders or self._listeners or self.connection.closed or self.standing:
            return
        self._leaving = asyncio.get_running_loop().call_later(self.keep_ns / 1e9, self._leave)

    def _leave(self) -> None:
        self._leaving = None
        self.connection.close("it is no longer needed and is leaving the process")

    @property
    def key(self) -> ProcessKey:
        """The process that the agent is in."""
        return self.identity.key

    @property
    def capture_id(self) -> str:
        """The capture that this daemon runs in it; empty if none."""
        return next(iter(self._listeners), "")

    @property
    def captured(self) -> bool:
        """Whether a capture of this daemon runs in it or is about to start."""
        return bool(self._listeners or self._holders)

    def activity_types(self) -> list[str]:
        """The activity types of its sources, as of the last Hello."""
        return sorted({kind for kinds in self.hello.sources.values() for kind in kinds})

    def send(self, message: wire.Message) -> bool:
        """Sends a message. False if the link is gone."""
        return self.connection.send(message)

    @property
    def process_ended(self) -> bool:
        """Whether its process has ended; ask only once the link is gone."""
        return self.connection.died or not self.identity.alive()

    def attach(self, capture_id: str, listener: CaptureListener) -> None:
        """Routes this capture's frames to `listener` until `detach`."""
        self._listeners[capture_id] = listener
        self._stay_or_leave()

    def detach(self, capture_id: str) -> None:
        """Undoes `attach`."""
        if self._listeners.pop(capture_id, None) is not None:
            self._stay_or_leave()

    def ask(self) -> "asyncio.Future[None]":
        """Sends Describe (once for all waiting callers); done when a fresh Hello arrives or the link is gone."""
        if self._described is None or self._described.done():
            self._described = asyncio.get_running_loop().create_future()
            if not self.send(wire.Describe()):
                self._answered()
        return self._described

    def is_asked(self) -> bool:
        """Whether an answer is still outstanding."""
        return self._described is not None and not self._described.done()

    def _answered(self) -> None:
        if self._described is not None and not self._described.done():
            self._described.set_result(None)

    def answered_within(self, seconds: float) -> bool:
        """Whether it has answered within this time."""
        return asyncio.get_running_loop().time() - self._answered_at <= seconds

    def greet(self, hello: wire.Hello) -> None:
        """Records a fresh Hello."""
        self.hello = hello
        self._answered_at = asyncio.get_running_loop().time()
        self._answered()

    def _note_call(self, message: wire.State) -> None:
        """Records an agent's untrusted report about a call into a vendor's library."""
        self._call_ended("returned")
        if message.call_since_ns <= 0:
            return
        now_ns = time.time_ns()
        since_ns = min(message.call_since_ns, now_ns)
        call = pb.StandingCall(
            call=clean(message.call, 64), since_ns=since_ns, capture_id=clean(message.capture_id, 64)
        )
        wait_s = max(STANDS_S - (now_ns - since_ns) / 1e9, 0.0)
        self._entered = asyncio.get_running_loop().call_later(wait_s, self._stands, call)

    def _stands(self, call: pb.StandingCall) -> None:
        self._entered, self.standing = None, call
        self._tell(self, call, "stands")
        self._stay_or_leave()

    def _call_ended(self, how: str) -> None:
        if self._entered is not None:
            self._entered.cancel()
            self._entered = None
        if self.standing is not None:
            ended, self.standing = self.standing, None
            self._tell(self, ended, how)
            self._stay_or_leave()

    def frame(self, message: CaptureFrame, fd: int | None) -> None:
        """Routes one frame; drops frames that belong to no capture of ours."""
        if isinstance(message, wire.State) and message.call:
            self._note_call(message)
            return
        listener = self._listeners.get(message.capture_id)
        if listener is not None:
            listener.on_frame(message, fd)
            return
        log.debug("%s: %s for a capture that is not running", self.connection, type(message).__name__)
        if fd is not None:
            os.close(fd)

    def gone(self, reason: str) -> None:
        """Ends captures and waiters when the connection is closed."""
        self._answered()
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None
        died = self.process_ended
        self._call_ended("process ended" if died else "agent gone")
        for listener in list(self._listeners.values()):
            listener.on_gone(died, reason)


class PluginParcel(Protocol):
    """The plug-ins to send to agents."""

    @property
    def message(self) -> wire.Plugins:
        """The message that announces them."""

    @property
    def descriptor(self) -> int:
        """The sealed memfd that goes with the message."""


class AgentHub:
    """All agents; handles the link server's connections. parcel: sent to agents that accept plug-ins; tell: see
    ConnectedAgent.
    """

    def __init__(
        self, parcel: PluginParcel | None = None, tell: TellStanding = lambda _agent, _call, _how: None
    ) -> None:
        self._parcel = parcel
        self._tell = tell
        self._agents: dict[ProcessKey, ConnectedAgent] = {}
        self._incompatible: dict[ProcessKey, tuple[Identity, int]] = {}
        self._awaited: dict[Connection, asyncio.Future[ConnectedAgent]] = {}

    def __len__(self) -> int:
        return len(self._agents)

    def agents(self) -> list[ConnectedAgent]:
        """The connected agents."""
        return list(self._agents.values())

    def standing(self) -> list[ConnectedAgent]:
        """The agents in whose process a call into a vendor's library is stuck."""
        return [agent for agent in self._agents.values() if agent.standing is not None]

    def states(self) -> dict[str, int]:
        """The number of READY, BUSY and INCOMPATIBLE agents."""
        busy = sum(bool(agent.capture_id or agent.hello.busy_capture_id) for agent in self._agents.values())
        return {"READY": len(self._agents) - busy, "BUSY": busy, "INCOMPATIBLE": len(self._incompatible)}

    def get(self, key: ProcessKey) -> ConnectedAgent | None:
        """The agent in this process."""
        return self._agents.get(key)

    def introduction(self, connection: Connection) -> "asyncio.Future[ConnectedAgent]":
        """Done when the agent of an adopted connection has sent Hello; fails with AttachError if it never does."""
        waiting = self._awaited.setdefault(connection, asyncio.get_running_loop().create_future())
        agent = self._agents.get(connection.identity.key)
        if connection.closed:
            self._awaited.pop(connection).set_exception(_not_introduced(connection, "it hung up"))
        elif agent is not None and agent.connection is connection:
            self._introduce_described(connection, agent)
        return waiting

    def incompatible_version(self, key: ProcessKey) -> int | None:
        """The protocol version of this process's agent if we cannot talk to it."""
        entry = self._incompatible.get(key)
        return None if entry is None else entry[1]

    def incompatible(self) -> list[ProcessKey]:
        """Living processes with such an agent."""
        self._forget_dead()
        return list(self._incompatible)

    async def refresh(self, agents: list[ConnectedAgent], deadline_s: float) -> None:
        """Asks these agents for a fresh Hello; those that do not answer in time keep the last one.

        An agent that has just answered is not asked. One that answered recently, works on a capture, or has not
        answered an earlier question yet is asked only for the benefit of the next call: repeated lists must be quick,
        one stuck program must not delay every list, and programs should be left alone.
        """
        waiting = []
        for agent in agents:
            if agent.answered_within(FRESH_S):
                continue
            later = agent.answered_within(RECENT_S) or bool(agent.capture_id) or agent.is_asked()
            answer = agent.ask()
            if not later and not answer.done():
                waiting.append(answer)
        if waiting:
            await asyncio.wait(waiting, timeout=deadline_s)

    # ConnectionHandler

    def on_message(self, connection: Connection, message: wire.Message, fd: int | None) -> None:
        """One valid frame."""
        if isinstance(message, wire.Hello):
            self._hello(connection, message)
            return
        agent = self._agents.get(connection.identity.key)
        if isinstance(message, (wire.State, wire.Arena, wire.Result, wire.Rejected)):
            if agent is not None and agent.connection is connection:
                agent.frame(message, fd)
                return
            if fd is not None:
                os.close(fd)
        connection.fail(f"{type(message).__name__} is not expected from an agent at this point")

    def _hello(self, connection: Connection, message: wire.Hello) -> None:
        hello = checked_hello(message)
        key = connection.identity.key
        agent = self._agents.get(key)
        if agent is not None and agent.connection is connection:
            agent.greet(hello)
            return
        if agent is not None and connection.attached is not None and agent.attached is None:
            self._introduce(connection, agent)
            connection.refuse("the process already has an agent that connected by itself")
            return
        if agent is not None:
            agent.connection.close("the same process has connected again")
        connection.accept_handshake()
        agent = self._agents[key] = ConnectedAgent(connection, hello, self._tell)
        self._drop_incompatible(key)
        agent.send(wire.Welcome(__version__))
        if hello.busy_capture_id:  # from a daemon that is gone: nobody waits for it
            agent.send(wire.Cancel(hello.busy_capture_id, False))
        if self._parcel is not None and hello.plugins >= wire.PLUGIN_INTERFACE:
            connection.send(self._parcel.message, self._parcel.descriptor)
            agent.ask()  # for the activity types that come with them
        how = "has connected" if agent.attached is None else f"was injected by {agent.attached.method}"
        what = f"{how}: kineto_agent {hello.agent_version}, {hello.framework or 'no torch'}"
        connection.note("connected", what, logging.INFO)
        self._introduce_described(connection, agent)

    def _introduce_described(self, connection: Connection, agent: ConnectedAgent) -> None:
        """Introduces the agent once it has reported its activity types."""
        if agent.is_asked():
            agent.ask().add_done_callback(lambda _: self._introduce(connection, agent))
        else:
            self._introduce(connection, agent)

    def _introduce(self, connection: Connection, agent: ConnectedAgent) -> None:
        waiting = self._awaited.pop(connection, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(agent)

    def on_version_mismatch(self, connection: Connection, theirs: int) -> None:
        """Remembers the process, so that calls about it can say what is wrong."""
        connection.note("version", f"speaks protocol version {theirs}, but this daemon speaks {wire.PROTOCOL_VERSION}")
        metrics.LINK_REFUSALS.labels("version").inc()
        key = connection.identity.key
        if len(self._incompatible) >= MAX_INCOMPATIBLE:
            self._forget_dead()
        if len(self._incompatible) < MAX_INCOMPATIBLE:
            self._drop_incompatible(key)
            self._incompatible[key] = (connection.identity, theirs)
        connection.refuse(f"kinetod {__version__} speaks protocol version {wire.PROTOCOL_VERSION}, not {theirs}")

    def on_close(self, connection: Connection, reason: str) -> None:
        """Handles the end of a connection."""
        identity = connection.identity
        waiting = self._awaited.pop(connection, None)
        if waiting is not None and not waiting.done():
            waiting.set_exception(_not_introduced(connection, reason))
        agent, captured = self._agents.get(identity.key), False
        if agent is not None and agent.connection is connection:
            del self._agents[identity.key]
            captured = agent.captured
            agent.gone(reason)
            connection.note("gone", f"is gone: {reason}", logging.INFO)
        entry = self._incompatible.get(identity.key)
        if entry is not None and entry[0] is identity:
            return
        if captured:  # whoever listened has its turn first: the pidfd tells how the process ended
            asyncio.get_running_loop().call_later(IDENTITY_LINGER_S, identity.close)
        else:  # a flood of these must not hold descriptors
            identity.close()

    def check_alive(self) -> None:
        """Closes connections of dead processes whose socket another process still holds, on kernels without pidfd."""
        for agent in self.agents():
            if agent.identity.pidfd is None and not agent.identity.alive():
                agent.connection.died = True
                agent.connection.close("the process ended")
        self._forget_dead()

    def _forget_dead(self) -> None:
        for key, (identity, _version) in list(self._incompatible.items()):
            if not identity.alive():
                self._drop_incompatible(key)

    def _drop_incompatible(self, key: ProcessKey) -> None:
        entry = self._incompatible.pop(key, None)
        if entry is not None:
            entry[0].close()


def _not_introduced(connection: Connection, reason: str) -> AttachError:
    pid = connection.identity.pid
    if connection.died or not connection.identity.alive():
        return AttachError(AttachCode.GONE, f"process {pid} ended while the agent was starting")
    return AttachError(
        AttachCode.FAILED,
        f"the agent was injected into process {pid} but did not start: {reason}; for details, start the program "
        "with KINETO_AGENT_LOG set, attach again and read that log",
    )


def checked_hello(hello: wire.Hello) -> wire.Hello:
    """Restricts texts and numbers to the ranges that the rest of the daemon relies on."""
    return hello._replace(
        agent_version=clean(hello.agent_version, 64),
        python_version=clean(hello.python_version, 64),
        framework=clean(hello.framework, 128),
        rank=_small(hello.rank),
        world_size=_small(hello.world_size),
        job_id=clean(hello.job_id, 128),
        iterations=max(-1, hello.iterations),
        iteration_ns=max(0, hello.iteration_ns),
        stalled_ns=max(0, hello.stalled_ns),
        sources={
            clean(name, 64): [clean(kind, 64) for kind in kinds[:_MAX_TYPES]]
            for name, kinds in list(hello.sources.items())[:_MAX_SOURCES]
        },
        argv=[clean(argument, 4096) for argument in hello.argv],
        busy_capture_id=clean(hello.busy_capture_id, 64),
    )


def _small(value: int | None) -> int | None:
    return value if value is not None and 0 <= value <= _INT32_MAX else None
