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
        meaning="whether to answer the polls of processes that were started with KINETO_USE_DAEMON=1, as Dynolog would",
    )
    dynolog_socket_dirs: tuple[Path, ...] = setting(
        "dynolog.socket_dirs", ListOf(FolderPath()), (),
        meaning="folders where such processes look for the daemon's socket, as in their KINETO_IPC_SOCKET_DIR; needs "
        "dynolog.ipc",
    )
    dynolog_containers: bool = setting(
        "dynolog.containers", Switch(), True,
        meaning="whether to answer such processes in network namespaces of their own, too, as containers have; needs "
        "dynolog.ipc, and root or the attach helper",
    )
    dynolog_tracing: str = setting(
        "dynolog.tracing", Choice("agent", "kineto", "refuse"), "agent", reload=True,
        meaning="who records in such a process unless a request says it: kinetod's agent, the process's own libkineto "
        "(kineto), or nobody (refuse), whatever a request says",
    )
    dynolog_rpc: ListenAddress | None = setting(
        "dynolog.rpc", Maybe(ParsedText("address", parse_dynolog_rpc)), None,
        meaning="where to serve the requests of `dyno`: loopback (both families, port 1778), host:port or unix:/path; "
        "empty: nowhere",
    )
    dynolog_allow_remote: bool = setting(
        "dynolog.allow_remote", Switch(), False,
        meaning="whether dynolog.rpc may be an address that other hosts can reach; its callers are not authenticated",
    )
    dynolog_remote_user: str = setting(
        "dynolog.remote_user", Text(), "", reload=True,
        meaning="user of this host for whom requests of `dyno` from other hosts count, with that user's roles; empty: "
        "they are refused",
    )
    dynolog_log_roots: tuple[Path, ...] = setting(
        "dynolog.log_roots", ListOf(FolderPath()), (), reload=True,
        meaning="folders below which a trace may be written where `dyno` asked for it; an empty list: traces are in "
        "the store only",
    )
    dynolog_writer_socket: Path | None = setting(
        "dynolog.writer_socket", Maybe(ParsedText("path", checked_socket_path)), WRITER_SOCKET, reload=True,
        meaning="socket of the writer service, which writes such traces as their users for a daemon that is not root; "
        "empty: none, and such a daemon writes for its own user only",
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
        "own rights, when somebody asks for counters",
    )
    counters_backend: str = setting(
        "counters.backend", Choice("auto", "amdgpu", "cupti", "cupti-python", "level-zero"), "auto",
        meaning="what samples in a kinetod-counters that the daemon starts: auto: all that the host has GPUs for; "
        "cupti: NVIDIA's GPUs, by its own use of libcupti; cupti-python: the same by NVIDIA's package (pip install "
        "cupti-python); amdgpu: AMD's GPUs, by the kernel's driver; level-zero: Intel's, by Level Zero's tools",
    )
    counters_library: Path | None = setting(
        "counters.library", Maybe(ExistingFile()), None,
        meaning="the library that such a kinetod-counters loads for its backend, with auto the libcupti; empty: that "
        "of the wheel nvidia-cuda-cupti, else the host's",
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
        meaning="folder that says which batch jobs have which GPU, as dcgm-exporter's --hpc-job-mapping-dir; the "
        "prolog of deploy/slurm keeps it",
    )
    gpu_activity: bool = setting(
        "metrics.gpu_activity", Switch(), True,
        meaning="whether to count what the units of NVIDIA's GPUs do (multiprocessors, tensor cores, memory, links), "
        "for metrics and `kinetoctl top`; Hopper and later have such counters, which profilers do not need",
    )
    metrics_compat: str = setting(
        "metrics.compat", Choice(COMPAT_OFF, COMPAT_DYNOLOG), COMPAT_OFF,
        meaning="another tool whose metric names /metrics serves, too; dynolog: those of its Prometheus logger, with "
        "its units and labels",
    )
    json_log: str = setting(
        "metrics.json_log", ParsedText("path", checked_json_log), JSON_LOG_OFF,
        meaning="where metrics go as lines of JSON, as Dynolog's --use_JSON writes them: a file, or log, which is the "
        "daemon's own log; empty: nowhere",
    )
    host_interval_ns: int = setting(
        "metrics.host_interval", Duration(least_ns=_SECOND_NS), 60 * _SECOND_NS,
        meaning="how often the host is measured for metrics.compat and metrics.json_log; their differences and "
        "percentages are over this time",
    )
    gpu_interval_ns: int = setting(
        "metrics.gpu_interval", Duration(least_ns=0), 0,
        meaning="how often the GPUs are measured for metrics.json_log; 0: never. In between, their devices stay open",
    )
    metrics_interfaces: tuple[str, ...] = setting(
        "metrics.interfaces", ListOf(Text()), (),
        meaning="how the names of network interfaces begin that metrics.compat and metrics.json_log have; an empty "
        "list: all interfaces",
    )
    # fmt: on
