"""The interface of activity sources: the values, errors and protocols that every source implements.

A source is one vendor's or language's way to record activities. The runner (the agent's one thread) calls

    activity_types() -> prepare(request) -> session.start() -> session.counts()* -> session.stop() -> session.close()

in this order, all on the agent's thread. Nothing here may print, raise into user code, or hold the GIL for
more than a millisecond at a time. A session records from start() on; the runner decides later which window
is kept, so a source need not know about warm-up.

One call comes from another thread: session.give_way(), on the thread of the program that is about to start its own
torch.profiler, at any time from start() on, even while stop() or close() runs. A session that cannot run beside that
profiler (`yields`) stops for good there; the others do nothing. control/recording.py calls it.

A session whose vendor library another user may take over has one more method, taken(), for the agent's thread: the user
who has taken it over, or None. After a takeover the recording has already ended, and stop() returns what was recorded.

A source that knows why it does not offer types of its own has why_not(missing): the reason, or "" if it has none or
the missing types are not its own. Cheap, without side effects.

In a forked child a source is not called: it releases inherited descriptors and mappings by itself, without touching a
vendor library.
"""

from typing import Any, Callable, Dict, FrozenSet, List, NamedTuple, Protocol

PROFILER_OPTIONS = ("with_flops",)  # only torch's own profiler can record these
# Option that the daemon adds to a request: the program's file whose device code launches CUDA graphs.
DEVICE_GRAPHS = "device_graphs"


class SourceError(Exception):
    """A source cannot record. reason_code is for programs (docs/errors.md), the message for people."""

    def __init__(self, reason_code: str, reason: str) -> None:
        super().__init__(reason)
        self.reason_code = reason_code
        self.reason = reason


# Reports, on the agent's thread, a call into a vendor's library that may block for long: its name, and a function that
# returns since when it has been blocked (Unix ns; 0: it has returned). The function is polled until the call returns.
TellCall = Callable[[str, Callable[[], int]], None]


class SourceRequest(NamedTuple):
    """Specifies what one session should record."""

    activity_types: FrozenSet[str]  # the wanted ones among activity_types(); empty: only what options ask for
    buffer_limit_bytes: int  # limit for the arena's buffers
    options: Dict[str, Any]  # wire.Start.options
    named: bool = True  # the user named these types; False: they are the source's defaults
    gpu_drain_ms: int = 300  # wire.Start.gpu_drain_ms
    tell_call: TellCall = lambda _call, _since_ns: None


class SourceCounts(NamedTuple):
    """Records and bytes in READY buffers so far, and records known to be lost."""

    records: int
    bytes: int
    dropped: int


class SourceOutcome(NamedTuple):
    """Result of stop(). Every buffer with records is READY now."""

    counts: SourceCounts
    metadata: Dict[str, Any]  # JSON; joined to the session's metadata
    warnings: List[str]  # for the user, e.g. "stayed attached to CUPTI: …"
    detach_ns: int  # time from requesting the detach to its completion; 0: not detached, or nothing to detach
    cpu_ns: int  # CPU time of the source's own threads
    incomplete: str = ""  # why less was recorded than requested; the capture is then PARTIAL


class Takeover(NamedTuple):
    """Another user in the program has taken what a session needs; the session had ended before that."""

    time_ns: int  # Unix
    who: str  # for people: "xla_cuda_plugin.so"
    profiler: str = ""  # likewise, if known: "the program's own jax.profiler"


class SourceSession(Protocol):
    """One recording.

    It may also have hurry(): the process exits, so stop() skips work that only matters if the process continues.
    """

    arena_fd: int  # a sealed memfd laid out as kineto_agent.protocol.arena says; owned by the session
    format: str  # one of kineto_agent.protocol.records
    metadata: Dict[str, Any]  # JSON; known before the first record (versions, devices, …)
    yields: bool  # it cannot run beside the program's own torch.profiler, which takes precedence

    def start(self) -> None:
        """Begin to record. Raises SourceError; then close() must still be called."""

    def counts(self) -> SourceCounts:
        """Counts so far. Cheap; callable at any time between start() and close()."""

    def stop(self) -> SourceOutcome:
        """End recording and make everything READY, within about two seconds or as long as the daemon keeps copying.

        Raises SourceError if it can deliver nothing; the capture is PARTIAL then.
        """

    def give_way(self) -> None:
        """Yield to the program's own torch.profiler, which starts as soon as this returns: with `yields`, stop within
        about 100 ms.

        Called on any thread. The records are kept for stop(), which must no longer touch the vendor's library or
        torch's profiler: they now belong to the program. A later start() raises SourceError. Waits for a start() or
        stop() in progress, but not for long: that one then gives way itself. Never raises.
        """

    def close(self) -> None:
        """Free the arena. Called once the daemon has copied it or is gone."""


class Source(Protocol):
    """A way to record activities in this process.

    A source may also have last_resort(): the activity types that it leaves to any other source that offers them.
    """

    name: str

    @property
    def on_request(self) -> FrozenSet[str]:
        """Activity types that are recorded only if named, because they cost the target much."""

    def activity_types(self) -> List[str]:
        """Kineto's names of the types that can be recorded now; empty if none. Cheap, without side effects."""

    def would_yield(self, request: SourceRequest) -> bool:
        """Whether the session for this request will have `yields`. Cheap, without side effects."""

    def prepare(self, request: SourceRequest) -> SourceSession:
        """Create the arena and check that recording can start. Raises SourceError."""
