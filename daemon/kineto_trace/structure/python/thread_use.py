"""What the sampled threads did: TargetInfo.thread_use, which a capture's decoder or a file's head gave, checked."""

from dataclasses import dataclass, fields

from kineto_trace.model.line_counts import WAITS
from kineto_trace.model.target_info import TargetInfo
from kineto_trace.model.trace import Trace
from kineto_trace.structure.recorded_time import recorded

MAX_VALUE = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadUse:
    """The use of one thread. samples: their number; python: with Python frames; has_gil: while it held the GIL."""

    thread: int
    samples: int
    python: int
    running: int
    waiting: int
    idle: int
    has_gil: int
    cpu_ns: int
    idle_sleep: int = 0  # as the columns of python_function; 0 in older traces
    idle_lock: int = 0
    idle_poll: int = 0
    idle_io: int = 0
    idle_child: int = 0
    idle_driver: int = 0
    idle_memory: int = 0
    ready: int = 0
    collecting: int = 0


_NAMES = tuple(field.name for field in fields(ThreadUse))


def thread_use(target: TargetInfo) -> list[ThreadUse]:
    """Returns all sampled threads by CPU time; malformed entries are skipped."""
    found = []
    for entry in target.thread_use:
        values = (
            {name: entry.get(name, 0 if name in WAITS else None) for name in _NAMES} if isinstance(entry, dict) else {}
        )
        if values and all(type(value) is int and 0 <= value < MAX_VALUE for value in values.values()):
            found.append(ThreadUse(**values))  # type: ignore[arg-type]
    return sorted(found, key=lambda use: (-use.cpu_ns, use.thread))


def is_native(use: ThreadUse) -> bool:
    """Tells whether no sample saw Python in this thread."""
    return use.python == 0


def window_ns(trace: Trace) -> int:
    """Returns the length of the window as far as stacks were recorded, at least 1."""
    return max(recorded(trace, ("python_function",)).length(), 1)
