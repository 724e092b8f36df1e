"""The kernel's counters of the process while it was recorded: TargetInfo.kernel_counters.

Theory of operation
    The daemon reads the kernel's counters some ten times a second (kinetod/captures/target/target_description.py). Two
    consecutive readings bound an interval: interval k lies between times[k] and times[k + 1], and all figures are
    differences over it. A thread that neither ran nor waited for a CPU in an interval has no row for it.

    The rest of an interval, duration - cpu_ns - wait_ns, is the time in which the thread was blocked: it slept, or
    waited for a lock, data, a device or another process. Where a thread began or ended within the interval (`lives`),
    the rest is unknown.

    Traces may come from anywhere: `parse` returns None for values that `to_json` cannot have written.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from kineto_trace.base.array_types import Ints

UNKNOWN = -1
MAX_VALUES = 1 << 20
_MAX_NUMBER = 1 << 62
_ROWS = ("interval", "thread", "cpu_ns", "wait_ns", "switches")
_LIVES = ("thread", "first_ns", "last_ns")
_EVENTS = ("thread", "voluntary_switches", "involuntary_switches", "minor_faults", "major_faults")
_CHILDREN = ("pid", "first_ns", "last_ns", "cpu_ns", "wait_ns", "major_faults", "read_bytes")
PROCESS = (
    "cpu_ns",
    "minor_faults",
    "major_faults",
    "read_bytes",
    "written_bytes",
    "read_chars",
    "written_chars",
    "quota_periods",
    "throttled_periods",
    "throttled_ns",
    "host_busy_ns",
)
_NEIGHBOURS = ("pid", "cpu_ns")
_GROUPS = {
    "rows": _ROWS,
    "events": _EVENTS,
    "lives": _LIVES,
    "process": PROCESS,
    "children": _CHILDREN,
    "neighbours": _NEIGHBOURS,
}
_ADDED: dict[str, dict[str, list[int]]] = {"neighbours": {name: [] for name in _NEIGHBOURS}}  # older traces lack these


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCounters:
    """Counters by interval. rows: one value per interval and thread that ran or waited for a CPU.

    - times: Unix ns of the readings, ascending; one more than intervals.
    - rows: interval; thread (system thread id); cpu_ns; wait_ns: time in which it was ready but waited for a CPU;
      switches: how often it was put on a CPU.
    - events: per thread that lived at the last reading, over all intervals: switches and page faults.
    - lives: threads missing from some readings: when they were seen first and last, Unix ns.
    - process: by name of PROCESS, one value per interval; UNKNOWN if it could not be read. read_bytes and written_bytes
      are transfers from and to storage, read_chars and written_chars those of calls, including from memory.
    - children: per child process, such as a DataLoader's worker, its use between two readings, first_ns and last_ns
      (Unix); pid is the daemon's number; child_names: the kernel's.
    - neighbours: per other process of the same user, such as another job, its CPU time between the first and the last
      reading; only those that used some. neighbour_names: the kernel's.
    - host_cores, usable_cores (affinity), quota_cores (of the tightest control group; 0 for no quota): may be UNKNOWN.
    """

    times: Ints
    rows: Mapping[str, Ints]
    events: Mapping[str, Ints]
    lives: Mapping[str, Ints]
    process: Mapping[str, Ints]
    children: Mapping[str, Ints]
    child_names: tuple[str, ...]
    neighbours: Mapping[str, Ints] = field(default_factory=lambda: dict.fromkeys(_NEIGHBOURS, np.empty(0, np.int64)))
    neighbour_names: tuple[str, ...] = ()
    host_cores: int = UNKNOWN
    usable_cores: int = UNKNOWN
    quota_cores: float = 0.0
    quota_group: str = ""
    notes: tuple[str, ...] = field(default=())

    @property
    def duration_ns(self) -> int:
        """Returns the time between the first and the last reading."""
        return int(self.times[-1] - self.times[0])

    def life_of(self) -> dict[int, tuple[int, int]]:
        """Returns when the threads of `lives` were seen first and last."""
        lives = (self.lives[name].tolist() for name in _LIVES)
        return {thread: (first, last) for thread, first, last in zip(*lives, strict=True)}

    def process_total(self, name: str) -> int | None:
        """Returns one of PROCESS over all intervals; None if a part of it is unknown."""
        values = self.process[name]
        return int(values.sum()) if len(values) and int(values.min()) >= 0 else None

    def by_thread(self) -> dict[int, tuple[int, int, int]]:
        """Returns (cpu_ns, wait_ns, switches) of each thread over all intervals."""
        threads, place = np.unique(self.rows["thread"], return_inverse=True)
        sums = [_sums(place.reshape(-1), self.rows[name], len(threads)) for name in ("cpu_ns", "wait_ns", "switches")]
        return dict(zip(threads.tolist(), zip(*sums, strict=True), strict=True))

    def to_json(self) -> dict[str, Any]:
        """Returns plain values, as in TargetInfo.kernel_counters."""
        return {
            "times": self.times.tolist(),
            **{
                group: {name: getattr(self, group)[name].tolist() for name in names} for group, names in _GROUPS.items()
            },
            "child_names": list(self.child_names),
            "neighbour_names": list(self.neighbour_names),
            "host_cores": self.host_cores,
            "usable_cores": self.usable_cores,
            "quota_cores": self.quota_cores,
            "quota_group": self.quota_group,
            "notes": list(self.notes),
        }

    @classmethod
    def parse(cls, found: Mapping[str, Any]) -> Self | None:
        """Returns the counters of TargetInfo.kernel_counters; None if there are none, or they are not valid."""
        times = _ints(found.get("times"))
        names, others = _texts(found.get("child_names")), _texts(found.get("neighbour_names"))
        columns = {group: _columns(found.get(group, _ADDED.get(group)), names) for group, names in _GROUPS.items()}
        groups = {group: known for group, known in columns.items() if known is not None}
        if times is None or len(groups) < len(_GROUPS) or len(times) < 2:
            return None
        rows, process, children = groups["rows"], groups["process"], groups["children"]
        if len(others) != len(groups["neighbours"]["pid"]):
            return None
        if len(names) != len(children["pid"]) or (children["last_ns"] <= children["first_ns"]).any():
            return None
        intervals = len(times) - 1
        inside = (rows["interval"] >= 0) & (rows["interval"] < intervals)
        if not inside.all() or len(process["cpu_ns"]) != intervals or (np.diff(times) <= 0).any():
            return None
        quota, group = found.get("quota_cores"), found.get("quota_group")
        return cls(
            times=times,
            **groups,
            child_names=names,
            neighbour_names=others,
            host_cores=_core_count(found.get("host_cores")),
            usable_cores=_core_count(found.get("usable_cores")),
            quota_cores=float(quota) if isinstance(quota, (int, float)) and 0 < quota < 1e6 else 0.0,
            quota_group=group if isinstance(group, str) else "",
            notes=_texts(found.get("notes")),
        )


def _sums(place: Ints, values: Ints, count: int) -> list[int]:
    sums = np.zeros(count, np.int64)
    np.add.at(sums, place, values)
    return [int(value) for value in sums]


def _texts(found: Any) -> tuple[str, ...]:
    return tuple(text for text in found if isinstance(text, str)) if isinstance(found, list) else ()


def _core_count(value: Any) -> int:
    return value if type(value) is int and 0 < value < 1 << 20 else UNKNOWN


def _columns(found: Any, names: tuple[str, ...]) -> dict[str, Ints] | None:
    """Returns columns of one length; None if the value is something else."""
    columns = {name: _ints(found.get(name)) for name in names} if isinstance(found, dict) else {}
    checked = {name: column for name, column in columns.items() if column is not None}
    same = len({len(column) for column in checked.values()}) == 1
    return checked if same and len(checked) == len(names) else None


def _ints(values: Any) -> Ints | None:
    if not isinstance(values, list) or len(values) > MAX_VALUES:
        return None
    if not all(type(value) is int and UNKNOWN <= value < _MAX_NUMBER for value in values):
        return None
    return np.array(values, np.int64)
