"""Kineto's configuration: its keys, what each means in Kineto, and its effect here. Pure.

Theory of operation
    The text has the format of /etc/libkineto.conf and of Dynolog's requests: one KEY=VALUE per line, and comments from
    a # to the end of the line. The rules are those of libkineto: exactly one = in a line, booleans n/y, no/yes, f/t,
    false/true, 0/1 in any case, whole numbers of 0 or more, comma-separated lists. A value that breaks them is an
    error; an unknown key is only a warning, because it may be a newer one.

    `KEYS` maps every key to the field that its value sets, and to a factor. Keys with the same field are names
    or units of the same thing, and the last one takes precedence. A key without a field has no effect here, and
    its row says why. `request` turns the fields into the request of a capture.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1
MS = 10**6  # ns
S = 10**9  # ns
DEFAULT_DURATION_NS = 500 * MS  # Kineto's
DEFAULT_SNAPSHOT_NS = 1000 * MS  # Kineto's
MAX_START_TIME_AGE_NS = 10 * S  # a start time that is older is an error, as in Kineto
MEMORY_SNAPSHOT = "memory_snapshot"
_BOOLEANS = {"n": False, "no": False, "f": False, "false": False, "0": False}
_BOOLEANS |= {"y": True, "yes": True, "t": True, "true": True, "1": True}
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_INLINE = re.compile(r"\s*[A-Za-z_][A-Za-z0-9_]*\s*=")
_NEXT_SETTING = re.compile(r",(?=\s*[A-Z][A-Z0-9_]*\s*=)")


class KinetoConfigError(ValueError):
    """The configuration cannot be used; the message says where and why."""


class Type(Enum):
    """The type of a value."""

    BOOL = "bool"
    INT = "int"
    INT64 = "int64"
    LIST = "list"
    TEXT = "text"


class Effect(Enum):
    """Whether a key has an effect here."""

    USED = "used"
    NONE = "no effect"
    LEGACY = "legacy"  # Kineto itself now ignores it, or has renamed it


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigKey:
    """One key. meaning: in Kineto; here: its effect, for people; field: set to its value, times factor."""

    name: str
    kind: Type
    effect: Effect
    meaning: str
    here: str
    field: str = ""
    factor: int = 1


def _used(name: str, kind: Type, target: str, meaning: str, here: str, factor: int = 1) -> ConfigKey:
    return ConfigKey(name=name, kind=kind, effect=Effect.USED, meaning=meaning, here=here, field=target, factor=factor)


def _without_effect(name: str, kind: Type, meaning: str, why: str) -> ConfigKey:
    return ConfigKey(name=name, kind=kind, effect=Effect.NONE, meaning=meaning, here=why)


def _renamed(name: str, kind: Type, target: str, now: str) -> ConfigKey:
    return ConfigKey(
        name=name, kind=kind, effect=Effect.LEGACY, meaning=f"old name of {now}", here=f"use {now}", field=target
    )


def _gone(name: str, meaning: str) -> ConfigKey:
    why = "Kineto has removed it"
    return ConfigKey(name=name, kind=Type.TEXT, effect=Effect.LEGACY, meaning=meaning, here=why)


_EVENTS = "counters of the event profiler"
_OVER_TIME = "hardware counters are sampled over time, not by kernel"
_NO_POLL = "the daemon is always connected: there is no polling and no datagram socket"
_ROWS = (
    _used("ACTIVITIES_ENABLED", Type.BOOL, "enabled", "activity tracing on", "false refuses the capture"),
    _used("ACTIVITY_TYPES", Type.LIST, "activities", "what to record", "--activities"),
    _used(
        "ACTIVITIES_LOG_FILE", Type.TEXT, "log_file", "the trace file",
        "folder and name of the file that kinetoctl writes here; the process gets no path",
    ),
    _used("ACTIVITIES_DURATION_SECS", Type.INT, "duration_ns", "length in s", "--duration", S),
    _used("ACTIVITIES_DURATION_MSECS", Type.INT, "duration_ns", "length in ms (500)", "--duration", MS),
    _used(
        "ACTIVITIES_WARMUP_PERIOD_SECS", Type.INT, "warmup_ns", "warm-up in s (5)",
        "--warmup; none by default, since nothing needs it", S,
    ),
    _used("ACTIVITIES_ITERATIONS", Type.INT, "iterations", "length in iterations", "--iterations; 0: a timed trace"),
    _used(
        "ACTIVITIES_WARMUP_ITERATIONS", Type.INT, "warmup_iterations", "warm-up in iterations", "--warmup-iterations"
    ),
    _used(
        "ACTIVITIES_MAX_GPU_BUFFER_SIZE_MB", Type.INT, "buffer_limit", "memory for GPU records in MiB (128)",
        "--buffer-limit, for all records of a process", 1 << 20,
    ),
    _used(
        "PROFILE_START_TIME", Type.INT64, "start_time_ns", "Unix time in ms; 0: at once",
        "--start-at; not with iterations; an error if it is more than 10 s in the past", MS,
    ),
    _used(
        "PROFILE_START_ITERATION", Type.INT, "start_iteration", "first iteration",
        "--start-iteration; 0: the next one",
    ),
    _used(
        "PROFILE_START_ITERATION_ROUNDUP", Type.INT, "roundup", "round the first iteration up", "--roundup"
    ),
    _used("PROFILE_REPORT_INPUT_SHAPES", Type.BOOL, "record_shapes", "inputs of operators", "--record-shapes"),
    _used("PROFILE_WITH_STACK", Type.BOOL, "with_stack", "Python stacks", "--with-stack: sampled, not every call"),
    _used("PROFILE_PROFILE_MEMORY", Type.BOOL, "memory", "allocations", "--memory"),
    _used("PROFILE_WITH_FLOPS", Type.BOOL, "with_flops", "FLOPs of operators", "--with-flops"),
    _used("PROFILE_WITH_MODULES", Type.BOOL, "with_modules", "module hierarchy", "--with-modules"),
    _used(
        "CUPTI_PM_SAMPLING_METRICS", Type.LIST, "counters", "hardware counters of one device, every 1 ms",
        "--counters, of all GPUs that the processes use",
    ),
    _used(
        "PROFILE_MEMORY", Type.BOOL, "snapshot", "a memory snapshot instead of a trace",
        "a capture of memory_snapshot, as with `kinetoctl memory`",
    ),
    _used("PROFILE_MEMORY_DURATION_MSECS", Type.INT, "snapshot_ns", "its length in ms (1000)", "its length", MS),
    _used("REQUEST_TRACE_ID", Type.TEXT, "request_trace_id", "id for loggers", "the label request_trace_id"),
    _used(
        "REQUEST_GROUP_TRACE_ID", Type.TEXT, "request_group_trace_id", "id for loggers",
        "the label request_group_trace_id",
    ),
    _without_effect(
        "ACTIVITIES_DISPLAY_CUDA_SYNC_WAIT_EVENTS", Type.BOOL, "include stream waits in cuda_sync",
        "they are kept whenever cuda_sync is recorded",
    ),
    _without_effect(
        "CUPTI_PER_THREAD_BUFFER_ENABLED", Type.BOOL, "a CUPTI buffer per thread",
        "the collector hands buffers out without a lock",
    ),
    _without_effect(
        "CUPTI_PM_SAMPLING_DEVICE_ID", Type.INT, "the device to sample", "all GPUs that the processes use are sampled"
    ),
    _without_effect("ROCTRACER_MAX_EVENTS", Type.INT, "row limit on AMD", "`--buffer-limit` limits the records"),
    _without_effect("XPUPTI_PROFILER_METRICS", Type.LIST, "counters of kernels on Intel", _OVER_TIME),
    _without_effect("XPUPTI_PROFILER_ENABLE_PER_KERNEL", Type.BOOL, "counters of kernels", _OVER_TIME),
    _without_effect("XPUPTI_PROFILER_MAX_SCOPES", Type.INT, "scopes with counters", _OVER_TIME),
    _without_effect("ON_DEMAND_CONFIG_UPDATE_INTERVAL_SECS", Type.INT, "poll period", _NO_POLL),
    _without_effect("ENABLE_IPC_FABRIC", Type.BOOL, "connect to a daemon", _NO_POLL),
    _without_effect("VERBOSE_LOG_LEVEL", Type.INT, "libkineto's log", "the agent logs to the file KINETO_AGENT_LOG"),
    _without_effect("VERBOSE_LOG_MODULES", Type.LIST, "libkineto's log", "the agent logs to the file KINETO_AGENT_LOG"),
    _without_effect("CUSTOM_CONFIG", Type.TEXT, "text for plug-ins of libkineto", "there are no such plug-ins"),
    _renamed("CLIENT_INTERFACE_ENABLE_OP_INPUTS_COLLECTION", Type.BOOL, "record_shapes", "PROFILE_REPORT_INPUT_SHAPES"),
    _renamed("PYTHON_STACK_TRACE", Type.BOOL, "with_stack", "PROFILE_WITH_STACK"),
    _gone("EVENTS", _EVENTS),
    _gone("METRICS", _EVENTS),
    _gone("SAMPLE_PERIOD_MSECS", _EVENTS),
    _gone("MULTIPLEX_PERIOD_MSECS", _EVENTS),
    _gone("REPORT_PERIOD_SECS", _EVENTS),
    _gone("SAMPLES_PER_REPORT", _EVENTS),
    _gone("EVENTS_LOG_FILE", _EVENTS),
    _gone("EVENTS_ENABLED_DEVICES", _EVENTS),
    _gone("EVENTS_DURATION_SECS", _EVENTS),
    _gone("EVENTS_HEARTBEAT_MONITOR_PERIOD_SECS", _EVENTS),
    _gone("MAX_EVENT_PROFILERS_PER_GPU", _EVENTS),
    _gone("CUPTI_PROFILER_METRICS", "counters of the CUPTI range profiler"),
    _gone("ENABLE_SIGUSR2", "a trace on SIGUSR2"),
    _gone("REQUEST_TIMESTAMP", "when the request was made"),
)  # fmt: skip
KEYS: Mapping[str, ConfigKey] = {row.name: row for row in _ROWS}


@dataclass(frozen=True, slots=True)
class Setting:
    """A given value. where: `FILE:LINE: KEY`, or only the key if it was given on the command line."""

    value: Any  # bool, int, str or a tuple of str, as the key's kind says
    where: str


@dataclass(slots=True)
class KinetoConfig:
    """Settings by field, and notes for the user."""

    settings: dict[str, Setting] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def value(self, name: str, default: Any = None) -> Any:
        """The value of a field."""
        setting = self.settings.get(name)
        return default if setting is None else setting.value


# ---------------------------------------------------------------- reading


def is_inline(text: str) -> bool:
    """Whether this is KEY=VALUE,… or a complete text; otherwise it names a file."""
    return "\n" in text or _INLINE.match(text) is not None


def parse_inline(text: str) -> KinetoConfig:
    """Parses KEY=VALUE,KEY=VALUE,…, where a value may itself be a list, or lines. Raises KinetoConfigError."""
    if "\n" in text:
        return parse(text)
    config = KinetoConfig()
    for part in _NEXT_SETTING.split(text):
        _read_line(config, part, "")
    return config


def parse(text: str, source: str = "") -> KinetoConfig:
    """Parses a configuration text. source: its file, for messages. Raises KinetoConfigError."""
    config = KinetoConfig()
    for number, line in enumerate(text.split("\n"), start=1):
        _read_line(config, line, f"{source}:{number}: " if source else f"line {number}: ")
    return config


def merged(configs: Iterable[KinetoConfig]) -> KinetoConfig:
    """All configurations in one; later ones take precedence."""
    result = KinetoConfig()
    for each in configs:
        result.settings |= each.settings
        result.notes += each.notes
    return result


def _read_line(config: KinetoConfig, line: str, place: str) -> None:
    line = line.partition("#")[0].strip()
    if not line:
        return
    parts = [part.strip() for part in line.split("=")]
    if len(parts) != 2 or not parts[0]:
        raise KinetoConfigError(f"{place}expected KEY=VALUE, got {line!r:.200}")
    name, text = parts
    key = KEYS.get(name)
    where = f"{place}{name}"
    if key is None:
        config.notes.append(f"{where:.200}: unknown key, ignored")
        return
    value = _read_value(key, text, where)
    if key.effect is Effect.LEGACY:
        config.notes.append(f"{where}: {key.meaning}; {key.here}")
    elif key.effect is Effect.NONE:
        config.notes.append(f"{where} has no effect: {key.here}")
    if key.field:
        config.settings[key.field] = Setting(value, where)


def _read_value(key: ConfigKey, text: str, where: str) -> bool | int | str | tuple[str, ...]:
    if key.kind is Type.BOOL:
        if text.lower() not in _BOOLEANS:
            raise KinetoConfigError(f"{where}: expected yes or no (y, n, t, f, true, false, 1, 0), got {text!r:.80}")
        return _BOOLEANS[text.lower()]
    if key.kind in (Type.INT, Type.INT64):
        # it must also fit after conversion to the unit used here
        most = MAX_INT32 if key.kind is Type.INT else MAX_INT64 // key.factor
        number = int(text) if re.fullmatch(r"[+-]?[0-9]{1,20}", text) else -1
        if not 0 <= number <= most:
            raise KinetoConfigError(f"{where}: expected a whole number from 0 to {most}, got {text!r:.80}")
        return number * key.factor
    if key.kind is Type.LIST:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    return text


# ---------------------------------------------------------------- the requested capture


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedCapture:
    """The capture that a configuration requests. origins: attribute -> the key that set it.

    None means that no key set it. Times are in Unix ns, durations in ns, sizes in bytes.
    """

    duration: int | None = None
    or_duration: int | None = None  # with iterations: for a process that never steps
    warmup: int | None = None
    start_at: int | None = None
    iterations: int | None = None
    start_iteration: int | None = None
    roundup: int | None = None
    warmup_iterations: int | None = None
    activities: tuple[str, ...] | None = None
    record_shapes: bool | None = None
    with_stack: bool | None = None
    with_modules: bool | None = None
    with_flops: bool | None = None
    memory: bool | None = None
    counters: tuple[str, tuple[str, ...]] | None = None  # a set of hardware counters, or the vendor's metrics
    buffer_limit: int | None = None
    log_file: str | None = None
    labels: tuple[tuple[str, str], ...] = ()
    origins: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


# Activity types of Kineto that none of our sources records: other vendors' and removed ones.
NEVER_RECORDED = frozenset(
    {
        "mtia_runtime", "mtia_ccp_events", "mtia_insight", "mtia_counters", "glow_runtime", "cuda_profiler_range",
        "hpu_op", "xpu_scope_profiler", "xpu_sync", "collective_comm", "hardware_counters", "cuda_event",
    }
)  # fmt: skip
_TIMED = ("warmup_ns", "start_time_ns")
_ITERATED = ("start_iteration", "roundup", "warmup_iterations")
_SWITCHES = ("record_shapes", "with_stack", "with_modules", "with_flops", "memory")
_LABELS = ("request_trace_id", "request_group_trace_id")


def request(config: KinetoConfig, now_ns: int) -> RequestedCapture:
    """The capture that a configuration describes. now_ns: Unix ns. Raises KinetoConfigError."""
    enabled = config.settings.get("enabled")
    if enabled is not None and not enabled.value:
        raise KinetoConfigError(f"{enabled.where}: tracing is switched off; remove the key to trace")
    asking = _RequestBuilder(config, now_ns)
    if config.value("snapshot"):
        asking.snapshot()
    else:
        asking.extent()
        asking.recording()
    asking.take_if_set("buffer_limit", "log_file")
    return asking.asked()


class _RequestBuilder:
    """Collects the request, field by field."""

    def __init__(self, config: KinetoConfig, now_ns: int) -> None:
        self._config = config
        self._now_ns = now_ns
        self._values: dict[str, Any] = {}
        self._origins: dict[str, str] = {}
        self._notes = list(config.notes)

    def asked(self) -> RequestedCapture:
        """The result."""
        value = self._config.value
        labels = tuple((name, value(name)) for name in _LABELS if value(name))
        return RequestedCapture(**self._values, labels=labels, origins=self._origins, notes=tuple(self._notes))

    def _take(self, attribute: str, name: str, value: Any) -> None:
        self._values[attribute] = value
        if name in self._config.settings:
            self._origins[attribute] = self._config.settings[name].where

    def take_if_set(self, *names: str) -> None:
        """Copies fields to attributes of the same name. In Kineto, 0, false and an empty text mean "not set"."""
        for name in names:
            if self._config.value(name):
                self._take(name, name, self._config.value(name))

    def _leave_out(self, names: Iterable[str], why: str) -> None:
        given = [name for name in names if self._config.value(name)]
        self._notes += (f"{self._config.settings[name].where} has no effect: {why}" for name in given)

    def snapshot(self) -> None:
        """Requests a memory snapshot, which has a duration and nothing else."""
        self._take("activities", "snapshot", (MEMORY_SNAPSHOT,))
        self._take("duration", "snapshot_ns", self._config.value("snapshot_ns") or DEFAULT_SNAPSHOT_NS)
        others = (*_TIMED, *_ITERATED, *_SWITCHES, "duration_ns", "iterations", "activities", "counters")
        self._leave_out(others, "PROFILE_MEMORY requests only a snapshot")

    def extent(self) -> None:
        """Copies the length and the start."""
        value = self._config.value
        if value("iterations"):
            self.take_if_set("iterations", *_ITERATED)
            if value("duration_ns"):
                self._take("or_duration", "duration_ns", value("duration_ns"))
            self._leave_out(_TIMED, "ACTIVITIES_ITERATIONS takes precedence")
            return
        self._take("duration", "duration_ns", value("duration_ns") or DEFAULT_DURATION_NS)
        if value("warmup_ns"):
            self._take("warmup", "warmup_ns", value("warmup_ns"))
        if value("start_time_ns"):
            self._start_time(self._config.settings["start_time_ns"])
        self._leave_out(_ITERATED, "it needs ACTIVITIES_ITERATIONS")

    def _start_time(self, start: Setting) -> None:
        late_ns = self._now_ns - start.value
        if late_ns > MAX_START_TIME_AGE_NS:
            raise KinetoConfigError(f"{start.where}: this is {late_ns / S:.0f} s in the past; use 0 to start at once")
        if late_ns >= 0:
            self._notes.append(f"{start.where} is {late_ns / S:.1f} s in the past, so the capture starts at once")
        else:
            self._take("start_at", "start_time_ns", start.value)

    def recording(self) -> None:
        """Copies what to record."""
        if self._config.value("activities"):
            self._take("activities", "activities", self._activities(self._config.settings["activities"]))
        self.take_if_set(*_SWITCHES)
        if self._config.value("counters"):
            self._take("counters", "counters", ("", self._config.value("counters")))

    def _activities(self, setting: Setting) -> tuple[str, ...]:
        names = [name.lower() for name in setting.value]
        for name in names:
            if not _NAME.fullmatch(name):
                raise KinetoConfigError(f"{setting.where}: expected names like kernel,gpu_memcpy, got {name!r:.80}")
        unserved = [name for name in names if name in NEVER_RECORDED]
        kept = tuple(name for name in names if name not in NEVER_RECORDED)
        if not kept:
            raise KinetoConfigError(f"{setting.where}: this version records none of these: {', '.join(unserved)}")
        if unserved:
            self._notes.append(
                f"{setting.where}: types that this version does not record are ignored: {', '.join(unserved)}"
            )
        return kept
