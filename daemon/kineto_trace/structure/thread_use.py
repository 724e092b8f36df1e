"""What the sampled threads did: TargetInfo.thread_use, which a capture's decoder or a file's head gave, checked."""

from dataclasses import dataclass, fields

from kineto_trace.model.target_info import TargetInfo
from kineto_trace.model.trace import Trace

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


_NAMES = tuple(field.name for field in fields(ThreadUse))


def thread_use(target: TargetInfo) -> list[ThreadUse]:
    """Returns all sampled threads by CPU time; malformed entries are skipped."""
    found = []
    for entry in target.thread_use:
        values = {name: entry.get(name) for name in _NAMES} if isinstance(entry, dict) else {}
        if values and all(type(value) is int and 0 <= value < MAX_VALUE for value in values.values()):
            found.append(ThreadUse(**values))  # type: ignore[arg-type]
    return sorted(found, key=lambda use: (-use.cpu_ns, use.thread))


def is_native(use: ThreadUse) -> bool:
    """Tells whether no sample saw Python in this thread."""
    return use.python == 0


def window_ns(trace: Trace) -> int:
    """Returns the length of the window, at least 1."""
    return max(trace.window_end_ns - trace.window_start_ns, 1)
