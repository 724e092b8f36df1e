"""Frames of agents to a real daemon: broken greetings, and captures whose agent does what it likes.

A case is a list of steps, one byte that says what goes with the frame and the frame: nothing, an arena (genuine, or
damaged by what the next part says), or a descriptor that is no arena.
"""

import array
import contextlib
import os
import random
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kineto_agent.protocol import arena, wire
from kineto_agent.protocol.records import SPACE_PYTHON_CODE, SPACE_STACK_NODE, STACK_SAMPLE
from kineto_agent.sources.arena_writer import ArenaWriter
from kineto_protos.v1 import profiler_pb2 as pb

from support.agent.scripted_agent import SOURCE, ScriptedAgent
from support.fuzz import frames, mutate
from support.fuzz.loop import Case, Failure
from support.service.daemon import Daemon, running_daemon
from support.waiting import until

BUFFER_BYTES = 1 << 20
GREETED, NOTHING, ARENA, UNSEALED, PIPE, FOLDER, TWO, HOLES = b"G", b"-", b"A", b"U", b"P", b"F", b"2", b"H"
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


class Link:
    """Speaks to the daemon as the agent of this very process."""

    name = "link"

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._played = self._read = 0
        self._watched: list[str] = []
        self._folder = os.open("/tmp", os.O_RDONLY)

    def case(self, rng: random.Random) -> Case:
        """A connection from its first frame on."""
        if rng.random() < 0.5:
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
                kind = ARENA if rng.random() < 0.8 else rng.choice((NOTHING, UNSEALED, PIPE, FOLDER, TWO))
                steps += [kind + frame, _holes(rng)]
            elif rng.random() < 0.95:
                steps.append(NOTHING + frame)
            if rng.random() < 0.1:
                steps.append(NOTHING + frames.damaged(frames.of_agent(rng), rng))
        return steps

    def play(self, case: Case) -> str:
        """The daemon answers as it must, closes, or takes it; and goes on."""
        self._played += 1
        with ScriptedAgent(self._daemon.agent_socket) as agent:
            outcome = self._captured(agent, case[1:]) if case[:1] == [GREETED] else _greeting(agent, case)
        if self._played % LOOK_EVERY == 0:
            self.look()
        return outcome

    def _captured(self, agent: ScriptedAgent, steps: Case) -> str:
        agent.hello()
        spec = pb.CaptureSpec(selector=pb.Selector(pids=[os.getpid()]), duration_ns=10**6, no_attach=True)
        stub = self._daemon.stub()
        capture_id = stub.CreateCapture(pb.CreateCaptureRequest(spec=spec), timeout=20).id
        agent.await_start()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._act(agent, steps, capture_id)
        agent.close()
        *_, last = stub.WatchCapture(pb.WatchCaptureRequest(id=capture_id), timeout=20)
        (target,) = last.snapshot.targets
        if not target.verdict or (target.verdict != pb.VERDICT_DONE and not target.reason):
            raise Failure(f"no verdict: {target}")
        if target.reason_code in ("INTERNAL", "DECODE_FAILED", "DECODE_TIMEOUT", "TRACE_FAILED"):
            raise Failure(f"{target.reason_code}: {target.reason}")
        return f"{pb.Verdict.Name(target.verdict).removeprefix('VERDICT_')} {target.reason_code}".strip()

    def _act(self, agent: ScriptedAgent, steps: Case, capture_id: str) -> None:
        for number, step in enumerate(steps):
            kind, frame = step[:1], frames.meant_for(step[1:], capture_id)
            if kind == HOLES or not frame:
                continue
            if kind == NOTHING:
                _send(agent, frame, [])
                continue
            holes = steps[number + 1][1:] if number + 1 < len(steps) else b""
            with _descriptors(kind, holes, self._folder) as fds:
                _send(agent, frame, fds)

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
        self._daemon.stub().GetHost(pb.GetHostRequest(), timeout=10)
        self._daemon.stub().ListProcesses(pb.ListProcessesRequest(), timeout=10)

    def processes(self) -> dict[str, int]:
        """The daemon and this one."""
        return {"daemon": self._daemon.pid}

    def settle(self) -> None:
        """All captures have ended and all connections are closed."""
        stub = self._daemon.stub()
        until(lambda: stub.GetHost(pb.GetHostRequest(), timeout=10).agents == 0, "no agent is left")
        until(lambda: stub.GetHost(pb.GetHostRequest(), timeout=10).captures_running == 0, "no capture runs")
        self.look()


def _greeting(agent: ScriptedAgent, case: Case) -> str:
    try:
        for step in case:
            _send(agent, step[1:], [])
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
def _descriptors(kind: bytes, holes: bytes, folder: int) -> Iterator[list[int]]:
    """Descriptors that travel with a frame; they are closed here."""
    writer = ArenaWriter("fuzz", BUFFER_BYTES, 1 << 16)
    with contextlib.ExitStack() as stack:
        stack.callback(writer.close)
        if kind == PIPE:
            for end in (ends := os.pipe()):
                stack.callback(os.close, end)
            yield [ends[0]]
        elif kind == FOLDER:
            yield [folder]
        elif kind == UNSEALED:
            plain = os.memfd_create("plain")
            stack.callback(os.close, plain)
            os.truncate(plain, 1 << 20)
            yield [plain]
        else:
            _fill(writer, holes)
            yield [writer.fd, writer.fd] if kind == TWO else [writer.fd]


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
    with running_daemon("--config", str(config)) as daemon:
        yield Link(daemon)
