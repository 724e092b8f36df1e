"""A recording through the collector kit, for the sources of all vendors.

Theory of operation
    The C collector (agent/native/kit) does the work. A vendor's source decides whether and which copy of its library
    may be used in this process, and lists in a `Vendor` the known versions and the record kinds of each activity type;
    `prepare` does the rest. Vendor-specific work happens before that, or in a subclass of KitSession.
"""

import _thread
import time
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, NamedTuple, Optional, Tuple, Type

from kineto_agent.sources.interface import SourceCounts, SourceError, SourceOutcome, SourceRequest
from kineto_agent.sources.kit.limits import (
    BUFFER_BYTES,
    FLUSH_PERIOD_MS,
    GIVE_WAY_LIMIT_MS,
    PREFAULT_BYTES,
    STOP_LIMIT_MS,
    STRINGS_BYTES,
    stop_warnings,
)

if TYPE_CHECKING:
    from kineto_agent.sources.kit.kit_binding import KitCollector, KitResult
    from kineto_agent.sources.native_interface import EnableResult

_UNCOUNTED = (
    "%s lost an unknown number of records (buffers that did not fit into the arena: %d); use a larger "
    "--buffer-limit, or fewer --activities"
)


class Vendor(NamedTuple):
    """Facts about a vendor for the common part of the sources."""

    name: str  # name in the collector library ("pti"), or the path of a plug-in's shared library
    title: str  # of its library, for people: "PTI"
    code: str  # prefix of reason codes, "PTI": PTI_LIBRARY, PTI_FAILED, PTI_BUSY, PTI_FORKED, PTI_UNKNOWN_VERSION
    format: str  # of the records, as the daemon decodes them
    kinds: Mapping[str, Tuple[int, ...]]  # activity type -> kinds of records, in the order in which they are enabled
    releases: Optional[Mapping[int, str]] = None  # versions with known layouts; None: the vendor itself refuses others
    buffer_bytes: int = BUFFER_BYTES


def prepare(
    vendor: Vendor,
    path: str,
    request: SourceRequest,
    *,
    yields: bool,
    metadata: Optional[Mapping[str, Any]] = None,
    session: Optional[Type["KitSession"]] = None,
) -> "KitSession":
    """Open the vendor's library at `path` and create the arena. Raises SourceError.

    yields: it cannot run beside the program's own profiler. metadata: facts of the source's own. session: the class, a
    subclass of KitSession.
    """
    from kineto_agent.sources.kit.kit_binding import Kit, KitConfig

    collector = Kit.of_process().open(vendor.name, vendor.title, vendor.code, path)
    if vendor.releases is not None and collector.version not in vendor.releases:
        raise SourceError(vendor.code + "_UNKNOWN_VERSION", _unknown_version(vendor, collector.version, path))
    config = KitConfig(
        buffer_limit_bytes=request.buffer_limit_bytes,
        buffer_bytes=vendor.buffer_bytes,
        strings_bytes=STRINGS_BYTES,
        prefault_bytes=PREFAULT_BYTES,
        flush_period_ms=FLUSH_PERIOD_MS,
    )
    known = vendor.code.lower()
    facts = {known + "_version": collector.version, known + "_library": path, **collector.describe()}
    descriptor = collector.prepare(config, vendor.code)
    made = session or KitSession
    return made(vendor, collector, descriptor, {**facts, **(metadata or {})}, request, yields)


def _unknown_version(vendor: Vendor, version: int, path: str) -> str:
    releases = vendor.releases or {}
    known = ", ".join("%d (%s)" % (number, releases[number]) for number in sorted(releases))
    return (
        "%s is %s version %d, whose record layouts this agent does not know, so it is not used. Known versions: %s. "
        "Update kineto-agent and kinetod" % (path, vendor.title, version, known)
    )


class KitSession:
    """One recording of one vendor's activities."""

    def __init__(
        self,
        vendor: Vendor,
        collector: "KitCollector",
        arena_fd: int,
        metadata: Dict[str, Any],
        request: SourceRequest,
        yields: bool,
    ) -> None:
        self.format = vendor.format
        self.yields = yields
        self.arena_fd = arena_fd
        self.metadata = metadata
        self._vendor = vendor
        self._collector = collector
        self._types = {
            kind: name for name, kinds in vendor.kinds.items() if name in request.activity_types for kind in kinds
        }
        self._warnings: List[str] = []
        self._enable_ns = 0
        # The collector's functions run one at a time. A signal handler may enter on the same thread again.
        self._lock = _thread.RLock()
        self._begun = self._gave_way = self._closed = False
        self._stopped: Optional[KitResult] = None
        self._stop_limit_ms = 0

    def start(self) -> None:
        """Enable the activities. Raises SourceError if none of them works."""
        begin = time.perf_counter_ns()
        with self._lock:
            if self._gave_way:
                raise SourceError("USER_PROFILER_STARTED", "the program's own torch.profiler started")
            self._begun = True
            enabled = self._collector.start(list(self._types))
            if self._gave_way:  # in between, and that thread has not waited for us
                self._stop_collector(GIVE_WAY_LIMIT_MS)
        refused = {kind: result for kind, result in enabled.results.items() if result != 0}
        if enabled.code != 0:
            raise self._refusal(enabled, refused)
        for kind, result in sorted(refused.items()):
            self._warnings.append(
                "%s refused to record %s: %s"
                % (self._vendor.title, self._types[kind], self._collector.result_text(result))
            )
        self._enable_ns = time.perf_counter_ns() - begin

    def _refusal(self, enabled: "EnableResult", refused: Mapping[int, int]) -> SourceError:
        from kineto_agent.sources.kit.kit_binding import reason_code

        details = ["%s: %s" % (self._types[kind], self._collector.result_text(rc)) for kind, rc in refused.items()]
        return SourceError(reason_code(enabled.code, self._vendor.code), "; ".join([enabled.error, *details]))

    def give_way(self) -> None:
        """End the recording if it `yields`: the library then belongs to the program. Waits up to GIVE_WAY_LIMIT_MS for
        a start or stop; a start then gives way itself.
        """
        if not self.yields:
            return
        deadline = time.monotonic() + GIVE_WAY_LIMIT_MS / 1000
        if not self._lock.acquire(timeout=GIVE_WAY_LIMIT_MS / 1000):
            self._gave_way = True
            return
        try:
            if self._begun and not self._gave_way and not self._closed:
                self._stop_collector(max(int((deadline - time.monotonic()) * 1000), 1))
                self._stop_limit_ms = GIVE_WAY_LIMIT_MS
            self._gave_way = True
        finally:
            self._lock.release()

    def _stop_collector(self, limit_ms: int) -> "KitResult":
        if self._stopped is None:
            self._stop_limit_ms = limit_ms
            self._stopped = self._collector.stop(limit_ms)
        return self._stopped

    def counts(self) -> SourceCounts:
        """Records and bytes that the daemon can read so far."""
        with self._lock:
            counts = self._stopped.counts if self._stopped is not None else self._collector.counts()
        return SourceCounts(counts.records, counts.bytes, counts.dropped)

    def stop(self) -> SourceOutcome:
        """Make everything READY."""
        with self._lock:
            stopped = self._stop_collector(STOP_LIMIT_MS)
            text = self._collector.result_text
            self._warnings += stop_warnings(self._vendor.title, stopped, self._stop_limit_ms, 0, text)
            incomplete = "" if stopped.timed_out else self._collector.problem()
        if stopped.uncounted and not incomplete:
            incomplete = _UNCOUNTED % (self._vendor.title, stopped.uncounted)
        known = self._vendor.code.lower()
        return SourceOutcome(
            counts=SourceCounts(stopped.counts.records, stopped.counts.bytes, stopped.counts.dropped),
            metadata={known + "_enable_ns": self._enable_ns, known + "_flushes": stopped.flushes},
            warnings=self._warnings,
            detach_ns=0,
            cpu_ns=stopped.cpu_ns,
            incomplete=incomplete,
        )

    def close(self) -> None:
        """Free the arena."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._collector.close()
