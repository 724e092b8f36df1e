"""An agent that does exactly what a test says: a real socket, a real arena, no intelligence.

In the test's own process (which is then the target):

    with ScriptedAgent(daemon.agent_socket) as agent:
        agent.hello()
        start = agent.expect(wire.Start)

As a process of its own, which may be killed: `RemoteAgent(daemon.agent_socket)`, driven by lines on its
standard input ("do" waits until the line was carried out).
"""

import array
import contextlib
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional, TypeVar

REPOSITORY = Path(__file__).parents[3]
if __name__ == "__main__":
    sys.path[:0] = [str(REPOSITORY / "agent"), str(REPOSITORY / "tests")]

from kineto_agent.protocol import arena, wire  # noqa: E402
from kineto_agent.protocol.records import SPACE_PYTHON_CODE, SPACE_STACK_NODE, STACK_SAMPLE  # noqa: E402
from kineto_agent.sources.arena_writer import ArenaWriter  # noqa: E402

from support.waiting import scaled  # noqa: E402

DEADLINE_S = 20.0
STRINGS_BYTES = 64 * 1024
SOURCE = "python_stacks"
FORMAT = "python_stacks/1"
M = TypeVar("M")


def hello_message(**changes: Any) -> wire.Hello:
    """A valid Hello of this process."""
    return wire.Hello(
        agent_version="0.1.0",
        pid=os.getpid(),
        python_version="3.11.7",
        framework="torch 2.11.0",
        rank=None,
        world_size=None,
        job_id="",
        iterations=-1,
        sources={SOURCE: ["python_function"]},
        argv=list(sys.argv),
        busy_capture_id="",
    )._replace(**changes)


class ScriptedAgent:
    """One connection of an agent to the daemon."""

    def __init__(self, socket_path: Path, **hello: Any) -> None:
        self._path = socket_path
        self._hello = hello
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(scaled(DEADLINE_S))
        self.start: Optional[wire.Start] = None
        self.writer: Optional[ArenaWriter] = None
        self._window_start_ns = 0

    def __enter__(self) -> "ScriptedAgent":
        self.connect()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def connect(self) -> None:
        """Connects to the daemon's agent socket."""
        self.sock.connect(str(self._path))

    def close(self) -> None:
        """Closes the connection."""
        self.sock.close()
        if self.writer is not None:
            self.writer.close()
            self.writer = None

    # frames

    def send(self, message: wire.Message, fds: Sequence[int] = ()) -> None:
        """Sends one message."""
        self.send_raw(wire.encode(message), fds)

    def send_raw(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        """Sends any bytes as one packet."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.sock.sendmsg([frame], rights)

    def receive(self) -> Optional[wire.Message]:
        """The next frame; None at the end of the connection."""
        try:
            frame = self.sock.recv(wire.MAX_FRAME_BYTES)
        except ConnectionResetError:
            return None
        return wire.decode(frame) if frame else None

    def expect(self, kind: "type[M]") -> M:
        """The next frame of this kind, skipping others."""
        while True:
            message = self.receive()
            assert message is not None, f"the daemon hung up instead of sending {kind.__name__}"
            if isinstance(message, kind):
                return message

    # the usual steps

    def hello(self) -> None:
        """Introduces itself and waits for the Welcome."""
        self.send(hello_message(**self._hello))
        self.expect(wire.Welcome)

    def await_start(self) -> wire.Start:
        """Waits for the capture request."""
        self.start = self.expect(wire.Start)
        return self.start

    def state(self, name: str) -> None:
        """Reports that the capture is in another state."""
        assert self.start is not None
        now_ns = time.time_ns()
        if name == "COLLECT":
            self._window_start_ns = now_ns
        self.send(wire.State(self.start.capture_id, name, now_ns))

    def announce(self) -> ArenaWriter:
        """Makes an arena and hands it over."""
        assert self.start is not None
        self.writer = ArenaWriter("scripted", self.start.buffer_limit_bytes, STRINGS_BYTES)
        for number, name in ((1, "main"), (2, "train_step")):
            self.writer.intern(number, SPACE_PYTHON_CODE, b"train.py\x001\x00" + name.encode())
            self.writer.intern(
                number, SPACE_STACK_NODE, (number - 1).to_bytes(4, "little") + number.to_bytes(4, "little")
            )
        message = wire.Arena(self.start.capture_id, SOURCE, FORMAT, {"interval_ns": 1_000_000})
        self.send(message, [self.writer.fd])
        return self.writer

    def record(self, count: int) -> None:
        """Writes stack samples, one per millisecond backwards from now, and makes them READY."""
        assert self.writer is not None
        now_ns = max(time.time_ns(), self._window_start_ns + count)
        for index in range(count):
            self.writer.append(STACK_SAMPLE, now_ns - count + index, os.getpid(), 2, 10, 0)
        self.writer.publish()

    def leave_completed(self, count: int) -> None:
        """Writes samples into a buffer that is COMPLETED but not READY, as at a sudden death."""
        assert self.writer is not None
        self.record(count)
        words = memoryview(self.writer._map).cast("I")
        for index in range(4):
            at = (arena.HEADER_BYTES + index * arena.DESCRIPTOR_BYTES + arena.STATE) // 4
            if words[at] == arena.READY:
                words[at] = arena.COMPLETED
        words.release()

    def result(self, outcome: str = "done", reason_code: str = "", reason: str = "") -> None:
        """Reports the end of the capture."""
        assert self.start is not None
        counts = self.writer.counts() if self.writer is not None else None
        source = {"records": counts.records, "dropped": counts.dropped, "bytes": counts.bytes} if counts else {}
        self.send(
            wire.Result(
                capture_id=self.start.capture_id,
                outcome=outcome,
                reason_code=reason_code,
                reason=reason,
                window_start_ns=self._window_start_ns,
                window_end_ns=time.time_ns(),
                sources={SOURCE: {**source, "metadata": {"extra": 1}}},
                overhead={"start_ns": 1000, "stop_ns": 2000, "detach_ns": 0, "agent_cpu_ns": 3000, "step_ratio": 0},
                threads={str(os.getpid()): "MainThread"},
                iterations={},
                warnings=[],
            )
        )

    def collect(self) -> "tuple[wire.Start, ArenaWriter]":
        """The first part of a capture: its records are wanted now."""
        start = self.await_start()
        writer = self.announce()
        self.state("COLLECT")
        return start, writer

    def cancelled(self, capture_id: str, *, keep: bool = True) -> None:
        """The daemon's wish to end a capture, carried out."""
        assert self.expect(wire.Cancel) == wire.Cancel(capture_id, keep)
        if keep:
            self.result("partial", "CANCELLED", "cancelled; the window is cut short")
        else:
            self.result("cancelled", "CANCELLED", "cancelled")

    def flood(self, count: int) -> None:
        """Sends Hello again and again, as fast as it is read."""
        for _ in range(count):
            self.send(hello_message())

    def capture(self, samples: int = 100) -> wire.Start:
        """A whole capture without waiting for its duration."""
        start, _ = self.collect()
        self.record(samples)
        self.state("PROCESS")
        self.result()
        self.expect(wire.Release)
        return start


class RemoteAgent:
    """A ScriptedAgent in a process of its own."""

    def __init__(self, socket_path: Path, *, prefix: Sequence[str] = (), python: Sequence[str] = ()) -> None:
        """python: another interpreter, with what comes before it."""
        held, self._hold = os.pipe()
        self.process = subprocess.Popen(
            [*prefix, *(python or [sys.executable]), "-S", __file__, str(socket_path), str(held)],
            pass_fds=[held],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        os.close(held)

    @property
    def pid(self) -> int:
        """Pid of the agent's process."""
        return self.process.pid

    def tell(self, line: str) -> None:
        """Sends a command without waiting."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def told(self) -> str:
        """Waits for the answer to the oldest command."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def do(self, *lines: str) -> None:
        """Carries out commands: the names of ScriptedAgent's methods with their arguments."""
        for line in lines:
            self.tell(line)
        for line in lines:
            assert self.told() == "ok", f"{line} failed"

    def kill(self) -> None:
        """Sends SIGKILL and waits for the end of the process."""
        self.process.kill()
        self.process.wait()
        if self._hold >= 0:
            os.close(self._hold)  # lets a forked child go
            self._hold = -1
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def __enter__(self) -> "RemoteAgent":
        return self

    def __exit__(self, *_exc: object) -> None:
        self.kill()


def _fork(held: int) -> None:
    """A child that keeps everything open until the test lets it go."""
    if os.fork() == 0:
        os.close(0)
        os.close(1)
        os.read(held, 1)
        os._exit(0)


def _main() -> int:
    agent = ScriptedAgent(Path(sys.argv[1]))
    for number, line in enumerate(sys.stdin):
        if number == 0:
            agent.connect()  # only now: the daemon waits for the Hello no longer than for some seconds
        name, *arguments = shlex.split(line)
        if name == "exit":
            os._exit(int(arguments[0]))
        if name == "execute":
            os.execv(sys.executable, [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"])
        if name == "fork":
            _fork(int(sys.argv[2]))
        else:
            getattr(agent, name)(*(int(each) if each.isdecimal() else each for each in arguments))
        print("ok", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(_main())
