"""One recording of a plug-in: its calls go to the plug-in's worker, and its answers are checked (guarded_source.py)."""

import contextlib
import fcntl
import os
import struct
from typing import Any, Dict, List, NamedTuple, Optional, Set

from kineto_agent.protocol import arena
from kineto_agent.protocol.plugin_bundle import DETACH_FULL, DETACH_NEVER, Plugin
from kineto_agent.protocol.records import DECLARED_FORMAT
from kineto_agent.sources.arena_writer import close_left
from kineto_agent.sources.interface import SourceCounts, SourceError, SourceOutcome, SourceRequest
from kineto_agent.sources.plugins.worker import (
    CLOSE_S,
    GIVE_WAY_S,
    GIVE_WAY_WAIT_S,
    PREPARE_S,
    START_S,
    STOP_S,
    Call,
    PluginViolation,
    PluginWorker,
    plain_int,
    plain_json,
    plain_strings,
)
from kineto_agent.system.debuglog import log
from kineto_agent.system.descriptors import NOBODY, close_ours, identity

_MAX_METADATA_BYTES = 8 * 1024  # together with the schema it must fit into a frame
_MAX_WARNINGS = 16
_HOUR_NS = 3600 * 10**9
_TEXT_CHARS = 300
_IDLE = "the accelerator's library stays attached to the process, without recording"
_NEVER = "the accelerator's library keeps recording in the process: its plug-in cannot stop it"
_F_GET_SEALS = 1034  # Linux; named in fcntl only if its headers had it when Python was built
_SIZE_SEALS = 0x2 | 0x4  # F_SEAL_SHRINK, F_SEAL_GROW
_MAX_BUFFERS = 1 << 16
_MAX_BUFFER_BYTES = 64 << 20
_SLACK_BYTES = 64 << 20  # for the header, strings, and the minimum buffers that a collector needs
_COUNTS = struct.Struct("=QQQ")  # at arena.RECORDS


class _Stopped(NamedTuple):
    """The result of stop() as plain values."""

    counts: "tuple[int, int, int]"
    metadata: Dict[str, Any]
    warnings: List[str]
    detach_ns: int
    cpu_ns: int
    incomplete: str


class PluginSession:
    """One recording of a plug-in."""

    def __init__(self, plugin: Plugin, worker: PluginWorker, source: Any) -> None:
        self._plugin = plugin
        self._worker = worker
        self._source = source
        self._session: Any = None
        self._started = False
        self._giving_way: Optional[Call] = None
        self._identity = NOBODY
        self.arena_fd = -1
        self.format = DECLARED_FORMAT
        self.yields = "torch" in plugin.conflicts
        self.metadata: Dict[str, Any] = {}

    def prepare(self, request: SourceRequest) -> None:
        """Create the arena. Raises SourceError; then nothing is left to close."""
        self._worker.keep(True)
        self._worker.late = self._undo
        try:
            prepared = self._worker.call("prepare()", lambda: self._prepare(request), PREPARE_S)
        except SourceError:
            self._end()
            raise
        self.arena_fd, self.metadata = prepared
        self._identity = identity(self.arena_fd)
        _open.add(self)

    def _prepare(self, request: SourceRequest) -> Any:
        session = self._source.prepare(request)
        try:
            arena_fd = check_arena(session.arena_fd, request.buffer_limit_bytes)
            if session.format != DECLARED_FORMAT:
                raise PluginViolation(
                    "announced records of the format %.40r, not %s" % (session.format, DECLARED_FORMAT)
                )
            metadata = plain_json(session.metadata, _MAX_METADATA_BYTES, "metadata")
        except BaseException:
            session.close()
            raise
        self._session = session
        return arena_fd, {"way": "by the plug-in %s" % self._plugin.name, **metadata, "schema": self._plugin.schema}

    def start(self) -> None:
        """Begin to record. Raises SourceError."""
        self._started = True
        self._worker.call("start()", self._start, START_S)

    def _start(self) -> None:
        self._session.start()

    def counts(self) -> SourceCounts:
        """The counts in its arena."""
        try:
            return counts_in(self.arena_fd)
        except (PluginViolation, OSError) as exc:
            raise SourceError("PLUGIN_INVALID", "counts(): %s" % exc) from exc

    def stop(self) -> SourceOutcome:
        """End recording. Raises SourceError."""
        giving_way, self._giving_way = self._giving_way, None
        if giving_way is not None:
            self._worker.result(giving_way, "give_way()", GIVE_WAY_S)
        found: _Stopped = self._worker.call("stop()", self._stop, STOP_S)
        self._started = False
        counts = self.counts()
        if found.counts[:2] != counts[:2]:
            reason = "stop(): reported %d records in %d bytes, but its arena has %d in %d"
            raise SourceError("PLUGIN_INVALID", reason % (*found.counts[:2], *counts[:2]))
        warnings = found.warnings
        if self._plugin.detach != DETACH_FULL:
            warnings = [*warnings, _NEVER if self._plugin.detach == DETACH_NEVER else _IDLE]
        named = ["%s: %s" % (self._plugin.name, warning) for warning in warnings]
        return SourceOutcome(counts, found.metadata, named, found.detach_ns, found.cpu_ns, found.incomplete)

    def _stop(self) -> _Stopped:
        found = self._session.stop()
        counts = [plain_int(each, "a count") for each in found.counts]
        if len(counts) != len(SourceCounts._fields):
            raise PluginViolation("returned %d counts; expected records, bytes and dropped" % len(counts))
        incomplete = found.incomplete
        if type(incomplete) is not str:
            raise PluginViolation("returned %.60r as `incomplete`, which must be a string" % (incomplete,))
        return _Stopped(
            (counts[0], counts[1], counts[2]),
            plain_json(found.metadata, _MAX_METADATA_BYTES, "metadata"),
            plain_strings(found.warnings, _MAX_WARNINGS, "warnings"),
            min(plain_int(found.detach_ns, "detach_ns"), _HOUR_NS),
            min(plain_int(found.cpu_ns, "cpu_ns"), _HOUR_NS),
            incomplete[:_TEXT_CHARS],
        )

    def give_way(self) -> None:
        """Yield to the program's own torch.profiler. Never raises."""
        if self.yields:
            self.make_way()

    def make_way(self) -> None:
        """Yield on the thread of the program that is about to begin its own profiler. Never raises."""
        with contextlib.suppress(SourceError):  # it has been abandoned: stop() reports that
            self._giving_way = self._worker.begin(self._session.give_way)
            self._giving_way.wait(GIVE_WAY_WAIT_S)

    def close(self) -> None:
        """Let the plug-in free its arena. Raises SourceError."""
        try:
            if not self._worker.given_up:
                self._worker.call("close()", self._session.close, CLOSE_S)
        finally:
            self._end()

    def _end(self) -> None:
        _open.discard(self)
        # An abandoned plug-in may still write through its number, which must not become a file of the program.
        if not self._worker.given_up and identity(self.arena_fd) == self._identity != NOBODY:
            log("plug-in %s did not close its arena", self._plugin.name)
            close_left(self.arena_fd)
            close_ours(self.arena_fd, self._identity)
        self._worker.keep(False)

    def _undo(self) -> None:
        """Undo, on the worker's thread, a call that returned after it was abandoned."""
        session, self._session = self._session, None
        if session is None:
            return
        try:
            if self._started:
                session.stop()
        finally:
            session.close()


_open: "Set[PluginSession]" = set()


def _close_all_in_child() -> None:
    for session in list(_open):
        close_ours(session.arena_fd, session._identity)
    _open.clear()


os.register_at_fork(after_in_child=_close_all_in_child)


def check_arena(descriptor: object, limit_bytes: int) -> int:
    """Return the descriptor, if it is an arena's within twice the limit. Raises PluginViolation, OSError."""
    if type(descriptor) is not int or descriptor <= 2:
        raise PluginViolation("announced %.40r, which cannot be its arena's descriptor" % (descriptor,))
    try:
        seals = fcntl.fcntl(descriptor, _F_GET_SEALS)
    except OSError as exc:
        raise PluginViolation("announced descriptor %d, which is not a memfd" % descriptor) from exc
    if seals & _SIZE_SEALS != _SIZE_SEALS:
        raise PluginViolation("announced memory whose size is not sealed")
    size = os.fstat(descriptor).st_size
    if size < arena.HEADER_BYTES or size > 2 * limit_bytes + _SLACK_BYTES:
        raise PluginViolation("announced %d bytes of memory; the buffer limit is %d" % (size, limit_bytes))
    _check_header(os.pread(descriptor, arena.FIXED.size, 0), size)
    return descriptor


def _check_header(header: bytes, size: int) -> None:
    found = dict(zip(arena.FIXED_FIELDS, arena.FIXED.unpack(header)))
    count, buffer_bytes, strings = found["buffer_count"], found["buffer_bytes"], found["strings_offset"]
    descriptors, buffers = found["descriptors_offset"], found["buffers_offset"]
    good = (
        found["magic"] == arena.MAGIC
        and found["header_bytes"] == arena.HEADER_BYTES
        and found["total_bytes"] == size
        and 0 < count <= _MAX_BUFFERS
        and 0 < buffer_bytes <= _MAX_BUFFER_BYTES
        and arena.HEADER_BYTES <= descriptors <= descriptors + count * arena.DESCRIPTOR_BYTES <= strings
        and strings + found["strings_bytes"] <= buffers <= buffers + count * buffer_bytes <= size
        and not (descriptors % 8 or strings % 8 or buffers % 8)
    )
    if not good:
        raise PluginViolation("announced memory without an arena's header")


def counts_in(descriptor: int) -> SourceCounts:
    """Read the counts from the arena itself. Raises PluginViolation, OSError."""
    records, dropped, size = _COUNTS.unpack(os.pread(descriptor, _COUNTS.size, arena.RECORDS))
    if max(records, dropped, size) >= 1 << 63 or records > size:
        text = "left impossible counts in its arena: %d records in %d bytes, %d dropped"
        raise PluginViolation(text % (records, size, dropped))
    return SourceCounts(records, size, dropped)
