"""The settings of [metrics]: what Prometheus can read, and metrics under Dynolog's names; a part of settings.Config."""

from dataclasses import dataclass
from pathlib import Path

from kinetod.config.addresses import ListenAddress, parse_metrics_listen
from kinetod.config.counters_settings import CountersConfig
from kinetod.config.setting import setting
from kinetod.config.value_kinds import Choice, Duration, FolderPath, ListOf, Maybe, ParsedText, Switch, Text

_SECOND_NS = 10**9
COMPAT_OFF, COMPAT_DYNOLOG = "off", "dynolog"
JSON_LOG_OFF, JSON_LOG_OWN = "", "log"  # of metrics.json_log; anything else is a path


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
        meaning="whose names /metrics has besides kinetod's own; dynolog: those of its Prometheus logger, with its "
        "units and labels",
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
