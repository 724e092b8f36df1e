"""The agents of many simulated hosts in one process: the real session and arena, and a training loop of their own.

    python -m campaign.parts.fleet_agents    with a `Plan` as one line of JSON on standard input

Theory of operation
    A daemon knows its agents by their processes. So a child process makes the connections of one agent of every host,
    does nothing else, and lives as long as we do: N children are N agents on each host. The children hand the
    connections to the one process that plays all agents on one event loop.
    An agent obeys `kineto_agent.control.session`, so requests are answered as the real agent answers them. Its source
    records a few stack samples at the end of the window; its iterations pass at the pace of the plan, whatever happens.
    "ready" is printed once every daemon has welcomed its agents. The end of standard input ends everything.
"""

import array
import asyncio
import contextlib
import gc
import json
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kineto_agent.control import events
from kineto_agent.control.session import Session
from kineto_agent.protocol import wire
from kineto_agent.protocol.records import SPACE_PYTHON_CODE, SPACE_STACK_NODE, STACK_SAMPLE
from kineto_agent.sources.arena_writer import ArenaWriter

SOURCE, FORMAT = "python_stacks", "python_stacks/1"
BUFFER_BYTES, STRINGS_BYTES = 16 * 1024, 4096
SAMPLES = 20
CONNECTED_S = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """sockets: one of each host's daemon; first_rank: rank of the first agent of each host."""

    sockets: list[str]
    first_rank: list[int]
    agents: int  # on each host
    world_size: int
    step_ns: int  # of an iteration; 0: they never step

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class FakeAgent:
    """One agent. on_welcome: called when the daemon has accepted it."""

    def __init__(
        self, sock: socket.socket, pid: int, rank: int, plan: Plan, began_ns: int, on_welcome: Callable[[], None]
    ) -> None:
        self._sock = sock
        self._pid = pid
        self._rank = rank
        self._plan = plan
        self._began_ns = began_ns  # of iteration 0
        self._on_welcome = on_welcome
        self._loop = asyncio.get_running_loop()
        self._session = Session()
        self._events: deque[events.Event] = deque()
        self._handling = False
        self._timer: asyncio.TimerHandle | None = None
        self._step_timer: asyncio.TimerHandle | None = None
        self._writer: ArenaWriter | None = None
        self._loop.add_reader(sock.fileno(), self._readable)
        self._send(self._hello())

    # the link

    def _hello(self) -> wire.Hello:
        return wire.Hello(
            agent_version="0.1.0",
            pid=self._pid,
            python_version="3.12.0",
            framework="torch 2.11.0",
            rank=self._rank,
            world_size=self._plan.world_size,
            job_id="4242",
            iterations=self._iteration(time.time_ns()),
            sources={SOURCE: ["python_function"]},
            argv=["python", "train.py"],
            busy_capture_id=self._session.capture_id,
        )

    def _send(self, message: wire.Message, fds: Sequence[int] = ()) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        with contextlib.suppress(OSError):  # the reader sees that it is gone
            self._sock.sendmsg([wire.encode(message)], rights)

    def _readable(self) -> None:
        try:
            frame = self._sock.recv(wire.MAX_FRAME_BYTES)
        except BlockingIOError:
            return
        except OSError:
            frame = b""
        if not frame:
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()
            self._handle(events.LinkLost(time.time_ns()))
            return
        self._received(wire.decode(frame), time.time_ns())

    def _received(self, message: wire.Message, now_ns: int) -> None:
        if isinstance(message, wire.Start):
            asked = events.StartRequested(message, now_ns, self._iteration(now_ns), self._refusal(message))
            self._handle(asked._replace(step_ns=self._plan.step_ns))
        elif isinstance(message, wire.Cancel):
            self._handle(events.CancelRequested(message.capture_id, message.keep_partial, now_ns))
        elif isinstance(message, wire.Release):
            self._handle(events.Released(message.capture_id))
        elif isinstance(message, wire.Describe):
            self._send(self._hello())
        elif isinstance(message, wire.Welcome):
            self._on_welcome()

    def _refusal(self, request: wire.Start) -> events.Refusal | None:
        if not request.activity_types or "python_function" in request.activity_types:
            return None
        return events.Refusal("NOTHING_TO_RECORD", "a simulated process has python_function only")

    # iterations

    def _iteration(self, now_ns: int) -> int:
        return (now_ns - self._began_ns) // self._plan.step_ns if self._plan.step_ns else -1

    def _step_begins_ns(self, iteration: int) -> int:
        return self._began_ns + iteration * self._plan.step_ns if self._plan.step_ns else 0

    # the session

    def _handle(self, event: events.Event) -> None:
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                for command in self._session.handle(self._events.popleft()):
                    self._carry_out(command)
        finally:
            self._handling = False

    def _carry_out(self, command: events.Command) -> None:
        if isinstance(command, events.SetTimer):
            self._timer = self._timer_at(self._timer, command.deadline_ns, self._tick)
        elif isinstance(command, events.WatchStep):
            wanted = command.iteration
            at_ns = self._step_begins_ns(wanted) if wanted is not None and self._plan.step_ns else None
            self._step_timer = self._timer_at(self._step_timer, at_ns, lambda: self._stepped(wanted or 0))
        elif isinstance(command, events.StartSources):
            self._start_source(command.request)
        elif isinstance(command, events.StopSources):
            self._stop_source()
        elif isinstance(command, events.FreeSources):
            self._free_source()
        elif isinstance(command, events.ReportState):
            self._send(wire.State(command.capture_id, command.state.value, command.time_ns))
        elif isinstance(command, events.Reject):
            self._send(wire.Rejected(*command))
        elif isinstance(command, events.Conclude):
            self._conclude(command)

    def _timer_at(
        self, old: asyncio.TimerHandle | None, at_ns: int | None, then: Callable[[], None]
    ) -> asyncio.TimerHandle | None:
        if old is not None:
            old.cancel()
        return None if at_ns is None else self._loop.call_later(max(0, at_ns - time.time_ns()) / 1e9, then)

    def _tick(self) -> None:
        now_ns = time.time_ns()
        self._handle(events.Tick(now_ns, self._step_begins_ns(self._iteration(now_ns))))

    def _stepped(self, watched: int) -> None:
        self._handle(events.Stepped(self._iteration(time.time_ns()), self._step_begins_ns(watched)))

    # the source

    def _start_source(self, request: wire.Start) -> None:
        self._writer = writer = ArenaWriter("fleet", 4 * BUFFER_BYTES, STRINGS_BYTES, BUFFER_BYTES)
        writer.intern(1, SPACE_PYTHON_CODE, b"train.py\x001\x00main")
        writer.intern(1, SPACE_STACK_NODE, (0).to_bytes(4, "little") + (1).to_bytes(4, "little"))
        self._send(wire.Arena(request.capture_id, SOURCE, FORMAT, {"interval_ns": 1_000_000}), [writer.fd])
        now_ns = time.time_ns()
        self._handle(events.SourcesStarted(now_ns, self._iteration(now_ns)))

    def _stop_source(self) -> None:
        if self._writer is not None:
            now_ns = time.time_ns()
            for number in range(SAMPLES):  # the last of them before the window's end, if only just
                self._writer.append(STACK_SAMPLE, now_ns - (SAMPLES - number) * 1_000_000, self._pid, 1, 10, 0)
            self._writer.publish()
        self._handle(events.SourcesStopped(time.time_ns()))

    def _free_source(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _conclude(self, ended: events.Conclude) -> None:
        sources = {}
        if self._writer is not None:
            counts = self._writer.counts()
            sources[SOURCE] = {
                "records": counts.records, "dropped": counts.dropped, "bytes": counts.bytes, "metadata": {},
            }  # fmt: skip
        self._send(
            wire.Result(
                capture_id=ended.capture_id,
                outcome=ended.outcome,
                reason_code=ended.reason_code,
                reason=ended.reason,
                window_start_ns=ended.window_start_ns,
                window_end_ns=ended.window_end_ns,
                sources=sources,
                overhead={},
                threads={str(self._pid): "MainThread"},
                iterations=self._begun(ended.window_start_ns, ended.window_end_ns),
                warnings=list(ended.warnings),
            )
        )

    def _begun(self, start_ns: int, end_ns: int) -> dict[str, object]:
        if not self._plan.step_ns or not end_ns:
            return {}
        numbers = range(self._iteration(start_ns - 1) + 1, self._iteration(end_ns) + 1)
        return {"thread": self._pid, "starts": [[number, self._step_begins_ns(number)] for number in numbers]}


# connections


@contextlib.contextmanager
def connections(plan: Plan) -> Iterator[list[list[tuple[int, socket.socket]]]]:
    """One list for each agent of a host: the pid by which the daemons know it, and its sockets in the plan's order."""
    children: list[tuple[int, socket.socket]] = []
    try:
        for _ in range(plan.agents):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pid = os.fork()
            if pid == 0:
                ours.close()
                for _, earlier in children:
                    earlier.close()
                _connect_all(plan, theirs)
            theirs.close()
            children.append((pid, ours))
        found = []
        for pid, channel in children:
            mine = []
            for _ in plan.sockets:
                _, fds, _, _ = socket.recv_fds(channel, 1, 1)
                mine.append((pid, socket.socket(fileno=fds[0])))
            found.append(mine)
        yield found
    finally:
        for _, channel in children:
            channel.close()
        for pid, _ in children:
            os.waitpid(pid, 0)


def _connect_all(plan: Plan, channel: socket.socket) -> None:
    """The whole life of a child."""
    try:
        for path in plan.sockets:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.connect(path)
                socket.send_fds(channel, [b"x"], [sock.fileno()])
        channel.recv(1)  # until our parent ends
    finally:
        os._exit(0)


async def play(plan: Plan, connected: Sequence[Sequence[tuple[int, socket.socket]]]) -> None:
    """Plays all agents until standard input ends."""
    loop = asyncio.get_running_loop()
    awaited = plan.agents * len(plan.sockets)
    welcomed, over = asyncio.Event(), asyncio.Event()

    def on_welcome() -> None:
        nonlocal awaited
        awaited -= 1
        if awaited == 0:
            welcomed.set()

    began_ns = time.time_ns()
    agents = []
    for number, sockets in enumerate(connected):
        for first_rank, (pid, sock) in zip(plan.first_rank, sockets, strict=True):
            sock.setblocking(False)
            agents.append(FakeAgent(sock, pid, first_rank + number, plan, began_ns, on_welcome))
        await asyncio.sleep(0)
    await asyncio.wait_for(welcomed.wait(), CONNECTED_S)
    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    loop.add_reader(sys.stdin.fileno(), over.set)
    await over.wait()


def main() -> int:
    """Reads the plan, connects, and plays the agents."""
    plan = Plan(**json.loads(sys.stdin.readline()))
    assert all(Path(path).is_socket() for path in plan.sockets)
    with connections(plan) as connected:
        asyncio.run(play(plan, connected))
    return 0


if __name__ == "__main__":
    sys.exit(main())
