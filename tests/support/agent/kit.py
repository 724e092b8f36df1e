"""Recording through the collector kit with the fake vendor in the test's own process."""

from __future__ import annotations  # the agent's tests run under 3.9

import ctypes
import functools
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from kineto_agent.protocol.records import HEADED_RECORD, KIND_TEXT
from kineto_agent.sources.interface import SourceRequest
from kineto_agent.sources.kit import kit_session
from kineto_agent.sources.kit.kit_session import KitSession, Vendor

from support.agent.arenas import ArenaReader, Buffer
from support.machine.native import fake_vendor

MIB = 1 << 20
KERNEL, CALL = 1, 6
NAMES = 16  # string space
FAKE_KERNEL = struct.Struct("<IIQQQQ24x")  # kind, stream, name, start, end, number
PATH = "/opt/fake/libfake.so"
_DEFAULTS = {"when_full": 2, "version": 7}
_FAULTS = (
    "refuse_kind", "start_fails", "open_fails", "by_text", "hold_a_buffer", "unreadable_names", "one_wide_kernel",
    "flush_delay_ms", "problem", "bad_name", "next_dropped",
)  # fmt: skip


class FakeVendor:
    """The made-up vendor, lending or pushing: program faults, launch kernels, read what it recorded."""

    def __init__(self, *, pushes: bool) -> None:
        self._code = "PUSHING" if pushes else "FAKE"
        self.path = fake_vendor(pushes=pushes)
        self._library = ctypes.CDLL(str(self.path))
        for name in ("written", "refused", "misused", "releases"):
            getattr(self._library, "fake_vendor_" + name).restype = ctypes.c_uint64

    def set(self, key: str, value: int) -> None:
        """Program a fault (the keys are in fake_vendor.h)."""
        if self._library.fake_vendor_set(key.encode(), ctypes.c_long(value)) != 0:
            raise KeyError(key)

    def launch(self, name: str = "kernel", count: int = 1, stream: int = 0) -> None:
        """Launches `count` kernels, with a call record each."""
        self._library.fake_vendor_launch(name.encode(), count, stream)

    @property
    def misused(self) -> int:
        """Calls of the vendor out of order, or in a forked child."""
        return int(self._library.fake_vendor_misused())

    @property
    def releases(self) -> int:
        """How many recordings were released."""
        return int(self._library.fake_vendor_releases())

    def vendor(self, releases: dict[int, str] | None = None) -> Vendor:
        """What a source says of it."""
        return Vendor(
            name=str(self.path),
            title="the fake",
            code=self._code,
            format="fake/1",
            kinds={"fake_kernel": (KERNEL,), "fake_call": (CALL,)},
            releases=releases,
            buffer_bytes=64 * 1024,
        )


@functools.cache
def _loaded(pushes: bool) -> FakeVendor:
    return FakeVendor(pushes=pushes)


def fake(*, pushes: bool = False, **faults: int) -> FakeVendor:
    """The process's fake vendor with exactly these faults."""
    loaded = _loaded(pushes)
    for key in _FAULTS:
        loaded.set(key, 0)
    for key, value in {**_DEFAULTS, **faults}.items():
        loaded.set(key, value)
    return loaded


def prepare(
    vendor: FakeVendor,
    types: tuple[str, ...] = ("fake_kernel", "fake_call"),
    *,
    limit_bytes: int = 16 * MIB,
    releases: dict[int, str] | None = None,
    yields: bool = True,
) -> KitSession:
    """A session that has not begun."""
    request = SourceRequest(frozenset(types), limit_bytes, {})
    return kit_session.prepare(vendor.vendor(releases), PATH, request, yields=yields, metadata={"own": "fact"})


@contextmanager
def recording(
    vendor: FakeVendor,
    types: tuple[str, ...] = ("fake_kernel", "fake_call"),
    *,
    limit_bytes: int = 16 * MIB,
    yields: bool = True,
) -> Iterator[tuple[KitSession, ArenaReader]]:
    """A started session and a daemon's view of its arena; closed in any case."""
    session = prepare(vendor, types, limit_bytes=limit_bytes, yields=yields)
    try:
        with ArenaReader(session.arena_fd) as reader:
            session.start()
            yield session, reader
    finally:
        session.close()


def headed(buffers: list[Buffer]) -> list[tuple[int, bytes]]:
    """The pushed records of buffers, with their kinds and padding; without texts."""
    found = []
    for buffer in buffers:
        at = 0
        while at < len(buffer.data):
            kind, size = HEADED_RECORD.unpack_from(buffer.data, at)
            if kind != KIND_TEXT:
                found.append((kind, buffer.data[at + HEADED_RECORD.size : at + size]))
            at += size
    return found
