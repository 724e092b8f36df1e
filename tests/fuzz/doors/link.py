"""Frames of agents to a real daemon: broken greetings, and captures whose agent does what it likes.

A case is a list of steps, one byte that says what goes with the frame and the frame: nothing, an arena (genuine, or
damaged by what the next part says), or a strange descriptor; or an end: the agent dies, says nothing more, or leaves
its connection to a child. Each is played by a process of its own, of a user without rights (`Eve`). Beside it, another
user's program is captured again and again, and each of these captures must be whole.
"""

import array
import contextlib
import ctypes
import encodings.idna  # noqa: F401 - Python may lie in a folder of root, and is not found later
import multiprocessing
import os
import random
import signal
import socket
import struct
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import grpc
from kineto_agent.protocol import arena, wire
from kineto_agent.protocol.records import SPACE_PYTHON_CODE, SPACE_STACK_NODE, STACK_SAMPLE
from kineto_agent.sources.arena_writer import ArenaWriter
from kineto_protos.v1 import profiler_pb2 as pb
from support.agent.scripted_agent import SOURCE, RemoteAgent, ScriptedAgent
from support.service.calls_as import plain_python
from support.service.daemon import Daemon, running_daemon
from support.waiting import scaled, until

from fuzz import frames, mutate
from fuzz.doors.loop import Case, Failure
from fuzz.doors.strange_descriptors import KINDS, strange

BUFFER_BYTES = 1 << 20
GREETED, NOTHING, ARENA, TWO, HOLES = b"G", b"-", b"A", b"2", b"H"
MANY, DIES, SILENT, FORKED = b"M", b"D", b"S", b"F"
ENDS = {DIES: "dies", SILENT: "silent", FORKED: "forked child"}
MOST_DESCRIPTORS = 253  # that the kernel passes in one packet
STRANGE = {bytes([0x80 + number]): kind for number, kind in enumerate(sorted(KINDS.keys() - {"silent"}))}  # root's
ADA, EVE = 61001, 61005
PR_SET_DUMPABLE = 4
SILENT_S = 8  # the daemon waits 5 s for a greeting
SETTINGS = """
[captures]
agent_deadline = "1s"
process_deadline = "1s"
[store]
max_bytes = "64MiB"
retention_interval = "5s"
[access]
requests_per_second = 100000
"""
LOOK_EVERY = 40  # cases, at the log and whether calls are answered
CALM = ("Traceback (most", "exception was never retrieved", "Exception in callback", "ResourceWarning")


class Neighbour:
    """Captures a program of another user, one time after the other, until the end of the block."""

    def __init__(self, daemon: Daemon, agent: RemoteAgent) -> None:
        self._daemon, self._agent = daemon, agent
        self._problem = ""
        self._whole = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Neighbour":
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        stub = self._daemon.stub()
        spec = pb.CaptureSpec(selector=pb.Selector(pids=[self._agent.pid]), duration_ns=10**6, no_attach=True)
        while not self._problem and not self._ended.wait(0.1):
            try:
                capture_id = stub.CreateCapture(pb.CreateCaptureRequest(spec=spec), timeout=scaled(60)).id
                self._agent.do("capture")
                *_, last = stub.WatchCapture(pb.WatchCaptureRequest(id=capture_id), timeout=scaled(60))
                (target,) = last.snapshot.targets
                if (target.verdict, sum(each.records for each in target.counts)) != (pb.VERDICT_DONE, 100):
                    self._problem = f"{target}"
                self._whole += 1
            except (grpc.RpcError, AssertionError, OSError) as exc:
                self._problem = f"{exc!r}"

    def look(self) -> None:
        """Raises Failure if a capture was not whole."""
        if self._problem:
            raise Failure(f"after {self._whole} whole captures of the neighbour's: {self._problem}")

    def end(self) -> None:
        """Ends, and says how it went."""
        self.__exit__()
        self.look()
        print(f"captures of the neighbour's: {self._whole}, all whole")


class Eve:
    """Plays cases, each in a process of its own without any right. Make it before there are threads."""

    def __init__(self) -> None:
        self._orders, orders = multiprocessing.Pipe()
        self._agent, daemon = multiprocessing.Pipe()
        self._pid = os.fork()
        if self._pid == 0:
            self._orders.close()
            self._agent.close()
            _serve(orders, daemon)
        orders.close()
        daemon.close()

    def begin(self, socket_path: Path, case: Case) -> None:
        """Has a case played."""
        self._orders.send((socket_path, case))

    def told(self) -> str | int:
        """The pid of an agent that is to be captured, or how the case has ended. Raises Failure."""
        if not self._agent.poll(scaled(60)):
            raise Failure("the agent waits for something that does not come")
        said: str | int | Failure = self._agent.recv()
        if isinstance(said, Failure):
            raise said
        return said

    def go_on(self, capture_id: str) -> None:
        """Tells the agent which capture it is asked for."""
        self._agent.send(capture_id)

    def close(self) -> None:
        """Ends it."""
        self._orders.close()
        os.waitpid(self._pid, 0)


def _serve(orders: Connection, daemon: Connection) -> NoReturn:
    os.setgroups([])
    os.setresgid(EVE, EVE, EVE)
    os.setresuid(EVE, EVE, EVE)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1)  # its files in /proc are its own again
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the silent ones
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            socket_path, case = orders.recv()
            if os.fork() == 0:
                orders.close()
                _play(socket_path, case, daemon)
    os._exit(0)


def _play(socket_path: Path, case: Case, daemon: Connection) -> NoReturn:
    try:
        with ScriptedAgent(socket_path) as agent:
            daemon.send(_captured(agent, case[1:], daemon) if case[:1] == [GREETED] else _greeting(agent, case, daemon))
    except BaseException:
        daemon.send(Failure(traceback.format_exc()))
    os._exit(0)


def _captured(agent: ScriptedAgent, steps: Case, daemon: Connection) -> str:
    agent.hello()
    daemon.send(os.getpid())
    capture_id = daemon.recv()
    agent.await_start()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for number, step in enumerate(steps):
            kind, frame = step[:1], frames.meant_for(step[1:], capture_id)
            if kind in ENDS:
                _end(kind, agent, daemon)
            if kind == HOLES or not frame:
                continue
            holes = steps[number + 1][1:] if number + 1 < len(steps) else b""
            with _descriptors(kind, holes) as fds:
                _send(agent, frame, fds)
    return "played"


def _end(kind: bytes, agent: ScriptedAgent, daemon: Connection) -> NoReturn:
    """Ends as this kind of agent does."""
    is_child = kind == FORKED and os.fork() == 0
    if not is_child:
        daemon.send(ENDS[kind])
    if kind == SILENT or is_child:
        signal.alarm(SILENT_S)
        agent.sock.setblocking(True)
        with contextlib.suppress(OSError):
            while agent.sock.recv(wire.MAX_FRAME_BYTES):
                pass
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def _kinds(case: Case) -> set[str]:
    """What is hostile in a case, for the count of them."""
    said = {TWO: "two descriptors", MANY: "253 descriptors", ARENA: "arena", NOTHING: "frames", **ENDS}
    found = {STRANGE.get(step[:1]) or said.get(step[:1], "") for step in case}
    found |= {"damaged arena"} if any(step[:1] == HOLES and len(step) > 1 for step in case) else set()
    return (found | {"in a capture" if case[:1] == [GREETED] else "greeting"}) - {""}


class Health:
    """Whether a daemon answers, and what is new in its log."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._read = 0

    def look(self) -> None:
        """Raises Failure if the daemon does not answer, or wrote of an error of its own."""
        with self._daemon.log_path.open("rb") as log:
            log.seek(self._read)
            new = log.read()
        self._read += len(new)
        text = new.decode("utf-8", "replace")
        for sign in CALM:
            if sign in text:
                at = text.index(sign)
                raise Failure(f"the daemon's log: {text[at : at + 3000]}")
        self._daemon.stub().GetHost(pb.GetHostRequest(), timeout=scaled(10))
        self._daemon.stub().ListProcesses(pb.ListProcessesRequest(), timeout=scaled(10))

    def processes(self) -> dict[str, int]:
        """The daemon and this one."""
        return {"daemon": self._daemon.pid}


class Link:
    """Speaks to the daemon as the agent of processes of another user."""

    name = "link"

    def __init__(self, daemon: Daemon, eve: Eve, neighbour: "Neighbour | None" = None) -> None:
        self._daemon, self._eve, self._neighbour = daemon, eve, neighbour
        self._health = Health(daemon)
        self._kinds = Counter[str]()
        self._played = 0

    def case(self, rng: random.Random) -> Case:
        """A connection from its first frame on."""
        steps = self._steps(rng)
        if rng.random() < 0.1:  # replayed, or in another order
            place = rng.randrange(len(steps))
            steps.insert(rng.randrange(place, len(steps)) + 1, steps[place])
        if rng.random() < 0.1:
            steps = [*steps[: rng.randrange(len(steps)) + 1], rng.choice(list(ENDS))]
        return steps

    def _steps(self, rng: random.Random) -> Case:
        if rng.random() < 0.4:
            return [rng.choice(list(STRANGE)) + wire.encode(frames.of_agent(rng)) for _ in range(rng.randrange(1, 4))]
        if rng.random() < 0.6:
            return [NOTHING + frames.damaged(frames.of_agent(rng), rng) for _ in range(rng.randrange(1, 5))]
        steps = [GREETED]
        for message in (
            wire.State(frames.CAPTURE, "WARMUP", frames.NOW_NS),
            wire.Arena(frames.CAPTURE, SOURCE, "python_stacks/1", {"hz": 1000}),
            wire.State(frames.CAPTURE, "COLLECT", frames.NOW_NS),
            wire.State(frames.CAPTURE, "PROCESS", frames.NOW_NS),
            frames.result(),
        ):
            hurt = rng.random() < 0.35
            frame = frames.damaged(message, rng) if hurt else wire.encode(message)
            if isinstance(message, wire.Arena):
                kind = ARENA if rng.random() < 0.8 else rng.choice((NOTHING, TWO, MANY, *STRANGE))
                steps += [kind + frame, _holes(rng)]
            elif rng.random() < 0.95:
                steps.append(NOTHING + frame)
            if rng.random() < 0.1:
                steps.append(NOTHING + frames.damaged(frames.of_agent(rng), rng))
        return steps

    def play(self, case: Case) -> str:
        """The daemon answers as it must, closes, or takes it; and goes on."""
        self._played += 1
        self._kinds.update(_kinds(case))
        self._eve.begin(self._daemon.agent_socket, case)
        said = self._eve.told()
        outcome = self._captured(said) if isinstance(said, int) else said
        if self._played % LOOK_EVERY == 0:
            self.look()
        return outcome

    def _captured(self, pid: int) -> str:
        spec = pb.CaptureSpec(selector=pb.Selector(pids=[pid]), duration_ns=10**6, no_attach=True)
        stub = self._daemon.stub()
        capture_id = stub.CreateCapture(pb.CreateCaptureRequest(spec=spec), timeout=scaled(20)).id
        self._eve.go_on(capture_id)
        self._eve.told()
        *_, last = stub.WatchCapture(pb.WatchCaptureRequest(id=capture_id), timeout=scaled(20))
        (target,) = last.snapshot.targets
        if not target.verdict or (target.verdict != pb.VERDICT_DONE and not target.reason):
            raise Failure(f"no verdict: {target}")
        if target.reason_code in ("INTERNAL", "DECODE_FAILED", "DECODE_TIMEOUT", "TRACE_FAILED"):
            raise Failure(f"{target.reason_code}: {target.reason}")
        return f"{pb.Verdict.Name(target.verdict).removeprefix('VERDICT_')} {target.reason_code}".strip()

    def look(self) -> None:
        """As `Health.look`; and the neighbour's captures are whole."""
        self._health.look()
        if self._neighbour is not None:
            self._neighbour.look()

    def processes(self) -> dict[str, int]:
        """The daemon and this one."""
        return self._health.processes()

    def settle(self) -> None:
        """All captures have ended and all connections are closed."""
        stub = self._daemon.stub()
        if self._neighbour is not None:
            self._neighbour.end()
        print("cases with: " + ", ".join(f"{kind} {count}" for kind, count in sorted(self._kinds.items())))
        print(f"the daemon's log: {self._daemon.log_path.stat().st_size >> 10} KiB")
        until(
            lambda: stub.GetHost(pb.GetHostRequest(), timeout=scaled(10)).agents <= 1,
            "no agent is left but the neighbour",
        )
        until(lambda: stub.GetHost(pb.GetHostRequest(), timeout=scaled(10)).captures_running == 0, "no capture runs")
        self.look()


def _greeting(agent: ScriptedAgent, case: Case, daemon: Connection) -> str:
    try:
        for step in case:
            if step[:1] in ENDS:
                _end(step[:1], agent, daemon)
            if step[:1] == NOTHING:
                _send(agent, step[1:], [])
                continue
            with _descriptors(step[:1], b"") as fds:
                _send(agent, step[1:], fds)
        agent.sock.shutdown(socket.SHUT_WR)
        answers = []
        while (message := agent.receive()) is not None:
            answers.append(type(message).__name__)
    except (BrokenPipeError, ConnectionResetError):
        return "closed"
    return "answered " + "+".join(dict.fromkeys(answers)) if answers else "closed in silence"


def _send(agent: ScriptedAgent, frame: bytes, fds: list[int]) -> None:
    with contextlib.suppress(OSError) if len(frame) > wire.MAX_FRAME_BYTES else contextlib.nullcontext():
        agent.sock.sendmsg([frame], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [])


def _holes(rng: random.Random) -> bytes:
    """A step that does nothing but say where the arena is damaged: (offset, value) pairs, 8 bytes each."""
    if rng.random() < 0.4:
        return HOLES
    found = b""
    for _ in range(rng.randrange(1, 6)):
        place = rng.choice(
            (
                rng.randrange(0, 128),
                rng.randrange(arena.RECORD_BYTES, arena.RECORD_BYTES + 512),
                arena.HEADER_BYTES + rng.randrange(256),
                arena.HEADER_BYTES + rng.randrange(1 << 16),
                (1 << 21) - rng.randrange(1 << 20),
            )
        )
        found += struct.pack("<QQ", place & ~7, mutate.number(rng) & (1 << 64) - 1)
    return HOLES + found


@contextmanager
def _descriptors(kind: bytes, holes: bytes) -> Iterator[list[int]]:
    """Descriptors that travel with a frame; they are closed here."""
    writer = ArenaWriter("fuzz", BUFFER_BYTES, 1 << 16)
    with contextlib.ExitStack() as stack:
        stack.callback(writer.close)
        _fill(writer, holes)
        if kind in STRANGE:
            yield [stack.enter_context(strange(STRANGE[kind], bytes(writer._map)))]
        elif kind == NOTHING:
            yield []
        else:
            yield [writer.fd] * {TWO: 2, MANY: MOST_DESCRIPTORS}.get(kind, 1)


def _fill(writer: ArenaWriter, holes: bytes) -> None:
    for number, name in ((1, "main"), (2, "train_step")):
        writer.intern(number, SPACE_PYTHON_CODE, b"train.py\x001\x00" + name.encode())
        writer.intern(number, SPACE_STACK_NODE, struct.pack("<II", number - 1, number))
    for index in range(50):
        writer.append(STACK_SAMPLE, frames.NOW_NS + index * 10**6, 1, 1 + index % 2, 10, 0)
    writer.publish()
    for place, value in struct.iter_unpack("<QQ", holes[: len(holes) // 16 * 16]):
        if place + 8 <= len(writer._map):
            struct.pack_into("<Q", writer._map, place, value)


@contextmanager
def opened(folder: Path) -> Iterator[Link]:
    """The door, opened with a running daemon."""
    config = folder / "config.toml"
    config.write_text(SETTINGS)
    eve = Eve()
    with contextlib.closing(eve), running_daemon("--config", str(config)) as daemon:
        daemon.root.chmod(0o755)
        with RemoteAgent(daemon.agent_socket, python=plain_python(ADA)) as agent:
            agent.do("hello")
            with Neighbour(daemon, agent) as neighbour:
                yield Link(daemon, eve, neighbour)
