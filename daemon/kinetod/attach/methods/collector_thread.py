"""Attach method for a CUDA process without Python: starts a thread there that serves the collector.

Theory of operation
    1. A new thread of the target runs collector_stub.c: it creates a channel like a bootstrap's (a socket pair, and a
       memfd named after our end) and waits for one packet.
    2. We take our end and send one byte, with the collector library as a sealed memfd. The thread opens it by
       /proc/self/fd, so no path and no mount namespace matters, and calls kc_serve, which sends a greeting. If it
       fails, the thread sends dlopen's error text.
    3. The daemon gives the channel to a process of its own (proxy_agent.py), where the agent's logic runs.

    The library is never unloaded. The memfd's name contains its digest: an identical library that is already loaded is
    reused, since two collectors with one CUPTI would get each other's buffers.
"""

import contextlib
import functools
import hashlib
import select
import socket
import struct
from pathlib import Path
from typing import NamedTuple

from kineto_agent.sources.cupti.collector_binding import LIBRARY

from kinetod.attach.attach_types import AttachCode, AttachError, Deadline, Stop
from kinetod.attach.channel.payload import sealed_memfd
from kinetod.attach.channel.private_channel import await_channel, let_go
from kinetod.attach.channel.remote_collector import RemoteEnded, read_greeting
from kinetod.attach.inject.arch import this_machine
from kinetod.attach.inspect.target_image import TargetImage
from kinetod.attach.methods.collector_code import CODE
from kinetod.attach.methods.native_thread import start_thread

METHOD = "collector"
# struct collector_argument: dlopen, dlsym, dlerror, pthread_self, pthread_detach, kc_serve, wait, three texts
_ARGUMENT = struct.Struct("=6Qq64s32s16s")
_WAIT_MS = 10_000  # how long the thread waits for us
_REFUSED = b"E"
_PACKET = b"K"
_MAX_ANSWER_BYTES = 8192


class CollectorImage(NamedTuple):
    """The collector library to send."""

    fd: int  # a sealed memfd of this process
    name: str


@functools.cache
def library(path: str = LIBRARY) -> CollectorImage:
    """Returns the installed collector, the same at every call. Raises AttachError if there is none."""
    try:
        data = Path(path).read_bytes()
    except OSError as exc:
        raise AttachError(
            AttachCode.FAILED, f"the daemon has no collector to inject ({exc}): install kinetod from a wheel"
        ) from exc
    name = f"kineto-collector-{hashlib.sha256(data).hexdigest()[:16]}"
    return CollectorImage(sealed_memfd(name, data), name)


def bring_in(target: TargetImage, token: int, deadline: Deadline) -> tuple[Stop, socket.socket]:
    """Starts the collector's thread; returns the channel to it, which the caller owns. Raises AttachError."""
    found = target.symbol_in((f"memfd:{library().name}",), "kc_serve")
    stop = start_thread(target, CODE[this_machine().name], argument(target, token, found[0] if found else 0), deadline)
    channel = await_channel(target.pid, token, deadline, target.approved)
    if channel is None:
        raise AttachError(
            AttachCode.TIMEOUT,
            f"the new thread in process {target.pid} did not open its channel in time (is the process stopped?); "
            "the thread will end by itself; try again",
        )
    try:
        deliver(channel, target.pid, None if found else library().fd, deadline)
    except BaseException:
        let_go(channel)
        raise
    return stop, channel


def argument(target: TargetImage, token: int, serve: int = 0) -> bytes:
    """Packs the argument of collector_thread. serve: address of kc_serve if already loaded. Raises AttachError."""
    try:
        opens, finds = target.libc_symbol("dlopen"), target.libc_symbol("dlsym")
    except AttachError as exc:
        raise AttachError(
            AttachCode.UNSUPPORTED,
            f"process {target.pid} cannot load a library ({exc.reason}): it is linked statically. Link it dynamically, "
            "or trace its kernels with the vendor's tools",
        ) from exc
    return _ARGUMENT.pack(
        opens,
        finds,
        _optional(target, "dlerror"),
        *_detaching(target),
        serve,
        _WAIT_MS,
        b"kineto-%d-" % token,
        b"/proc/self/fd/",
        b"kc_serve",
    )


def _optional(target: TargetImage, name: str) -> int:
    with contextlib.suppress(AttachError):
        return target.libc_symbol(name)
    return 0


def _detaching(target: TargetImage) -> tuple[int, int]:
    """Returns pthread_self and pthread_detach: without both, the thread's stack stays when it ends."""
    both = _optional(target, "pthread_self"), _optional(target, "pthread_detach")
    return both if all(both) else (0, 0)


def deliver(channel: socket.socket, pid: int, library_fd: int | None, deadline: Deadline) -> None:
    """Sends the library (None: already loaded) and waits until it is served. Raises AttachError."""
    try:
        socket.send_fds(channel, [_PACKET], [] if library_fd is None else [library_fd], socket.MSG_NOSIGNAL)
        poller = select.poll()
        poller.register(channel, select.POLLIN)
        if not poller.poll(deadline.left_s * 1000):
            raise AttachError(
                AttachCode.TIMEOUT,
                f"process {pid} did not load the collector in time: is another of its threads loading a library? "
                "Try again",
            )
        answer = channel.recv(_MAX_ANSWER_BYTES)
    except OSError as exc:
        raise _ended(pid) from exc
    if not answer:
        raise _ended(pid)
    if answer.startswith(_REFUSED):
        words = "".join(char for char in answer[1:].decode("utf-8", "replace") if char.isprintable())
        raise AttachError(AttachCode.FAILED, f"process {pid} cannot load the collector: {words or 'no reason given'}")
    try:
        read_greeting(answer)
    except RemoteEnded as exc:
        raise AttachError(AttachCode.FAILED, f"process {pid}: {exc}") from exc


def _ended(pid: int) -> AttachError:
    if not Path(f"/proc/{pid}").exists():
        return AttachError(AttachCode.GONE, f"process {pid} ended while the collector was being loaded")
    return AttachError(
        AttachCode.FAILED,
        f"the collector in process {pid} is not responding: another kinetod is using it, or the process was forked "
        "from a traced process (CUPTI does not work after a fork)",
    )
