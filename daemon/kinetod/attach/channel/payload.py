"""Packs the agent and the collector library, and sends them to the target over the private channel.

Theory of operation
    One packet: the texts of `kineto_agent.system.gil_rests` and of `standard_library` and `loader` in
    `kineto_agent.bootstrap`, with a header behind them, and sealed memfds.
    They are created once per process and shared by all targets; because of the seals, no target can change what another
    one will run.

    The agent's modules are sent twice, in pieces of some lines (see the loader for why): as text, for any CPython, and
    compiled, for targets that run the same CPython as this process.

    The target answers with one packet: "K", the agent runs; or "E" and the exception. `send` waits for it, so that a
    failure has a reason. Everything after it belongs to the link.
"""

import contextlib
import functools
import hashlib
import importlib.util
import marshal
import os
import platform
import re
import select
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fcntl import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_WRITE, fcntl
from itertools import pairwise
from pathlib import Path
from types import CodeType

import kineto_agent

from kinetod.attach.attach_types import AttachCode, AttachError, Deadline
from kinetod.attach.channel.bootstrap import lacking
from kinetod.attach.inspect import standstill

_LOADER = "kineto_agent.bootstrap.loader"
_STANDARD = "kineto_agent.bootstrap.standard_library"
_LEFT_OUT = (  # never imported in a target
    "kineto_agent.__main__",
    "kineto_agent.bootstrap.inject",
    "kineto_agent.bootstrap.startup",
    "kineto_agent.protocol.schema",
    _LOADER,
    _STANDARD,
)
_PACKET = ("system/gil_rests", "bootstrap/standard_library", "bootstrap/loader")
# The interpreter treats it as an ordinary import; the bootstrap compiles the packet with its effect.
_FUTURE = re.compile(r"^from __future__ import annotations\b.*\n", re.MULTILINE)
_PIECE_LINES = 40  # take about half a millisecond to compile
# Where a statement may begin. Other lines that look so, in a long text or in brackets, cannot be compiled alone.
_BEGIN = re.compile(r"(?!(?:elif|else|except|finally)\b)[^\s#)\]}]")
_NO_CODE = re.compile(r"\s*(?:#|$)")
_MARSHAL_VERSION = 2  # readable by every Python
_MAX_PACKET_BYTES = 64 * 1024  # the bootstrap's buffer size
_MAX_ANSWER_BYTES = 1024
_OWN_WORDS = ("OSError(", "ImportError(", "MemoryError(")  # they say enough
_LOOK_EVERY_S = 0.25  # whether it has been stopped or frozen
_LOOKS, _RUNNING_LOOKS, _LOOK_S = 5, 100, 0.01
_ELF_HEADER = struct.Struct("<4sBB10xHH")  # magic, class, byte order, (rest of e_ident), e_type, e_machine
_MACHINES = {"x86_64": 62, "aarch64": 183}
_ELF_CLASS_64 = 2


@dataclass(frozen=True, slots=True)
class Payload:
    """The packet and the descriptors that go with it."""

    packet: bytes
    descriptors: tuple[int, ...]


def send(channel: socket.socket, pid: int, deadline: Deadline) -> None:
    """Sends the agent and waits until it runs. pid: as this process sees it. Raises AttachError."""
    check_machine(pid)
    payload = agent()
    channel.settimeout(max(deadline.left_s, 0.001))
    try:
        socket.send_fds(channel, [payload.packet], payload.descriptors)
    except TimeoutError:
        raise _timeout(pid) from None
    except OSError as exc:
        raise _ended(pid) from exc
    finally:
        channel.settimeout(None)
    _await_answer(channel, pid, deadline)


def _await_answer(channel: socket.socket, pid: int, deadline: Deadline) -> None:
    poller = select.poll()
    poller.register(channel, select.POLLIN)
    while not poller.poll(min(_LOOK_EVERY_S, deadline.left_s) * 1000):
        standstill.check(pid)
        if deadline.passed:
            raise _timeout(pid)
    try:
        try:
            answer = channel.recv(_MAX_ANSWER_BYTES)
        except ConnectionResetError:  # it has closed without reading all of it: what it said before that comes next
            answer = channel.recv(_MAX_ANSWER_BYTES)
    except OSError as exc:
        raise _ended(pid) from exc
    if answer == b"K":
        return
    if not answer:
        raise _ended(pid)
    told = "".join(char for char in answer[1:].decode("utf-8", "replace") if char.isprintable())
    raise lacking(pid, told) or cannot_run(pid, told)


def cannot_run(pid: int, words: str) -> AttachError:
    """For an exception that ended our code there. words: its repr()."""
    reason = f"the agent cannot run in process {pid}: {words}"
    if words.startswith(_OWN_WORDS):
        return AttachError(AttachCode.FAILED, reason)
    ask = "Does one of its audit hooks forbid this, or has it modified standard modules that the agent needs?"
    return AttachError(AttachCode.UNSUITABLE, f"{reason}. {ask}")


def _ended(pid: int) -> AttachError:
    if not Path(f"/proc/{pid}").exists():
        return AttachError(AttachCode.GONE, f"process {pid} ended while the agent was being loaded")
    reason = f"process {pid} closed the agent's channel while the agent was being loaded (or is exiting); try again"
    return AttachError(AttachCode.UNSUITABLE, reason)


def _timeout(pid: int) -> AttachError:
    reason = f"process {pid} did not load the agent in time: {_delay(pid)}; try again"
    return AttachError(AttachCode.TIMEOUT, reason)


def _delay(pid: int) -> str:
    """Explains what the agent's thread waits for.

    Looks several times, since a thread that has just begun to wait still looks as if it ran, on a busy machine for as
    long as it gets no processor.
    """
    looks, found = 0, None
    for _ in range(_RUNNING_LOOKS):
        found = standstill.delay(pid)
        looks += found is not None
        if found or looks == _LOOKS:
            break
        time.sleep(_LOOK_S)
    if found is None:
        return "the agent's thread is still starting: the host is overloaded, or the process's CPU quota is used up"
    return f"the agent's thread is waiting for {found}" if found else "its own threads do not release the GIL"


def check_machine(pid: int, proc: Path = Path("/proc")) -> None:
    """Raises AttachError unless the process's executable is built for this host's architecture."""
    try:
        with (proc / str(pid) / "exe").open("rb") as file:
            magic, elf_class, _order, _type, machine = _ELF_HEADER.unpack(file.read(_ELF_HEADER.size))
    except (OSError, struct.error) as exc:
        raise AttachError(AttachCode.GONE, f"the executable of process {pid} cannot be read: {exc}") from exc
    if magic != b"\x7fELF" or elf_class != _ELF_CLASS_64 or machine != _MACHINES.get(platform.machine()):
        reason = f"process {pid} is built for ELF machine {machine}, but this host is {platform.machine()}"
        raise AttachError(AttachCode.UNSUPPORTED, reason)


@functools.cache
def agent() -> Payload:
    """Returns the installed agent, packed once. Raises AttachError if it cannot be read."""
    sources, code = {}, {}
    for name, is_package, text in _sources():
        split = list(pieces(text, f"<{name}>"))
        sources[name] = is_package, [piece[:2] for piece in split]
        code[name] = is_package, [marshal.dumps(compiled) for _line, _text, compiled in split]
    files = {"sources": marshal.dumps(sources, _MARSHAL_VERSION), "code": marshal.dumps(code, _MARSHAL_VERSION)}
    library = _folder() / "_native" / "libkineto_collector.so"
    if library.exists():
        files["library"] = library.read_bytes()
    texts = [(_folder() / f"{name}.py").read_text() for name in _PACKET]
    loader = "".join(_FUTURE.sub("", text) for text in texts)
    header = {
        "version": kineto_agent.__version__,
        "digest": hashlib.sha256(b"".join([loader.encode(), *files.values()])).hexdigest(),
        "cache_tag": sys.implementation.cache_tag,
        "magic": importlib.util.MAGIC_NUMBER,
        "descriptors": list(files),
    }
    packet = f"{loader}\nHEADER = {header!r}\n".encode()
    assert len(packet) <= _MAX_PACKET_BYTES, len(packet)
    return Payload(packet, tuple(sealed_memfd(f"kineto-{name}", data) for name, data in files.items()))


def _folder() -> Path:
    return Path(kineto_agent.__file__).parent


def _sources() -> Iterator[tuple[str, bool, str]]:
    """Yields each module's name, whether it is a package, and its text."""
    for path in sorted(_folder().rglob("*.py")):
        parts = ("kineto_agent", *path.relative_to(_folder()).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        if not name.startswith(_LEFT_OUT):
            yield name, is_package, path.read_text("utf-8")


def pieces(text: str, name: str) -> Iterator[tuple[int, str, CodeType]]:
    """Splits a module into (first line, text, code) pieces of whole statements, a long one by itself.

    Raises SyntaxError, ValueError.
    """
    lines = text.split("\n")
    begins = [number for number, line in enumerate(lines) if _BEGIN.match(line)]
    begins = [each for before, each in pairwise([0, *begins]) if each == before or not lines[before].startswith("@")]
    begin = end = 0
    for first, after in pairwise([*begins, len(lines)]):
        stop = next(line for line in range(after, first, -1) if not _NO_CODE.match(lines[line - 1]))
        if end > begin and stop - begin > _PIECE_LINES:
            with contextlib.suppress(SyntaxError):
                yield _piece(lines, begin, end, name)
                begin = first
        end = stop
    yield _piece(lines, begin, end, name)


def _piece(lines: Sequence[str], begin: int, end: int, name: str) -> tuple[int, str, CodeType]:
    text = "".join(f"{line}\n" for line in lines[begin:end])
    return begin + 1, text, compile("\n" * begin + text, name, "exec", dont_inherit=True)


def sealed_memfd(name: str, data: bytes) -> int:
    """Returns the descriptor of a new memfd whose content can no longer be changed."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    fcntl(descriptor, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE)
    return descriptor
