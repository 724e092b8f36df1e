"""States, events and commands of the session. Times are Unix ns."""

import enum
from typing import NamedTuple, Optional, Tuple, Union

from kineto_agent.protocol import wire

TORCH_PROFILER = "the program's own torch.profiler"


class SessionState(enum.Enum):
    """Kineto's states; the values are those of `wire.State`."""

    WAIT_FOR_REQUEST = "WAIT_FOR_REQUEST"
    WARMUP = "WARMUP"
    COLLECT = "COLLECT"
    PROCESS = "PROCESS"


# ---------------------------------------------------------------- events


class Refusal(NamedTuple):
    """Why a request cannot be served, for programs and for people."""

    reason_code: str
    reason: str


class StartRequested(NamedTuple):
    """The daemon wants a capture. refusal: why no source can serve it, if the runner already knows."""

    request: wire.Start
    now_ns: int
    iteration: int  # -1: never stepped
    refusal: Optional[Refusal] = None
    profiler: Optional[Refusal] = None  # why the program's own profiler prevents it right now
    hooked_ns: int = 0  # since when torch's optimizers have been counted; 0: they are not
    step_ns: int = 0  # median of the latest iterations; 0: unknown


class SourcesStarted(NamedTuple):
    """At least one source records since now_ns; `iteration` is the one running then."""

    now_ns: int
    iteration: int


class SourcesFailed(NamedTuple):
    """No source records, or the agent itself failed."""

    now_ns: int
    reason_code: str
    reason: str


class ProfilerActive(NamedTuple):
    """Nothing was started: the program's own profiler warms up or records, and one of the sources conflicts with it."""

    now_ns: int
    reason: str


class ProfilerIdle(NamedTuple):
    """The program's own profiler, whose end was awaited, is idle; `iteration` is the one running now."""

    now_ns: int
    iteration: int


class SourcesGaveWay(NamedTuple):
    """A profiler of the program began at time_ns, and the sources that conflict with it have stopped."""

    time_ns: int
    who: str = TORCH_PROFILER  # for people


class Tick(NamedTuple):
    """The timer has expired."""

    now_ns: int
    stepped_ns: int = 0  # when the running iteration began; 0: never stepped


class Stepped(NamedTuple):
    """The watched iteration was reached. time_ns: when it began."""

    iteration: int
    time_ns: int


class CancelRequested(NamedTuple):
    """The daemon wants to end this capture."""

    capture_id: str
    keep_partial: bool
    now_ns: int


class SourcesStopped(NamedTuple):
    """Every source has stopped. gave_way_ns: when some stopped early for the program's own profiler; 0: none did."""

    now_ns: int
    gave_way_ns: int = 0
    gave_way_to: str = TORCH_PROFILER


class Released(NamedTuple):
    """The daemon has copied this capture."""

    capture_id: str


class LinkLost(NamedTuple):
    """The daemon is gone."""

    now_ns: int


class AgentEnding(NamedTuple):
    """The process exits (TARGET_EXITING) or stops its agent (AGENT_STOPPED)."""

    now_ns: int
    reason_code: str
    reason: str


Event = Union[
    StartRequested,
    SourcesStarted,
    SourcesFailed,
    ProfilerActive,
    ProfilerIdle,
    SourcesGaveWay,
    Tick,
    Stepped,
    CancelRequested,
    SourcesStopped,
    Released,
    LinkLost,
    AgentEnding,
]

# ---------------------------------------------------------------- commands


class StartSources(NamedTuple):
    """Prepare, announce and start the sources; answer SourcesStarted, SourcesFailed or ProfilerActive."""

    request: wire.Start


class StopSources(NamedTuple):
    """Stop the sources; answer SourcesStopped."""


class FreeSources(NamedTuple):
    """Close the arenas."""


class AwaitProfiler(NamedTuple):
    """Deliver a ProfilerIdle as soon as the program's own profiler is idle, unless FreeSources comes first."""


class SetTimer(NamedTuple):
    """Deliver a Tick at this time; None: deliver none."""

    deadline_ns: Optional[int]


class WatchStep(NamedTuple):
    """Deliver a Stepped as soon as this iteration is reached; None: deliver none."""

    iteration: Optional[int]


class ReportState(NamedTuple):
    """Reports a transition to the daemon."""

    capture_id: str
    state: SessionState
    time_ns: int


class Reject(NamedTuple):
    """Tells the daemon that this capture will not be made."""

    capture_id: str
    reason_code: str
    reason: str
    busy_capture_id: str = ""


class Conclude(NamedTuple):
    """Tells the daemon how the capture ended. Times are Unix ns; 0: never reached."""

    capture_id: str
    outcome: str  # done, partial, failed, cancelled
    reason_code: str
    reason: str
    requested_ns: int
    collecting_ns: int
    window_start_ns: int
    window_end_ns: int
    stopped_ns: int
    warnings: Tuple[str, ...]


Command = Union[
    StartSources, StopSources, FreeSources, AwaitProfiler, SetTimer, WatchStep, ReportState, Reject, Conclude
]
