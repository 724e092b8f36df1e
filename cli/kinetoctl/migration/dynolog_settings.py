"""Dynolog's flags as kinetod's settings: a pure function, with a report of what became of each.

Theory of operation
    The last value of a flag counts, as for gflags. What was not given has Dynolog's default, so a daemon without any
    flags still answers at port 1778 and measures the host. Settings that have kinetod's own default are not written.
"""

import ipaddress
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kinetoctl.migration.dynolog_flags import (
    FLAGS,
    SOCKET_DIR_VARIABLE,
    UNIT_SETTINGS,
    VARIABLES,
    DynologFlag,
    FlagKind,
    FlagOutcome,
)
from kinetoctl.migration.flag_text import GivenFlag

Setting = bool | str | list[str]
_Notes = dict[str, tuple[FlagOutcome, str]]  # by flag, where its value decides what becomes of it

DYNOLOG_PORT = 1778
_TRUE, _FALSE = ("1", "t", "true", "y", "yes"), ("0", "f", "false", "n", "no")
_MAX_PORT = 65535
_NUMBER = re.compile(r"0[xX][0-9a-fA-F]{1,16}|[ \t\v\f]*[+-]?[0-9]{1,20}")
_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")  # of a URL
_NAME = re.compile(r"[\w.]*")
_INT32 = range(-(2**31), 2**31)
_ALWAYS_TOLD = ("enable_ipc_monitor", "port")  # whether tracing works at all
_HIDDEN = "(not shown)"
_OTHERS_MAY_SCRAPE = "other hosts can reach it, as they could reach Dynolog's"


@dataclass(frozen=True, slots=True, kw_only=True)
class Became:
    """What became of one flag or variable. subject: as it was given; keys: settings of kinetod; where: it was found."""

    subject: str
    outcome: FlagOutcome
    keys: tuple[str, ...] = ()
    note: str = ""
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Migrated:
    """Settings by name in the order of the file, and what became of everything."""

    settings: Mapping[str, Setting]
    report: Sequence[Became]

    def count(self, *outcomes: FlagOutcome) -> int:
        """How many lines of the report have one of these outcomes."""
        return sum(line.outcome in outcomes for line in self.report)


class _Values:
    """The values in force, of given flags and of defaults; `problems` says by flag what is wrong with a value."""

    def __init__(self, given: Sequence[GivenFlag]) -> None:
        taken = [flag for flag in given if not flag.programs and flag.name in FLAGS]
        self.given = {flag.name: flag for flag in taken}  # the last one counts
        self.problems: dict[str, str] = {}
        for name, flag in self.given.items():
            if problem := _problem(FLAGS[name], flag.value):
                self.problems[name] = problem

    def text(self, name: str) -> str:
        """The value; the default if none, or no valid one, was given."""
        flag = self.given.get(name)
        return FLAGS[name].default if flag is None or flag.value is None or name in self.problems else flag.value

    def on(self, name: str) -> bool:
        """Whether a switch is on."""
        return self.text(name).lower() in _TRUE

    def number(self, name: str) -> int:
        """A number."""
        return _whole(self.text(name))


def _problem(flag: DynologFlag, value: str | None) -> str:
    """Why gflags would not take the value; "" if it would."""
    if value is None:
        return "has no value; Dynolog does not start with it on the command line, and ignores it in a flag file"
    if flag.kind is FlagKind.SWITCH and value.lower() not in _TRUE + _FALSE:
        return f"{value!r:.80} is neither true nor false"
    if flag.kind is FlagKind.NUMBER:
        try:
            fits = _whole(value) in _INT32
        except ValueError:
            fits = False
        if not fits:
            return f"{value!r:.80} is not a whole number of 32 bits"
    return ""


def _whole(value: str) -> int:
    """A number as gflags reads it: decimal also after a zero. Raises ValueError."""
    if not _NUMBER.fullmatch(value):
        raise ValueError
    return int(value, 16 if value[:2] in ("0x", "0X") else 10)


def migrated(given: Sequence[GivenFlag], environ: Mapping[str, str], unit_settings: Mapping[str, str]) -> Migrated:
    """kinetod's settings for these flags. environ: of Dynolog's process; unit_settings: what else its unit says."""
    values = _Values(given)
    notes: _Notes = {}
    settings: dict[str, Setting] = {}
    settings |= _doors(values, environ, notes)
    settings |= _metrics(values, notes)
    settings |= _kubernetes(values)
    report = [_became(flag, values, notes) for flag in values.given.values()]
    report += [_of_default(FLAGS[name]) for name in _ALWAYS_TOLD if name not in values.given]
    report += [_ignored(flag) for flag in given if flag.programs or flag.name not in FLAGS]
    report += [
        Became(subject=name, outcome=outcome, keys=(key,) if key else (), note=note, where="the unit's environment")
        for name, (outcome, key, note) in VARIABLES.items()
        if environ.get(name)
    ]
    report += [
        Became(subject=f"{name}={unit_settings[name]}", outcome=FlagOutcome.NO_COUNTERPART, note=note, where="the unit")
        for name, note in UNIT_SETTINGS.items()
        if name in unit_settings
    ]
    return Migrated(settings=settings, report=report)


def _became(flag: GivenFlag, values: _Values, notes: _Notes) -> Became:
    known = FLAGS[flag.name]
    shown = _HIDDEN if known.secret and flag.value else flag.value and _LOGIN.sub(_HIDDEN, flag.value)
    subject = f"--{flag.name}" if shown is None else f"--{flag.name}={shown}"
    outcome, note, keys = known.outcome, known.note, known.keys
    if problem := values.problems.get(flag.name):
        outcome, note, keys = FlagOutcome.NO_EFFECT, problem, ()
    elif known.needs and not values.on(known.needs):
        outcome, note, keys = FlagOutcome.NO_EFFECT, f"nor in Dynolog without --{known.needs}", ()
    elif flag.name in notes:
        outcome, note = notes[flag.name]
    elif known.kind is FlagKind.SWITCH and not values.on(flag.name) and known.default == "false":
        outcome, note = FlagOutcome.SAME, ""
    return Became(subject=subject, outcome=outcome, keys=keys, note=note, where=flag.where)


def _ignored(flag: GivenFlag) -> Became:
    """What Dynolog does not take. Of a flag that it does not know only a name is shown: a secret may follow."""
    name = (flag.name.split() or [""])[0]
    outcome = FlagOutcome.NO_EFFECT
    if flag.programs:
        above = flag.programs.partition("=")[0]  # a flag without dashes, perhaps, and its value a secret
        note = f"nor in Dynolog: the line without dashes above it, {above!r:.60}, names other programs that it is for"
    elif name == flag.name or name not in FLAGS:
        outcome, note = FlagOutcome.UNKNOWN, "Dynolog has no such flag"
    elif flag.name.strip() == name:
        note = "nor in Dynolog, for the blanks behind its name"
    else:
        note = "nor in Dynolog: in a flag file the value follows an equals sign, and nothing follows a switch"
    shown = name if name in FLAGS else _NAME.match(name)[0]  # type: ignore[index]  # it matches everything
    return Became(subject=f"--{shown}", outcome=outcome, note=note, where=flag.where)


def _of_default(flag: DynologFlag) -> Became:
    """What becomes of a flag that was not given."""
    outcome = FlagOutcome.SAME if flag.kind is FlagKind.SWITCH else flag.outcome
    note = "" if outcome is FlagOutcome.SAME else flag.note
    return Became(
        subject=f"--{flag.name}={flag.default}", outcome=outcome, keys=flag.keys, note=note, where="Dynolog's default"
    )


def _doors(values: _Values, environ: Mapping[str, str], notes: _Notes) -> dict[str, Setting]:
    settings: dict[str, Setting] = {"dynolog.ipc": values.on("enable_ipc_monitor")}
    if folder := environ.get(SOCKET_DIR_VARIABLE):
        settings["dynolog.socket_dirs"] = [folder]
    port = values.number("port")
    if port == DYNOLOG_PORT:
        settings["dynolog.rpc"] = "loopback"
    elif 0 < port <= _MAX_PORT:
        settings["dynolog.rpc"] = f"127.0.0.1:{port}"
    else:
        settings["dynolog.rpc"] = ""
        notes["port"] = FlagOutcome.NO_COUNTERPART, "not a fixed port: name one in dynolog.rpc if clients know it"
    return settings


def _metrics(values: _Values, notes: _Notes) -> dict[str, Setting]:
    settings: dict[str, Setting] = {}
    page, lines = values.on("use_prometheus"), values.on("use_JSON")
    if page:
        settings |= _page(values, notes)
    if lines:
        settings["metrics.json_log"] = "log"
    if page or lines:
        settings["metrics.host_interval"] = _interval("kernel_monitor_reporting_interval_s", values, notes)
    else:
        notes["kernel_monitor_reporting_interval_s"] = (
            FlagOutcome.NO_COUNTERPART, "nothing is measured at intervals without metrics.compat or metrics.json_log"
        )  # fmt: skip
    if values.on("enable_gpu_monitor"):
        if lines:
            settings["metrics.gpu_interval"] = _interval("dcgm_reporting_interval_s", values, notes)
        else:
            where = "of the GPUs is on /metrics at each scrape, as kineto_gpu_…"
            if not page:
                where += "; set metrics.listen"
            notes["enable_gpu_monitor"] = (
                FlagOutcome.APPROXIMATED,
                f"{FLAGS['enable_gpu_monitor'].note}; what is known {where}",
            )
            notes["dcgm_reporting_interval_s"] = FlagOutcome.NO_COUNTERPART, "the interval of the scrapes counts"
    if values.on("filter_nic_interfaces"):
        prefixes = [prefix for prefix in values.text("allow_interface_prefixes").split(",") if prefix]
        settings["metrics.interfaces"] = prefixes
        if not prefixes:
            notes["allow_interface_prefixes"] = FlagOutcome.APPROXIMATED, "all interfaces; Dynolog then has none"
    return settings


def _page(values: _Values, notes: _Notes) -> dict[str, Setting]:
    """The page for Prometheus where Dynolog has it."""
    host, port = values.text("prometheus_address"), values.number("prometheus_port")
    settings: dict[str, Setting] = {}
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        address = ipaddress.ip_address("127.0.0.1")
        notes["prometheus_address"] = (
            FlagOutcome.APPROXIMATED, "not an IP address: write one of this host into metrics.listen; now loopback"
        )  # fmt: skip
    if not 0 < port <= _MAX_PORT:
        port = int(FLAGS["prometheus_port"].default)
        notes["prometheus_port"] = FlagOutcome.APPROXIMATED, f"no port that a scraper can know; {port} in its place"
    shown = f"[{address}]" if address.version == 6 else str(address)
    settings["metrics.listen"] = f"{shown}:{port}"
    if not address.is_loopback:
        settings["metrics.allow_remote"] = True
        notes.setdefault("prometheus_address", (FlagOutcome.SAME, _OTHERS_MAY_SCRAPE))
    settings["metrics.compat"] = "dynolog"
    return settings


def _interval(name: str, values: _Values, notes: _Notes) -> str:
    seconds = values.number(name)
    if seconds < 1:
        notes[name] = FlagOutcome.APPROXIMATED, "1s is the shortest interval"
    return f"{max(1, seconds)}s"


def _kubernetes(values: _Values) -> dict[str, Setting]:
    if not values.on("enable_pod_resources_attribution"):
        return {}
    settings: dict[str, Setting] = {"kubernetes.pod_resources": True}
    if (path := values.text("pod_resources_socket")) != FLAGS["pod_resources_socket"].default:
        settings["kubernetes.kubelet_socket"] = path
    return settings


def toml_value(value: Setting) -> str:
    """The value as TOML, on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # else JSON's strings are TOML's
