"""Descriptors that an agent has no business to pass: of every kind that the kernel has, and some that do not let go.

`strange(kind, arena)` gives one; `arena` is the content of a good arena, which those that are memory have.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import select
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

F_ADD_SEALS = 1033
SIZE_SEALS, WRITE_SEAL = 0x2 | 0x4, 0x8
LINGER_S = 600
_MEMFD_SECRET = 447
_LOOKUP, _GETATTR, _OPEN, _FLUSH, _INIT = 1, 3, 14, 25, 26
_ATTRIBUTES = struct.Struct("<6Q10I")


class SilentFile:
    """A file of a file system in user space (FUSE) that does not answer a close(2) before the end of the block."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._libc = folder, ctypes.CDLL(None, use_errno=True)
        self._device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = b"fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other" % self._device
        if self._libc.mount(b"silent", os.fsencode(folder), b"fuse", 0, options):
            raise OSError(ctypes.get_errno(), "mount")
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self.asked_to_close = threading.Event()
        self.fd = os.open(folder / "file", os.O_RDWR | os.O_CLOEXEC)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # ENODEV: it is unmounted
            while True:
                request = os.read(self._device, 1 << 18)
                _, operation, unique, node = struct.unpack_from("<IIQQ", request)
                if operation == _FLUSH:
                    self.asked_to_close.set()
                    continue
                body = self._answer(operation, node)
                error = 0 if body else -38  # ENOSYS
                os.write(self._device, struct.pack("<IiQ", 16 + len(body), error, unique) + body)

    @staticmethod
    def _answer(operation: int, node: int) -> bytes:
        mode = 0o40755 if node == 1 and operation == _GETATTR else 0o100666
        attributes = _ATTRIBUTES.pack(2, 0, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)
        return {
            _INIT: struct.pack("<4I2H2I2H8I", 7, 31, 65536, 0, 0, 0, 65536, 1, 0, 0, *[0] * 8),
            _LOOKUP: struct.pack("<4Q2I", 2, 0, 0, 0, 0, 0) + attributes,
            _GETATTR: struct.pack("<Q2I", 0, 0, 0) + attributes,
            _OPEN: struct.pack("<Q2I", 1, 0, 0),
        }.get(operation, b"")

    def end(self) -> None:
        """Aborts the file system: every close returns."""
        self._libc.umount2(os.fsencode(self._folder), 1 | 2)  # MNT_FORCE, MNT_DETACH
        self._thread.join()
        for descriptor in (self.fd, self._device):
            with contextlib.suppress(OSError):
                os.close(descriptor)


@contextlib.contextmanager
def silent_file() -> Iterator[SilentFile]:
    """A mounted one; needs root."""
    with tempfile.TemporaryDirectory(prefix="silent-") as folder:
        file = SilentFile(Path(folder))
        try:
            yield file
        finally:
            file.end()


def lingering() -> tuple[int, socket.socket]:
    """A TCP socket whose last close waits for LINGER_S, and its peer, which has to stay open for that."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    near.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            near.send(bytes(1 << 16))
    near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGER_S))
    return near.detach(), far


def pass_lingering(sock: socket.socket, packet: bytes) -> socket.socket:
    """Passes such a socket on, so that whoever lets go of it there waits; its peer, for the caller to close.

    From Linux 6.16 on, a socket may refuse it.
    """
    fd, far = lingering()
    try:
        socket.send_fds(sock, [packet], [fd])
    except PermissionError:
        far.close()
    os.close(fd)
    return far


def _memory(stack: contextlib.ExitStack, content: bytes, flags: int = 0, seals: int = SIZE_SEALS) -> int:
    fd = os.memfd_create("strange", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC | flags)
    stack.callback(os.close, fd)
    size = len(content) if not flags else -(-len(content) // (2 << 20)) * (2 << 20)
    os.ftruncate(fd, size)
    if flags:
        with contextlib.suppress(OSError), mmap.mmap(fd, size) as mapped:  # OSError: this host has no huge page free
            mapped[: len(content)] = content
    else:
        os.write(fd, content)
    fcntl.fcntl(fd, F_ADD_SEALS, seals)
    return fd


def _punched(stack: contextlib.ExitStack, content: bytes) -> int:
    fd = _memory(stack, content)
    ctypes.CDLL(None).fallocate(fd, 1 | 2, ctypes.c_long(4096), ctypes.c_long(len(content)))  # KEEP_SIZE, PUNCH_HOLE
    return fd


def _vast(stack: contextlib.ExitStack, content: bytes) -> int:
    fd = os.memfd_create("vast", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    stack.callback(os.close, fd)
    os.write(fd, content)
    os.ftruncate(fd, 1 << 50)
    fcntl.fcntl(fd, F_ADD_SEALS, SIZE_SEALS)
    return fd


def _secret(stack: contextlib.ExitStack, content: bytes) -> int:
    fd = ctypes.CDLL(None, use_errno=True).syscall(_MEMFD_SECRET, os.O_CLOEXEC)
    if fd < 0:  # this kernel has none
        return _memory(stack, content)
    stack.callback(os.close, fd)
    os.ftruncate(fd, len(content))
    return int(fd)


def _opened(stack: contextlib.ExitStack, path: str, flags: int) -> int:
    fd = os.open(path, flags | os.O_CLOEXEC)
    stack.callback(os.close, fd)
    return fd


def _read_only(stack: contextlib.ExitStack, content: bytes) -> int:
    return _opened(stack, f"/proc/self/fd/{_memory(stack, content)}", os.O_RDONLY)


def _in_tmpfs(stack: contextlib.ExitStack, content: bytes) -> int:
    path = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
    fd = _opened(stack, f"{path}/file", os.O_RDWR | os.O_CREAT)
    os.write(fd, content)
    return fd


def _lingers(stack: contextlib.ExitStack, _content: bytes) -> int:
    fd, far = lingering()
    stack.callback(far.close)  # what waits for it is reset then
    own = socket.socket(fileno=fd)

    def close() -> None:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
        own.close()

    stack.callback(close)
    return fd


def _silent(stack: contextlib.ExitStack, _content: bytes) -> int:
    return stack.enter_context(silent_file()).fd


def _made(make: Callable[[], int]) -> Callable[[contextlib.ExitStack, bytes], int]:
    def made(stack: contextlib.ExitStack, _content: bytes) -> int:
        fd = make()
        stack.callback(os.close, fd)
        return fd

    return made


KINDS: dict[str, Callable[[contextlib.ExitStack, bytes], int]] = {
    "huge pages": lambda stack, content: _memory(stack, content, os.MFD_HUGETLB),
    "punched": _punched,
    "write-sealed": lambda stack, content: _memory(stack, content, seals=SIZE_SEALS | WRITE_SEAL),
    "unsealed": lambda stack, content: _memory(stack, content, seals=0),
    "vast": _vast,
    "secret": _secret,
    "short": lambda stack, _content: _memory(stack, b"KINETOA1"),
    "read-only": _read_only,
    "tmpfs": _in_tmpfs,
    "lingering": _lingers,
    "silent": _silent,
    "pipe": lambda stack, _content: stack.enter_context(os.fdopen(os.pipe()[0], "rb")).fileno(),
    "event": _made(lambda: os.eventfd(0)),
    "poll": lambda stack, _content: stack.enter_context(select.epoll()).fileno(),
    "process": _made(lambda: os.pidfd_open(os.getpid())),
    "socket": lambda stack, _content: stack.enter_context(socket.socket(socket.AF_UNIX)).fileno(),
    **{
        path: lambda stack, _content, path=path, flags=flags: _opened(stack, path, flags)  # type: ignore[misc]
        for path, flags in (
            ("/tmp", os.O_RDONLY), ("/etc/passwd", os.O_PATH), ("/proc/self/mem", os.O_RDWR), ("/dev/null", os.O_RDWR),
            ("/dev/zero", os.O_RDWR), ("/dev/full", os.O_RDWR), ("/dev/ptmx", os.O_RDWR | os.O_NOCTTY),
        )
    },
}  # fmt: skip


@contextlib.contextmanager
def strange(kind: str, content: bytes) -> Iterator[int]:
    """One such descriptor, closed at the end."""
    with contextlib.ExitStack() as stack:
        yield KINDS[kind](stack, content)
