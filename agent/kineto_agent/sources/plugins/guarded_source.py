"""A plug-in as an activity source: every call goes to its worker with a deadline, and every answer is checked.

Theory of operation
    Whatever a plug-in does becomes a SourceError with one of these codes (docs/errors.md), and the capture goes on
    without it:

        PLUGIN_DECLINED  it says itself that it cannot record, and why (it raised SourceError)
        PLUGIN_FAILED    it raised anything else, or its files cannot be executed
        PLUGIN_TIMEOUT   it did not return in time: it is given up in this process (worker.py)
        PLUGIN_INVALID   it returned what the interface does not allow

    Answers become plain values of ours on the worker's thread, because asking one of its objects anything runs its
    code. What only an arena can tell is taken from the arena: the daemon reads that, not what a plug-in says.

    The files are compiled and executed when the process first shows the plug-in's signs. Signs stay: a library that was
    loaded once is not expected to go away.
"""

import os
from typing import Any, Dict, FrozenSet, List, NamedTuple, Optional, Set

from kineto_agent.protocol.plugin_bundle import DETACH_FULL, DETACH_NEVER, Plugin, Signs
from kineto_agent.protocol.records import DECLARED_FORMAT
from kineto_agent.sources.arena_writer import close_left
from kineto_agent.sources.interface import SourceCounts, SourceError, SourceOutcome, SourceRequest
from kineto_agent.sources.plugins.arena_check import check_arena, counts_in
from kineto_agent.sources.plugins.namespace import Namespace
from kineto_agent.sources.plugins.signs import ProcessView, is_set
from kineto_agent.sources.plugins.worker import PluginLie, PluginWorker, plain_int, plain_json, plain_strings
from kineto_agent.system.debuglog import log
from kineto_agent.system.descriptors import NOBODY, close_ours, identity

# What is given up stays so: these are for a machine on which many more threads want a processor than there are.
LOAD_S = ASK_S = PREPARE_S = START_S = STOP_S = CLOSE_S = 5.0  # of a call; milliseconds are usual
GIVE_WAY_S = 1.0  # a thread of the program waits
_MAX_TYPES = 64
_MAX_METADATA_BYTES = 8 * 1024  # the schema comes beside it, and both fit into a frame
_MAX_WARNINGS = 16
_HOUR_NS = 3600 * 10**9
_TEXT_CHARS = 300
_IDLE = "the accelerator's library stays attached to the process, without recording"
_NEVER = "the accelerator's library goes on recording in the process: its plug-in cannot end that"


class PluginSource:
    """The source of one plug-in. Used by the agent's thread."""

    def __init__(self, plugin: Plugin, worker: Optional[PluginWorker] = None) -> None:
        self.plugin = plugin
        self.name = plugin.name
        self.declared_types = plugin.activity_types
        self.on_request: FrozenSet[str] = plugin.activity_types if plugin.detach == DETACH_NEVER else frozenset()
        self.worker = worker or PluginWorker(plugin.name)
        self._present = False
        self._source: Any = None
        self._broken: Optional[SourceError] = None  # why its files cannot be executed here
        self._trouble: Optional[SourceError] = None

    # ------------------------------------------------------------ what it could record

    def look(self, view: ProcessView) -> None:
        """Look for the accelerator in this process."""
        self._present = self._present or view.matches(self.plugin.signs)
        self.worker.interrupt()

    def activity_types(self) -> List[str]:
        """What it says to record now, if the accelerator is here and was started as it must be."""
        if not self._present or self._lacks_variable():
            return []
        try:
            types: List[str] = self._loaded(self._ask)
            self._trouble = None
        except SourceError as exc:
            self._trouble = exc
            return []
        return types

    def trouble(self, wanted: FrozenSet[str]) -> Optional[SourceError]:
        """Why it records nothing although the accelerator is here and a request wants it. wanted: empty: the defaults.

        Of the moment at which it was asked last.
        """
        asked = wanted & self.declared_types if wanted else self.declared_types - self.on_request
        return self._trouble if self._present and asked else None

    def needs_start(self) -> str:
        """What the process lacks to be recorded, for people; "" if nothing, or if it has no such accelerator."""
        if not self._present or not self._lacks_variable():
            return ""
        return "%s records only what was started with the variable %s" % (self.name, self.plugin.needs_from_start)

    def why_missing(self) -> str:
        """Why one of the declared types is not offered, for people."""
        if not self._present:
            return "%s finds no sign of its accelerator in this process (%s)" % (self.name, _words(self.plugin.signs))
        if self._trouble is not None:
            return "%s: %s" % (self.name, self._trouble.reason)
        return self.needs_start() or "%s does not offer it now" % self.name

    def _lacks_variable(self) -> bool:
        return bool(self.plugin.needs_from_start) and not is_set(self.plugin.needs_from_start)

    def _loaded(self, ask: Any) -> Any:
        if self._broken is not None:
            raise self._broken
        if self._source is None:
            try:
                self._source = self.worker.call("loading it", Namespace(self.plugin).source, LOAD_S)
                self.on_request |= self.worker.call("on_request", self._on_request, ASK_S)
            except SourceError as exc:
                self._broken, self._source = exc, None
                raise
        return self.worker.call("activity_types()", ask, ASK_S)

    def _on_request(self) -> FrozenSet[str]:
        named = plain_strings(getattr(self._source, "on_request", ()), _MAX_TYPES, "on_request")
        return frozenset(self._declared(named))

    def _ask(self) -> List[str]:
        return self._declared(plain_strings(self._source.activity_types(), _MAX_TYPES, "activity types"))

    def _declared(self, named: List[str]) -> List[str]:
        strange = sorted(set(named) - self.declared_types)
        if strange:
            raise PluginLie("returned the activity type %s, which its schema does not declare" % strange[0])
        return named

    # ------------------------------------------------------------ recording

    def would_yield(self, request: SourceRequest) -> bool:
        """As the plug-in declares."""
        return "torch" in self.plugin.conflicts

    def prepare(self, request: SourceRequest) -> "PluginSession":
        """Let the plug-in make its arena, and check that. Raises SourceError."""
        kind = PluginSession
        if "jax" in self.plugin.conflicts:
            from kineto_agent.sources.plugins.beside_jax import SessionBesideJax as kind
        session = kind(self.plugin, self.worker, self._source)
        session.prepare(request)
        return session


def _words(signs: Signs) -> str:
    kinds = ((kind.replace("_", " "), ", ".join(each)) for kind, each in signs._asdict().items() if each)
    return "; ".join("%s %s" % kind for kind in kinds)


class _Stopped(NamedTuple):
    """What stop() returned, as plain values."""

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
        self._failed: Optional[SourceError] = None  # while it gave way
        self._identity = NOBODY
        self.arena_fd = -1
        self.format = DECLARED_FORMAT
        self.yields = "torch" in plugin.conflicts
        self.metadata: Dict[str, Any] = {}

    def prepare(self, request: SourceRequest) -> None:
        """Raises SourceError; then nothing is left to close."""
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
                raise PluginLie("announced records of the format %.40r, not %s" % (session.format, DECLARED_FORMAT))
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
        """What its arena says to hold."""
        try:
            return counts_in(self.arena_fd)
        except (PluginLie, OSError) as exc:
            raise SourceError("PLUGIN_INVALID", "counts(): %s" % exc) from exc

    def stop(self) -> SourceOutcome:
        """End recording. Raises SourceError."""
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed
        found: _Stopped = self._worker.call("stop()", self._stop, STOP_S)
        self._started = False
        counts = self.counts()
        if found.counts[:2] != counts[:2]:
            reason = "stop(): said that it recorded %d records in %d bytes; its arena has %d in %d"
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
            raise PluginLie("returned %d counts, not records, bytes and dropped" % len(counts))
        incomplete = found.incomplete
        if type(incomplete) is not str:
            raise PluginLie("returned %.60r as `incomplete`, which is a text" % (incomplete,))
        return _Stopped(
            (counts[0], counts[1], counts[2]),
            plain_json(found.metadata, _MAX_METADATA_BYTES, "metadata"),
            plain_strings(found.warnings, _MAX_WARNINGS, "warnings"),
            min(plain_int(found.detach_ns, "detach_ns"), _HOUR_NS),
            min(plain_int(found.cpu_ns, "cpu_ns"), _HOUR_NS),
            incomplete[:_TEXT_CHARS],
        )

    def give_way(self) -> None:
        """The program's own torch.profiler begins. Never raises."""
        if self.yields:
            self.make_way()

    def make_way(self) -> None:
        """On the thread of the program that is about to begin its own profiler. Never raises."""
        try:
            self._worker.call("give_way()", self._session.give_way, GIVE_WAY_S)
        except SourceError as exc:
            self._failed = exc

    def close(self) -> None:
        """Let the plug-in free its arena. Raises SourceError."""
        try:
            if not self._worker.given_up:
                self._worker.call("close()", self._session.close, CLOSE_S)
        finally:
            self._end()

    def _end(self) -> None:
        _open.discard(self)
        # One that was given up may still write through its number, which must not become a file of the program's.
        if not self._worker.given_up and identity(self.arena_fd) == self._identity != NOBODY:
            log("plug-in %s has not closed its arena", self._plugin.name)
            close_left(self.arena_fd)
            close_ours(self.arena_fd, self._identity)
        self._worker.keep(False)

    def _undo(self) -> None:
        """On the worker's thread: a call has returned after it was given up."""
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
