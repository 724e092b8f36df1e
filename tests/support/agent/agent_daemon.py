"""The daemon's end of the agent link, driven by hand: a real SEQPACKET socket in the test's own process.

Runs wherever the agent runs (CPython 3.9 and later). Nothing here waits without a deadline.
"""

import array
import contextlib
import mmap
import os
import socket
import struct
from pathlib import Path
from types import TracebackType
from typing import Any, Dict, List, NamedTuple, Optional, Tuple, Type, TypeVar

from kineto_agent.protocol import arena, wire
from kineto_agent.protocol.records import (
    PYTHON_CODE,
    SPACE_PYTHON_CODE,
    SPACE_STACK_NODE,
    STACK_HOLDS_GIL,
    STACK_NODE,
    STACK_SAMPLE,
    STACK_STATE_MASK,
    STACK_WAIT_MASK,
    STACK_WAIT_SHIFT,
)

from support.agent.arenas import set_free
from support.agent.line_at import line_at
from support.waiting import scaled

DEADLINE_S = 20.0
M = TypeVar("M")


class Sample(NamedTuple):
    """A STACK_SAMPLE, its stack as qualified names from the outermost frame on."""

    time_ns: int
    thread_id: int
    stack: Tuple[str, ...]
    lines: Tuple[int, ...]  # of each frame
    state: int  # STACK_RUNNING, …
    holds_gil: bool
    cpu_us: int
    wait: int = 0  # WAIT_SLEEP, …


class ArenaReader:
    """The daemon's side of an arena: checks it, maps it, copies READY buffers and sets them to FREE."""

    def __init__(self, descriptor: int) -> None:
        self.map = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        os.close(descriptor)
        self.fixed = dict(zip(arena.FIXED_FIELDS, arena.FIXED.unpack_from(self.map)))

    def word(self, offset: int) -> int:
        """A u64 of the header."""
        value: int = struct.unpack_from("=Q", self.map, offset)[0]
        return value

    def take(self) -> List[bytes]:
        """The READY buffers in their order."""
        found = []
        for index in range(self.fixed["buffer_count"]):
            base = self.fixed["descriptors_offset"] + index * arena.DESCRIPTOR_BYTES
            if struct.unpack_from("=I", self.map, base + arena.STATE)[0] != arena.READY:
                continue
            size, sequence = struct.unpack_from("=QQ", self.map, base + arena.BUFFER_VALID_BYTES)
            start = self.fixed["buffers_offset"] + index * self.fixed["buffer_bytes"]
            found.append((sequence, bytes(self.map[start : start + size])))
            set_free(self.map, base)
        return [data for _sequence, data in sorted(found)]

    def strings(self) -> Dict[Tuple[int, int], bytes]:
        """Bytes of the string table by (space, key)."""
        table: Dict[Tuple[int, int], bytes] = {}
        offset = self.fixed["strings_offset"]
        end = offset + self.word(arena.STRINGS_USED)
        while offset < end:
            key, space, length = arena.STRING_ENTRY.unpack_from(self.map, offset)
            start = offset + arena.STRING_ENTRY.size
            table[(space, key)] = bytes(self.map[start : start + length])
            offset = start + -(-length // 8) * 8
        return table

    def samples(self) -> List[Sample]:
        """Every stack sample in READY buffers."""
        records = b"".join(self.take())
        strings = self.strings()
        found = []
        for time_ns, tid, node, state, cpu_us in STACK_SAMPLE.iter_unpack(records):
            frames = _frames(strings, node)
            names, lines = tuple(name for name, _ in frames), tuple(line for _, line in frames)
            held = bool(state & STACK_HOLDS_GIL)
            wait = state >> STACK_WAIT_SHIFT & STACK_WAIT_MASK
            found.append(Sample(time_ns, tid, names, lines, state & STACK_STATE_MASK, held, cpu_us, wait))
        return found

    def close(self) -> None:
        """Unmap the arena."""
        self.map.close()


class Code(NamedTuple):
    """A SPACE_PYTHON_CODE entry."""

    file: str
    name: str
    first_line: int
    line_table_kind: int
    line_table: bytes


def code_of(entry: bytes) -> Code:
    """Decode a SPACE_PYTHON_CODE entry."""
    first_line, kind, file_bytes, name_bytes = PYTHON_CODE.unpack_from(entry)
    text = entry[PYTHON_CODE.size :]
    file, name = text[:file_bytes].decode(), text[file_bytes : file_bytes + name_bytes].decode()
    return Code(file, name, first_line, kind, text[file_bytes + name_bytes :])


def _frames(strings: Dict[Tuple[int, int], bytes], node: int) -> List[Tuple[str, int]]:
    """Name and line of each frame, the outermost first."""
    frames = []
    while node:
        node, number, offset = STACK_NODE.unpack(strings[(SPACE_STACK_NODE, node)])
        code = code_of(strings[(SPACE_PYTHON_CODE, number)])
        line = line_at(code.line_table_kind, code.line_table, code.first_line, offset)
        frames.append((code.name, line))
    return frames[::-1]


class Connection:
    """One connection of an agent, seen from the daemon."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.socket.settimeout(scaled(DEADLINE_S))
        self.arenas: List[ArenaReader] = []
        self.states: List[str] = []

    def receive(self) -> Optional[wire.Message]:
        """The next message; None at the end of the connection. Descriptors become `arenas`, states `states`."""
        space = socket.CMSG_SPACE(4)
        frame, ancillary, flags, _address = self.socket.recvmsg(wire.MAX_FRAME_BYTES, space)
        assert not flags & socket.MSG_CTRUNC
        if not frame:
            return None
        message = wire.decode(frame)
        descriptors = array.array("i")
        for _level, _kind, data in ancillary:
            descriptors.frombytes(data)
        assert len(descriptors) == (1 if isinstance(message, wire.Arena) else 0)
        self.arenas += [ArenaReader(descriptor) for descriptor in descriptors]
        if isinstance(message, wire.State) and not message.call:
            self.states.append(message.state)
        return message

    def expect(self, kind: Type[M]) -> M:
        """The next message of this kind; only State and Arena may come before it."""
        while True:
            message = self.receive()
            if isinstance(message, kind):
                return message
            assert isinstance(message, (wire.State, wire.Arena)), message

    def expect_state(self, state: str) -> wire.State:
        """The next State that is a transition, which must be this one; others tell of a vendor's call."""
        message = self.expect(wire.State)
        while message.call:
            message = self.expect(wire.State)
        assert message.state == state, message
        return message

    def collect(self, capture_id: str = "c1") -> None:
        """Start a capture of an hour and wait until it collects."""
        self.send(start_request(capture_id, duration_ns=3600 * 10**9))
        self.expect_state("WARMUP")
        self.expect_state("COLLECT")

    def expect_end(self) -> None:
        """The agent closes the connection without another word."""
        with contextlib.suppress(ConnectionResetError):  # it left something of ours unread
            assert self.receive() is None

    def send(self, message: wire.Message) -> None:
        """Send one message."""
        self.socket.send(wire.encode(message))

    def send_with(self, message: wire.Message, *descriptors: int) -> None:
        """Send one message with descriptors, which are closed here then."""
        passed = array.array("i", descriptors)
        self.socket.sendmsg([wire.encode(message)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed.tobytes())])
        for descriptor in descriptors:
            os.close(descriptor)

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()
        for reader in self.arenas:
            reader.close()
        self.arenas = []


class Daemon:
    """Listens where an agent looks for its daemon."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.settimeout(scaled(DEADLINE_S))
        self.listener.bind(path)
        self.listener.listen(64)
        self.connections: List[Connection] = []

    def accept(self) -> Connection:
        """The next agent, before its Hello."""
        connection = Connection(self.listener.accept()[0])
        self.connections.append(connection)
        return connection

    def welcome(self) -> Tuple[Connection, wire.Hello]:
        """The next agent, after the handshake."""
        connection = self.accept()
        hello = connection.expect(wire.Hello)
        connection.send(wire.Welcome("0.0.0"))
        return connection, hello

    def close(self) -> None:
        """Close the socket without a word, as a killed daemon does."""
        self.listener.close()
        Path(self.path).unlink()
        for connection in self.connections:
            connection.close()
        self.connections = []

    def __enter__(self) -> "Daemon":
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], value: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        if self.listener.fileno() >= 0:
            self.close()


def start_request(capture_id: str = "c1", **changes: Any) -> wire.Start:
    """A timed capture of Python stacks, changed as given."""
    request = wire.Start(
        capture_id=capture_id,
        activity_types=["python_function"],
        duration_ns=200_000_000,
        iterations=None,
        start_iteration=None,
        iteration_roundup=0,
        warmup_iterations=0,
        warmup_ns=0,
        start_time_ns=0,
        buffer_limit_bytes=8 << 20,
        or_duration_ns=None,
        options={},
    )
    return request._replace(**changes)
