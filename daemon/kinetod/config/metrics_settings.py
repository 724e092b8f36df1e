"""The settings of [metrics]: what Prometheus can read, and metrics under Dynolog's names; a part of settings.Config."""

from dataclasses import dataclass
from pathlib import Path

from kinetod.config.addresses import (
    COUNTERS_SOCKET,
    WRITER_SOCKET,
    ListenAddress,
    checked_socket_path,
    default_counters_socket,
    parse_dynolog_rpc,
    parse_metrics_listen,
)
from kinetod.config.value_kinds import (
    Choice,
    Duration,
    ExistingFile,
    FolderPath,
    HostDefault,
    ListOf,
    Maybe,
    ParsedText,
    Switch,
    Text,
    setting,
)

_SECOND_NS = 10**9
COMPAT_OFF, COMPAT_DYNOLOG = "off", "dynolog"
JSON_LOG_OFF, JSON_LOG_OWN = "", "log"  # of metrics.json_log; anything else is a path


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignToolsConfig:
    """Kineto's processes and Dynolog's clients."""

    # By hand: a line of facts and one of meaning for each setting.
    # fmt: off
    dynolog_ipc: bool = setting(
        "dynolog.ipc", Switch(), False,
        meaning="whether to answer the polls of processes started with KINETO_USE_DAEMON=1, as Dynolog would",
    )
    dynolog_socket_dirs: tuple[Path, ...] = setting(
        "dynolog.socket_dirs", ListOf(FolderPath()), (),
        meaning="folders in which polling processes look for the daemon's socket (their KINETO_IPC_SOCKET_DIR); needs "
        "dynolog.ipc",
    )
    dynolog_containers: bool = setting(
        "dynolog.containers", Switch(), True,
        meaning="whether to also answer polling processes in other network namespaces, such as those of containers; "
        "needs dynolog.ipc, and root or the attach helper",
    )
    dynolog_tracing: str = setting(
        "dynolog.tracing", Choice("agent", "kineto", "refuse"), "agent", reload=True,
        meaning="what records in a polling process if a request does not choose: kinetod's agent, or the process's "
        "own libkineto (kineto); refuse: nothing, even if a request chooses",
    )
    dynolog_rpc: ListenAddress | None = setting(
        "dynolog.rpc", Maybe(ParsedText("address", parse_dynolog_rpc)), None,
        meaning="where to serve requests from `dyno`: loopback (IPv4 and IPv6, port 1778), host:port or unix:/path; "
        "empty: nowhere",
    )
    dynolog_allow_remote: bool = setting(
        "dynolog.allow_remote", Switch(), False,
        meaning="whether dynolog.rpc may be an address that other hosts can reach; its callers are not authenticated",
    )
    dynolog_remote_user: str = setting(
        "dynolog.remote_user", Text(), "", reload=True,
        meaning="user of this host to whom requests from `dyno` on other hosts are attributed, with that user's roles; "
        "empty: such requests are refused",
    )
    dynolog_log_roots: tuple[Path, ...] = setting(
        "dynolog.log_roots", ListOf(FolderPath()), (), reload=True,
        meaning="folders below which traces may be written to the paths that `dyno` asks for; an empty list: traces "
        "are only in the store",
    )
    dynolog_writer_socket: Path | None = setting(
        "dynolog.writer_socket", Maybe(ParsedText("path", checked_socket_path)), WRITER_SOCKET, reload=True,
        meaning="socket of the writer service, which writes these traces with their users' permissions, for a daemon "
        "that is not root; empty: such a daemon writes these traces only for its own user",
    )
    # fmt: on


@dataclass(frozen=True, slots=True, kw_only=True)
class CountersConfig(ForeignToolsConfig):  # classes with slots can only be combined in a chain
    """Hardware counters."""

    # By hand: a line of facts and one of meaning for each setting.
    # fmt: off
    counters_socket: Path | None = setting(
        "counters.socket", Maybe(ParsedText("path", checked_socket_path)),
        HostDefault(
            default_counters_socket, f"{COUNTERS_SOCKET} if this user may use it", f'"{COUNTERS_SOCKET}"',
        ),
        meaning="socket of the kinetod-counters service; empty: the daemon starts kinetod-counters by itself, with its "
        "own permissions, when counters are requested",
    )
    counters_backend: str = setting(
        "counters.backend", Choice("auto", "amdgpu", "cupti", "cupti-python", "level-zero"), "auto",
        meaning="backend of a kinetod-counters that the daemon starts; auto: cupti, amdgpu and level-zero, for the "
        "GPUs that the host has; cupti: NVIDIA GPUs, with libcupti; cupti-python: NVIDIA GPUs, with NVIDIA's Python "
        "package (pip install cupti-python); amdgpu: AMD GPUs, with the kernel driver; level-zero: Intel GPUs, with "
        "Level Zero's tools API",
    )
    counters_library: Path | None = setting(
        "counters.library", Maybe(ExistingFile()), None,
        meaning="library for the backend of a kinetod-counters that the daemon starts (with auto: for cupti); empty: "
        "the backend's default, which for cupti is that of the wheel nvidia-cuda-cupti, otherwise the host's",
    )
    # fmt: on


def checked_json_log(text: str) -> str:
    """Checks a value of metrics.json_log: nothing, `log` or an absolute path. Raises ValueError."""
    if text not in (JSON_LOG_OFF, JSON_LOG_OWN) and not Path(text).is_absolute():
        raise ValueError(f"{text!r:.80} is neither {JSON_LOG_OWN!r} nor an absolute path")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig(CountersConfig):  # classes with slots can only be combined in a chain
    """Metrics. Durations are nanoseconds."""

    # By hand: a line of facts and one of meaning for each setting.
    # fmt: off
    metrics_listen: ListenAddress | None = setting(
        "metrics.listen", Maybe(ParsedText("address", parse_metrics_listen)), None,
        meaning="where to serve /metrics and /health over HTTP, as host:port such as 127.0.0.1:9417; empty: nowhere",
    )
    metrics_allow_remote: bool = setting(
        "metrics.allow_remote", Switch(), False,
        meaning="whether metrics.listen may be an address that other hosts can reach; they are not authenticated",
    )
    gpu_jobs_dir: Path = setting(
        "metrics.gpu_jobs_dir", FolderPath(), Path("/run/kinetod-slurm"),
        meaning="folder that maps GPUs to batch jobs, in the format of dcgm-exporter's --hpc-job-mapping-dir; the "
        "prolog in deploy/slurm maintains it",
    )
    gpu_activity: bool = setting(
        "metrics.gpu_activity", Switch(), True,
        meaning="whether to count the activity of the units of NVIDIA GPUs (multiprocessors, tensor cores, memory, "
        "links) for metrics and `kinetoctl top`; Hopper and later have counters for it that profilers do not need",
    )
    metrics_compat: str = setting(
        "metrics.compat", Choice(COMPAT_OFF, COMPAT_DYNOLOG), COMPAT_OFF,
        meaning="tool whose metric names /metrics also serves; dynolog: those of Dynolog's Prometheus logger, with its "
        "units and labels",
    )
    json_log: str = setting(
        "metrics.json_log", ParsedText("path", checked_json_log), JSON_LOG_OFF,
        meaning="where to write metrics as lines of JSON, like Dynolog's --use_JSON: a file, or log for the daemon's "
        "own log; empty: nowhere",
    )
    host_interval_ns: int = setting(
        "metrics.host_interval", Duration(least_ns=_SECOND_NS), 60 * _SECOND_NS,
        meaning="how often the host is measured for metrics.compat and metrics.json_log; differences and "
        "percentages cover this interval",
    )
    gpu_interval_ns: int = setting(
        "metrics.gpu_interval", Duration(least_ns=0), 0,
        meaning="how often the GPUs are measured for metrics.json_log; 0: never. The devices stay open in between",
    )
    metrics_interfaces: tuple[str, ...] = setting(
        "metrics.interfaces", ListOf(Text()), (),
        meaning="prefixes of the names of network interfaces that metrics.compat and metrics.json_log cover; an empty "
        "list: all interfaces",
    )
    # fmt: on
