"""Frames of a hostile daemon to a real agent in a process of its own, whose program must never notice.

The other process (`python -m fuzz.doors.agent DESCRIPTOR`) counts its own loop and makes an agent, as a live attach
does, of each socket that it is sent. A case is the frames that such an agent gets.
"""

import array
import contextlib
import os
import random
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kineto_agent.control.link import Link
from kineto_agent.control.runner import Agent
from kineto_agent.protocol import wire
from kineto_agent.sources.python.stack_sampling import PythonStacksSource
from kineto_agent.steps.counting import StepCounter
from support.service.daemon import child_environ
from support.waiting import until

from fuzz import frames
from fuzz.doors.loop import Case, Failure

ANSWER_S = 10.0
END_S = 20.0
LOOK_EVERY = 50


class HostileDaemon:
    """The daemon's side of every link."""

    name = "agent"

    def __init__(self, program: "subprocess.Popen[bytes]", control: socket.socket) -> None:
        self._program, self._control = program, control
        self._played = self._steps = 0

    def case(self, rng: random.Random) -> Case:
        """A few frames, some of them in an order that makes sense."""
        found = [frames.damaged(frames.of_daemon(rng), rng) for _ in range(rng.randrange(1, 7))]
        if rng.random() < 0.3:
            found.insert(0, wire.encode(wire.Welcome("0.1.0")))
        if rng.random() < 0.1:
            found += [wire.encode(wire.Describe())] * rng.randrange(400)
        return found

    def play(self, case: Case) -> str:
        """The agent's frames must be right ones; when the link ends it must leave."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [theirs.fileno()]))]
                self._control.sendmsg([b"N"], rights)
            ours.settimeout(ANSWER_S)
            seen = {type(_received(ours)).__name__}
            seen |= _spoken(ours, case)
        if self._control.recv(64) != b"ended":
            raise Failure("the program ended")
        self._played += 1
        if self._played % LOOK_EVERY == 0:
            self.look()
        return "+".join(sorted(seen - {"Hello", "NoneType"})) or "silence"

    def look(self) -> None:
        """Raises Failure unless the program's loop goes on, with the threads that it had."""
        before = self._steps
        until(lambda: self._asked() > before, "the program's loop goes on")

    def _asked(self) -> int:
        self._control.send(b"?")
        self._steps, threads = map(int, self._control.recv(64).split())
        if threads:
            raise Failure(f"{threads} threads of agents are left")
        return self._steps

    def processes(self) -> dict[str, int]:
        """The program with the agent."""
        return {"program with the agent": self._program.pid}

    def settle(self) -> None:
        """Waits until no agent is connected."""
        self.look()


def _spoken(ours: socket.socket, case: Case) -> set[str]:
    """Sends everything while reading what the agent has to say; hangs up at the end."""
    seen = set[str]()
    waiting = list(case)
    end = time.monotonic() + ANSWER_S
    while waiting:
        if time.monotonic() > end:
            raise Failure("the agent does not read")
        readable, writable, _ = select.select([ours], [ours], [], 1)
        try:
            if readable:
                if (message := _received(ours)) is None:
                    return seen
                seen.add(type(message).__name__)
            elif writable:
                ours.send(waiting.pop(0)[:200_000], socket.MSG_DONTWAIT)
        except BlockingIOError:
            continue
        except (BrokenPipeError, ConnectionResetError):
            return seen
        except OSError:  # longer than the kernel takes
            continue
    with contextlib.suppress(OSError):
        ours.shutdown(socket.SHUT_WR)
        while (message := _received(ours)) is not None:
            seen.add(type(message).__name__)
    return seen


def _received(ours: socket.socket) -> wire.Message | None:
    """What the agent says; it must be something that an agent may say."""
    frame, ancillary, _, _ = ours.recvmsg(wire.MAX_FRAME_BYTES, socket.CMSG_SPACE(16))
    for _level, _kind, data in ancillary:
        descriptors = array.array("i")
        descriptors.frombytes(data)
        for each in descriptors:
            os.close(each)
    if not frame:
        return None
    message = wire.decode(frame)
    if not isinstance(message, (wire.Hello, wire.State, wire.Arena, wire.Result, wire.Rejected)):
        raise Failure(f"the agent sent {message}")
    if isinstance(message, wire.Result) and message.reason_code == "AGENT_ERROR":
        raise Failure(f"an error in the agent: {message.reason}")
    return message


# the program


def _serve(control: socket.socket) -> None:
    counter = StepCounter()
    steps = [0]

    def work() -> None:
        pause = threading.Event()
        while not pause.wait(0.002):
            steps[0] += 1
            counter.step()

    threading.Thread(target=work, daemon=True, name="training").start()
    agents: list[Agent] = []
    while True:
        data, ancillary, _, _ = control.recvmsg(64, socket.CMSG_SPACE(4))
        if not data:
            return
        if data == b"?":
            agents = [each for each in agents if each.alive]
            control.send(b"%d %d" % (steps[0], len(agents)))
            continue
        (descriptor,) = array.array("i", ancillary[0][2])
        ended = threading.Event()
        link = Link.adopted(socket.socket(fileno=descriptor))
        agent = Agent(counter, tuple, lambda: [PythonStacksSource()], link=link, on_end=ended.set)
        agents.append(agent)
        agent.start()
        if not ended.wait(END_S):
            control.send(b"the agent did not end")
            return
        agent.stop("AGENT_STOPPED", "", timeout_s=END_S)
        control.send(b"ended")


@contextmanager
def opened(_folder: Path) -> Iterator[HostileDaemon]:
    """The door, opened with its daemon and agent."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        ours.settimeout(END_S + 10)
        with theirs:
            program = subprocess.Popen(
                [sys.executable, "-m", "fuzz.doors.agent", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=child_environ(),
            )
        try:
            yield HostileDaemon(program, ours)
        finally:
            program.kill()
            program.wait()


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
