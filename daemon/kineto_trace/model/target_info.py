"""The traced process and its recording, as described in target.json and at the head of a Chrome trace."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, Self, get_args, get_origin

from kineto_trace.base.atomic_files import write_atomically
from kineto_trace.base.quantities import shortened
from kineto_trace.base.visible_text import one_line
from kineto_trace.errors import SpoolError

TARGET_FILE = "target.json"
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1
MAX_SHOWN = 60  # characters of a text in its title
MAX_OFFSET_NS = 1 << 61  # times are moved by less than this, so that they stay in 64 bits
MAX_RATIO = 1e6  # of step times
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|\\|[\x00-\x1f]')
_WORD = re.compile(r"N/A|-?\bnan\b|-?\binf\b|\bNone\b")
_WORDS = {"N/A": '"N/A"', "nan": "NaN", "-nan": "NaN", "inf": "Infinity", "-inf": "-Infinity", "None": "null"}
MAX_BASE_NS = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetInfo:
    """What is known about the traced process. Times are Unix ns.

    pid is the number that the process itself sees.
    """

    capture_id: str
    host: str
    pid: int
    process_name: str
    command: list[str] = field(default_factory=list)
    job_id: str = ""  # from the launcher, such as Slurm
    rank: int | None = None
    world_size: int | None = None
    framework: str = ""
    python_version: str = ""
    window_start_ns: int = 0  # the trace covers this window only; both 0: keep everything
    window_end_ns: int = 0
    threads: dict[int, str] = field(default_factory=dict)  # system thread id -> name
    thread_use: list[dict[str, int]] = field(default_factory=list)  # structure/python_frames.py
    kernel_counters: dict[str, Any] = field(default_factory=dict)  # see model/kernel_counters.py; {}: not recorded
    settings: dict[str, bool | int | float | str] = field(default_factory=dict)  # of the program: "torch.num_threads"
    labels: dict[str, str] = field(default_factory=dict)
    resource: dict[str, str] = field(default_factory=dict)  # attributes by OpenTelemetry's names: pod, service, …
    trace_parent: str = ""  # W3C trace context in which the process was started; empty: none
    iterations: list[list[int]] = field(default_factory=list)  # [number, Unix ns at which it began], ascending
    iteration_thread: int = 0  # system thread id of the thread that steps; 0: unknown
    options: dict[str, bool | int] = field(default_factory=dict)  # of the capture, named as in the public `Options`
    activity_types: list[str] | None = None  # that were requested by name; []: the defaults; None: unknown
    not_recorded: dict[str, str] = field(default_factory=dict)  # type that could not be recorded -> why
    clock_offset_ns: int | None = None  # measured value to add to the host's times; None: not measured
    clock_uncertainty_ns: int | None = None  # maximum error of the offset, in either direction; None: unknown
    step_ratio: float = 0.0  # median iteration time while recording over that before it; 0: not measured
    least_step_ratio: float = 0.0  # lower limit of step_ratio, if the pace changed and that is 0; 0: not measured
    complete: bool = False  # whether the agent sent its Result

    def __repr__(self) -> str:
        return f"<TargetInfo of {self.title}>"

    @property
    def known_step_ratio(self) -> float:
        """Returns step_ratio, or its lower limit; 0 if neither was measured."""
        return self.step_ratio or self.least_step_ratio

    @property
    def title(self) -> str:
        """Returns rank, process and host in one short line, as far as they are known."""
        rank = "" if self.rank is None else f"rank {self.rank}"
        of_all = f" of {self.world_size}" if rank and self.world_size is not None else ""
        pid = f"pid {self.pid}" if self.pid else ""
        name = one_line(shortened(self.process_name, MAX_SHOWN))
        process = f"{name} ({pid})" if name and pid else name or pid
        host = f" on {one_line(shortened(self.host, MAX_SHOWN))}" if self.host else ""
        return ", ".join(filter(None, (rank + of_all, process + host))) or "an unknown process"

    def to_json(self) -> str:
        """Returns the info as one JSON object."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Parses what to_json returned. Unknown keys are skipped. Raises SpoolError."""
        try:
            values = json.loads(text)
            threads = {int(tid): str(name) for tid, name in values.get("threads", {}).items()}
        except (ValueError, AttributeError, RecursionError) as exc:
            raise SpoolError(f"{TARGET_FILE} does not describe a target: {exc}") from exc
        known = {entry.name: values[entry.name] for entry in fields(cls) if entry.name in values}
        _check(known)
        return cls(**{**known, "threads": threads})

    def write(self, target_dir: Path) -> None:
        """Replaces target.json in the target's folder."""
        write_atomically(target_dir / TARGET_FILE, self.to_json().encode())

    @classmethod
    def read(cls, target_dir: Path) -> Self:
        """Reads target.json of the target's folder. Raises SpoolError."""
        try:
            text = (target_dir / TARGET_FILE).read_bytes()
        except OSError as exc:
            raise SpoolError(f"cannot read {target_dir / TARGET_FILE}: {exc}") from exc
        return cls.from_json(text)


class RepairedJson(NamedTuple):
    """A JSON text, repaired if necessary, and its value."""

    text: str
    value: Any


def _check(values: Mapping[str, Any]) -> None:
    for name in ("capture_id", "host", "pid", "process_name"):
        if name not in values:
            raise SpoolError(f"{TARGET_FILE}: {name} is missing")
    for name, value in values.items():
        if not isinstance(value, _TYPES[name]) or not _ITEMS.get(name, _are_small)(value):
            raise SpoolError(f"{TARGET_FILE}: {name} has a wrong type: {value!r:.80}")


def _are_small(value: object) -> bool:
    """Returns whether the numbers fit into the columns that calculations use."""
    return not isinstance(value, int) or _LEAST <= value <= _MOST


def _are_texts(values: list[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _are_numbers(values: Mapping[str, Any]) -> bool:
    return all(isinstance(value, int) and _are_small(value) for value in values.values())


def raw_bytes(target_dir: Path) -> int:
    """Returns the size of all raw records of a target. Raises OSError."""
    paths = (path for pattern in ("raw/*", "raw/*/*") for path in target_dir.glob(pattern))
    return sum(path.stat().st_size for path in paths if path.is_file())


def repair_json(text: str) -> RepairedJson:
    """Returns a valid text unchanged, and any other with its escapes, control characters and words repaired.

    A text that cannot be repaired becomes a JSON string.
    """
    try:
        return RepairedJson(text, json.loads(text))
    except (ValueError, RecursionError):
        pass
    parts, at = [], 0
    for found in _STRING.finditer(text):
        parts += [_words(text[at : found.start()]), _ESCAPE.sub(_escaped, found[0])]
        at = found.end()
    better = "".join(parts) + _words(text[at:])
    try:
        return RepairedJson(better, json.loads(better))
    except (ValueError, RecursionError):
        return RepairedJson(json.dumps(text), text)


def _words(text: str) -> str:
    return _WORD.sub(lambda found: _WORDS[found[0]], text)


def _escaped(found: re.Match[str]) -> str:
    text = found[0]
    if text == "\\":
        return "\\\\"
    return text if text[0] == "\\" else f"\\u{ord(text):04x}"


def header_value(head: Mapping[str, str], name: str) -> Any:
    """Returns the value of a member; None if it is missing."""
    text = head.get(name)
    return None if text is None else repair_json(text).value


def base_ns(head: Mapping[str, str], notes: list[str]) -> int:
    """Returns the base of all event times (Unix ns); 0 if the file does not state it."""
    base = header_value(head, "baseTimeNanoseconds")
    if base is None:
        return 0
    if isinstance(base, float) and base.is_integer():
        base = int(base)
    if isinstance(base, bool) or not isinstance(base, int) or not 0 <= base < MAX_BASE_NS:
        notes.append(f"baseTimeNanoseconds is ignored as invalid ({str(base)[:40]}): times are those in the events")
        return 0
    return base


def _types(hint: Any) -> tuple[type, ...]:
    """Returns the types of the values that a field with this annotation accepts, whatever their items."""
    parts = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    found = tuple(get_origin(part) or part for part in parts)
    return (*found, int) if float in found else found


_TYPES = {entry.name: _types(entry.type) for entry in fields(TargetInfo)}
# Checks of the items in lists and objects. thread_use and kernel_counters are written back unchanged:
# their readers check them.
_ITEMS: dict[str, Callable[[Any], bool]] = {
    "command": _are_texts,
    "labels": lambda labels: _are_texts(list(labels.values())),
    "resource": lambda attributes: _are_texts(list(attributes.values())),
    "options": _are_numbers,
    "activity_types": lambda types: types is None or _are_texts(types),
    "not_recorded": lambda reasons: _are_texts(list(reasons.values())),
    "step_ratio": lambda ratio: 0 <= ratio < MAX_RATIO,  # not for NaN
    "least_step_ratio": lambda ratio: 0 <= ratio < MAX_RATIO,
    "settings": lambda settings: all(isinstance(value, (bool, int, float, str)) for value in settings.values()),
    "thread_use": lambda uses: all(isinstance(use, dict) and _are_numbers(use) for use in uses),
    "iterations": lambda starts: all(
        isinstance(start, list) and len(start) == 2 and all(type(each) is int and _are_small(each) for each in start)
        for start in starts
    ),
}
