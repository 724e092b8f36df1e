"""Dynolog's flags as kinetod's settings: a pure function, with a report of what became of each.

Theory of operation
    The last value of a flag counts, as for gflags. What was not given has Dynolog's default, so a daemon without any
    flags still answers at port 1778 and measures the host. Settings that have kinetod's own default are not written.
"""

import ipaddress
import json
import os
import re
import stat
import subprocess
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from kineto_trace.base.own_processes import python

from kinetoctl.base.unit_file import GivenFlag
from kinetoctl.errors import NotMigrated, NotWritten, write_errors


# Every flag of Dynolog's daemon (facebookincubator/dynolog@c3a231a, August 2026), and what becomes of it in kinetod.
# The flags of the two libraries that parse them and write its log, gflags and glog, are there as well.
class FlagOutcome(Enum):
    """What becomes of a flag. The value is what the report says."""

    SAME = "same"
    APPROXIMATED = "approximated"
    NO_COUNTERPART = "no counterpart"
    NO_EFFECT = "no effect"  # nor in Dynolog, as other flags are
    UNKNOWN = "unknown"


class FlagKind(Enum):
    """The type of a flag's value."""

    SWITCH = "switch"
    NUMBER = "number"
    TEXT = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class DynologFlag:
    """A flag. needs: the switch without which it does nothing, unless that is empty.

    keys: the settings of kinetod that it decides; note: what differs, or why there is no counterpart. secret: the value
    is never shown.
    """

    name: str
    kind: FlagKind
    default: str
    outcome: FlagOutcome
    keys: tuple[str, ...] = ()
    note: str = ""
    needs: str = ""
    secret: bool = False


_SCRAPE = "kinetod pushes nothing; let an OpenTelemetry collector or a Prometheus agent scrape metrics.listen"
_META = "for an endpoint inside Meta; scrape metrics.listen instead"
_DCGM = "DCGM is not used; NVML and the kernel's drivers provide what docs/metrics.md lists"
_FIELDS = "the JSON lines contain all known values of a GPU; the profiling fields (1001 to 1012) need Hopper or later"
_TPU = "kinetod does not support TPUs"
_PERF = "CPU counters are not read: mips and mega_cycles_per_second are missing"
_LIBRARY = "a flag of a library that Dynolog is built with"
_LOG = "kinetod logs to standard error or the journal; server.log_level sets how much"


def _flags() -> Iterator[DynologFlag]:
    switch, number, text = FlagKind
    same, close, none = FlagOutcome.SAME, FlagOutcome.APPROXIMATED, FlagOutcome.NO_COUNTERPART

    def flag(
        name: str, kind: FlagKind, default: str, outcome: FlagOutcome, note: str = "", *keys: str, needs: str = "",
        secret: bool = False,
    ) -> DynologFlag:  # fmt: skip
        return DynologFlag(
            name=name, kind=kind, default=default, outcome=outcome, keys=keys, note=note, needs=needs, secret=secret
        )

    # By hand: a flag is a line, or two with its place.
    # fmt: off
    yield flag("port", number, "1778", close,
               "on loopback only, as callers are not authenticated; dynolog.allow_remote allows other addresses",
               "dynolog.rpc")
    yield flag("enable_ipc_monitor", switch, "false", same, "", "dynolog.ipc")
    yield flag("use_prometheus", switch, "false", same, "", "metrics.listen", "metrics.compat")
    yield flag("prometheus_address", text, "127.0.0.1", same, "", "metrics.listen", needs="use_prometheus")
    yield flag("prometheus_port", number, "8080", same, "", "metrics.listen", needs="use_prometheus")
    yield flag("use_JSON", switch, "false", same,
               "the lines go to kinetod's log; metrics.json_log can name a file instead", "metrics.json_log")
    yield flag("kernel_monitor_reporting_interval_s", number, "60", same, "", "metrics.host_interval")
    yield flag("enable_gpu_monitor", switch, "false", close, _DCGM, "metrics.gpu_interval")
    yield flag("dcgm_reporting_interval_s", number, "10", same, "", "metrics.gpu_interval", needs="enable_gpu_monitor")
    yield flag("filter_nic_interfaces", switch, "false", same, "", "metrics.interfaces")
    yield flag("allow_interface_prefixes", text, "eno,ens,enp,enx,eth", same, "", "metrics.interfaces",
               needs="filter_nic_interfaces")
    yield flag("enable_pod_resources_attribution", switch, "false", same,
               "with an attach helper, also set kubelet_socket in its attach.toml", "kubernetes.pod_resources")
    yield flag("pod_resources_socket", text, "/var/lib/kubelet/pod-resources/kubelet.sock", same, "",
               "kubernetes.kubelet_socket", needs="enable_pod_resources_attribution")
    yield flag("pod_resources_gpu_resource", text, "nvidia.com/gpu", none,
               "all resources whose devices are GPUs are considered", needs="enable_pod_resources_attribution")
    yield flag("pod_resources_tpu_resource", text, "google.com/tpu", none, _TPU, needs="enable_tpu_monitor")
    yield flag("enable_env_var_attribution", switch, "true", close,
               "user and job come from the kernel and metrics.gpu_jobs_dir; Slurm's account and partition come "
               "from the environment, if kinetod is allowed to read it",
               needs="enable_gpu_monitor")
    yield flag("env_attribution_mappings_file", text, "", none,
               "no other variables are read; jobs come from metrics.gpu_jobs_dir", needs="enable_gpu_monitor")
    yield flag("dcgm_fields", text, "50,100,155,204,1001,1002,1003,1004,1005,1006,1007,1008,1009,1010,1011,1012", none,
               _FIELDS, needs="enable_gpu_monitor")
    for name, kind, default in (
        ("dcgm_lib_path", text, "/lib64/libdcgm.so"), ("dcgm_major_version", number, "2"),
        ("dcgm_standalone_address", text, ""),
    ):
        yield flag(name, kind, default, none, _DCGM, needs="enable_gpu_monitor")
    yield flag("enable_perf_monitor", switch, "false", none, _PERF)
    yield flag("perf_monitor_reporting_interval_s", number, "60", none, _PERF, needs="enable_perf_monitor")
    yield flag("enable_tpu_monitor", switch, "false", none, _TPU)
    for name, kind, default in (
        ("tpu_reporting_interval_s", number, "10"), ("tpu_scrape_timeout_ms", number, "2000"),
        ("tpu_device_plugin_url", text, "http://localhost:2112/metrics"),
    ):
        yield flag(name, kind, default, none, _TPU, needs="enable_tpu_monitor")
    yield flag("use_otlp", switch, "false", none, _SCRAPE)
    for name, kind, default in (
        ("otlp_endpoint", text, ""), ("otlp_service_name", text, "dynolog"), ("otlp_timeout_ms", number, "30000"),
        ("otlp_max_queue_size", number, "1000"), ("otlp_ssl_ca_cert_path", text, ""),
        ("otlp_ssl_client_cert_path", text, ""), ("otlp_ssl_client_key_path", text, ""),
    ):
        yield flag(name, kind, default, none, _SCRAPE, needs="use_otlp")
    yield flag("otlp_headers", text, "", none, _SCRAPE, needs="use_otlp", secret=True)
    yield flag("use_otel", switch, "false", none, _SCRAPE)
    for name, kind, default in (
        ("use_otel_for_kernel_monitor", switch, "false"), ("otel_endpoint", text, "http://localhost:4318"),
        ("otel_resource_env_file", text, ""), ("otel_resource_attrs", text, ""),
        ("otel_metric_mappings_file", text, ""),
    ):
        yield flag(name, kind, default, none, _SCRAPE, needs="use_otel")
    yield flag("use_fbrelay", switch, "false", none, _META)
    yield flag("fbrelay_address", text, "127.0.0.1", none, _META, needs="use_fbrelay")
    yield flag("fbrelay_port", number, "10000", none, _META, needs="use_fbrelay")
    yield flag("use_ODS", switch, "false", none, _META)
    yield flag("category_id", text, "", none, _META, needs="use_ODS")
    yield flag("ods_entity_prefix", text, "", none, _META, needs="use_ODS")
    yield flag("access_token", text, "", none, _META, secret=True)
    yield flag("certificate_path", text, "/etc/ssl/certs/ca-certificates.crt", none, _META)
    yield flag("use_scuba", switch, "false", none, _META)
    yield flag("scribe_category", text, "perfpipe_fair_cluster_gpu_stats", none, _META, needs="use_scuba")
    # fmt: on


def _library_flags() -> Iterator[DynologFlag]:
    of_glog = (
        *("alsologtoemail", "log_backtrace_at", "log_dir", "log_link", "logemaillevel", "logfile_mode", "logmailer"),
        *(
            "logbuflevel",
            "logbufsecs",
            "logcleansecs",
            "max_log_size",
            "minloglevel",
            "stderrthreshold",
            "v",
            "vmodule",
        ),
    )
    switches_of_glog = (
        *("alsologtostderr", "colorlogtostderr", "colorlogtostdout", "drop_log_memory", "log_prefix", "log_utc_time"),
        *("log_year_in_prefix", "logtostderr", "logtostdout", "stop_logging_if_full_disk", "symbolize_stacktrace"),
        "timestamp_in_logfile_name",
    )
    of_gflags = ("helpmatch", "helpon", "tab_completion_columns", "tab_completion_word", "undefok")
    switches_of_gflags = ("help", "helpfull", "helppackage", "helpshort", "helpxml", "version")
    for names, kind, note in (
        (of_glog, FlagKind.TEXT, _LOG),
        (switches_of_glog, FlagKind.SWITCH, _LOG),
        (of_gflags, FlagKind.TEXT, _LIBRARY),
        (switches_of_gflags, FlagKind.SWITCH, _LIBRARY),
    ):
        for name in names:
            yield DynologFlag(name=name, kind=kind, default="", outcome=FlagOutcome.NO_COUNTERPART, note=note)


OWN_FLAGS: dict[str, DynologFlag] = {flag.name: flag for flag in _flags()}
FLAGS: dict[str, DynologFlag] = {**OWN_FLAGS, **{flag.name: flag for flag in _library_flags()}}
SWITCHES = frozenset(name for name, flag in FLAGS.items() if flag.kind is FlagKind.SWITCH)

SOCKET_DIR_VARIABLE = "KINETO_IPC_SOCKET_DIR"  # libkineto's and Dynolog's
VARIABLES = {  # of Dynolog's environment, and what becomes of them
    SOCKET_DIR_VARIABLE: (FlagOutcome.SAME, "dynolog.socket_dirs", ""),
    "OTEL_EXPORTER_OTLP_ENDPOINT": (FlagOutcome.NO_COUNTERPART, "", _SCRAPE),
    "OTEL_SERVICE_NAME": (FlagOutcome.NO_COUNTERPART, "", _SCRAPE),
    "K8S_NODE_NAME": (FlagOutcome.NO_COUNTERPART, "", "only access.kubernetes needs it: set kubernetes.node_name"),
}
UNIT_SETTINGS = {  # of a unit, and why they are not taken over
    "User": "kinetod.service runs as the user kineto, with an attach helper for other users' processes",
    "Group": "kinetod.service runs as the user kineto, with an attach helper for other users' processes",
    "CPUQuota": "kinetod.service has its own limits: `systemctl edit kinetod` changes them",
    "MemoryMax": "kinetod.service has its own limits: `systemctl edit kinetod` changes them",
    "MemoryLimit": "kinetod.service has its own limits: `systemctl edit kinetod` changes them",
    "StandardOutput": "kinetod logs to the journal; metrics.json_log can name a file for the metrics",
    "StandardError": "kinetod logs to the journal; metrics.json_log can name a file for the metrics",
}


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
_OTHERS_MAY_SCRAPE = "other hosts can scrape it, as they could scrape Dynolog"


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
        return "has no value; Dynolog ignores it in a flag file, but does not start with it on the command line"
    if flag.kind is FlagKind.SWITCH and value.lower() not in _TRUE + _FALSE:
        return f"{value!r:.80} is neither true nor false"
    if flag.kind is FlagKind.NUMBER:
        try:
            fits = _whole(value) in _INT32
        except ValueError:
            fits = False
        if not fits:
            return f"{value!r:.80} is not a 32-bit integer"
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
        outcome, note, keys = FlagOutcome.NO_EFFECT, f"Dynolog ignores it too without --{known.needs}", ()
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
        note = f"Dynolog ignores it too: the line without dashes above it, {above!r:.60}, limits it to other programs"
    elif name == flag.name or name not in FLAGS:
        outcome, note = FlagOutcome.UNKNOWN, "Dynolog has no such flag"
    elif flag.name.strip() == name:
        note = "Dynolog ignores it too, because of the blanks after its name"
    else:
        note = "Dynolog ignores it too: in a flag file, a value must follow an equals sign and a switch stands alone"
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
        notes["port"] = FlagOutcome.NO_COUNTERPART, "not a fixed port; if clients need one, set dynolog.rpc"
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
            where = "at each scrape, as kineto_gpu_…"
            if not page:
                where += "; set metrics.listen"
            notes["enable_gpu_monitor"] = (
                FlagOutcome.APPROXIMATED,
                f"{FLAGS['enable_gpu_monitor'].note}; /metrics has the values of the GPUs {where}",
            )
            notes["dcgm_reporting_interval_s"] = FlagOutcome.NO_COUNTERPART, "the scrape interval applies instead"
    if values.on("filter_nic_interfaces"):
        prefixes = [prefix for prefix in values.text("allow_interface_prefixes").split(",") if prefix]
        settings["metrics.interfaces"] = prefixes
        if not prefixes:
            notes["allow_interface_prefixes"] = (
                FlagOutcome.APPROXIMATED,
                "kinetod then reports all interfaces, Dynolog none",
            )
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
            FlagOutcome.APPROXIMATED, "not an IP address: replaced by loopback; set one of this host in metrics.listen"
        )  # fmt: skip
    if not 0 < port <= _MAX_PORT:
        port = int(FLAGS["prometheus_port"].default)
        notes["prometheus_port"] = FlagOutcome.APPROXIMATED, f"not a port that a scraper can use; replaced by {port}"
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


CHECK = python("kinetod", "--check-config", "--config")
CHECK_S = 60.0
_WIDTH = 100
_MODE = 0o644  # nothing in it is secret, and the service's own user must read it
_PREFIX = "KINETOD_"  # of variables that would take precedence over the file
_HEAD = """\
kinetod's configuration, converted from Dynolog's by `kinetoctl migrate dynolog`. Settings that are not here have \
kinetod's defaults; `kinetod --print-default-config` shows all settings. Review this file, then install it as \
/etc/kinetod/config.toml.
"""
_DOORS = """\
dynolog.log_roots names the folders below which `dyno --log-file` is allowed to write traces; without it, traces are \
in the store only (`kinetoctl captures fetch` downloads them). The installed service also needs these folders in \
`roots` of /etc/kinetod/writer.toml and in ReadWritePaths= (`systemctl edit kinetod-writer.service`), and its writer \
enabled: `systemctl enable --now kinetod-writer.socket` (docs/dyno.md). dynolog.tracing sets who records: kinetod's \
agent, or the process's own libkineto ("kineto"). To run both daemons on one host, see docs/dynolog.md.
"""


def config_text(found: Migrated, sources: Sequence[Path]) -> str:
    """The file: each setting below the flags that decide it, and what has no setting at the end."""
    lines = [*_comment(_HEAD), *_comment(f"Converted from: {', '.join(map(str, sources))}" if sources else "")]
    section = ""
    told: list[Became] = []
    for name, value in found.settings.items():
        begins, _, key = name.rpartition(".")
        if begins != section:
            lines += ["", f"[{begins}]", *(_comment(_DOORS) if begins == "dynolog" else ())]
            section = begins
        deciding = [line for line in found.report if name in line.keys and line not in told]
        told += deciding
        lines += [text for line in deciding for text in _comment(report_line(line))]
        lines.append(f"{key} = {toml_value(value)}")
    if rest := [line for line in found.report if line not in told]:
        lines += ["", *_comment("Without a setting here:")]
        lines += [text for line in rest for text in _comment(report_line(line))]
    return "\n".join(lines) + "\n"


def report_line(line: Became) -> str:
    """What became of a flag, in one line."""
    where = f" ({line.where})" if line.where else ""
    return f"{line.subject}{where}: {line.outcome.value}{f'; {line.note}' if line.note else ''}"


def _comment(text: str) -> Iterator[str]:
    """Lines of a comment, in which nothing can end the line."""
    shown = "".join(char if char.isprintable() else " " for char in text.strip())
    for line in textwrap.wrap(shown, _WIDTH - 2, break_on_hyphens=False):
        yield f"# {line}"


def check_text(text: str, command: Sequence[str] = CHECK) -> None:
    """Has kinetod read the text as its configuration. Raises NotMigrated with what it says."""
    with tempfile.TemporaryDirectory(prefix="kinetoctl-") as folder:
        path = Path(folder) / "config.toml"
        path.write_text(text, "utf-8")
        _check(path, command)


def write_text(text: str, path: Path, *, replace: bool, command: Sequence[str] = CHECK) -> None:
    """Writes the file, whole and only if kinetod takes it. replace: also over an existing file, if it is a regular one.

    Raises NotMigrated, NotWritten.
    """
    if os.path.lexists(path):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise NotWritten(f"{path} is not a regular file; name another file, or leave out --output to use stdout")
        if not replace:
            raise _exists(path)
    check_text(text, command)
    with write_errors(path):
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        scratch = Path(name)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fchmod(file.fileno(), _MODE)
                os.fsync(file.fileno())
            if replace:
                scratch.replace(path)
            else:
                _take_name(scratch, path)
        except FileExistsError:
            raise _exists(path) from None
        finally:
            scratch.unlink(missing_ok=True)


def _take_name(scratch: Path, path: Path) -> None:
    """Gives the file its name, unless another file has it by now. Raises OSError."""
    try:
        os.link(scratch, path)
    except FileExistsError:
        raise
    except OSError:  # no file on this disk may have two names
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))
        scratch.replace(path)


def _exists(path: Path) -> NotWritten:
    return NotWritten(f"{path} already exists; use --replace to overwrite it")


def _check(path: Path, command: Sequence[str]) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_PREFIX)}
    try:
        done = subprocess.run(
            [*command, str(path)], env=environ, capture_output=True, text=True, errors="replace", timeout=CHECK_S,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise NotMigrated(f"could not run kinetod to check the configuration: {exc}") from exc
    if done.returncode:
        said = done.stderr.replace(str(path), "configuration").strip()
        raise NotMigrated(f"kinetod does not accept the configuration:\n{said}")
