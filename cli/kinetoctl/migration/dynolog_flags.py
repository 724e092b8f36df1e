"""Every flag of Dynolog's daemon (facebookincubator/dynolog@c3a231a, August 2026), and what becomes of it in kinetod.

The flags of the two libraries that parse them and write its log, gflags and glog, are there as well.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


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


_SCRAPE = "nothing is pushed; let an OpenTelemetry collector or a Prometheus agent scrape metrics.listen"
_META = "of an endpoint inside Meta; scrape metrics.listen instead"
_DCGM = "DCGM is not asked; NVML and the kernel's drivers give what docs/metrics.md lists"
_FIELDS = "the lines have all that is known of a GPU, its profiling fields (1001 to 1012) from Hopper on"
_TPU = "kinetod knows no TPUs"
_PERF = "the counters of the CPUs are not read: mips and mega_cycles_per_second are missing"
_LIBRARY = "of the libraries that Dynolog is built with"
_LOG = "server.log_level is what kinetod logs, to standard error or the journal"


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
               "on loopback only: nobody is authenticated here; dynolog.allow_remote allows other addresses",
               "dynolog.rpc")
    yield flag("enable_ipc_monitor", switch, "false", same, "", "dynolog.ipc")
    yield flag("use_prometheus", switch, "false", same, "", "metrics.listen", "metrics.compat")
    yield flag("prometheus_address", text, "127.0.0.1", same, "", "metrics.listen", needs="use_prometheus")
    yield flag("prometheus_port", number, "8080", same, "", "metrics.listen", needs="use_prometheus")
    yield flag("use_JSON", switch, "false", same,
               "the lines go to kinetod's log; metrics.json_log may name a file", "metrics.json_log")
    yield flag("kernel_monitor_reporting_interval_s", number, "60", same, "", "metrics.host_interval")
    yield flag("enable_gpu_monitor", switch, "false", close, _DCGM, "metrics.gpu_interval")
    yield flag("dcgm_reporting_interval_s", number, "10", same, "", "metrics.gpu_interval", needs="enable_gpu_monitor")
    yield flag("filter_nic_interfaces", switch, "false", same, "", "metrics.interfaces")
    yield flag("allow_interface_prefixes", text, "eno,ens,enp,enx,eth", same, "", "metrics.interfaces",
               needs="filter_nic_interfaces")
    yield flag("enable_pod_resources_attribution", switch, "false", same,
               "with an attach helper, kubelet_socket in its attach.toml says where", "kubernetes.pod_resources")
    yield flag("pod_resources_socket", text, "/var/lib/kubelet/pod-resources/kubelet.sock", same, "",
               "kubernetes.kubelet_socket", needs="enable_pod_resources_attribution")
    yield flag("pod_resources_gpu_resource", text, "nvidia.com/gpu", none,
               "every resource whose devices are GPUs counts", needs="enable_pod_resources_attribution")
    yield flag("pod_resources_tpu_resource", text, "google.com/tpu", none, _TPU, needs="enable_tpu_monitor")
    yield flag("enable_env_var_attribution", switch, "true", close,
               "user and job come from the kernel and metrics.gpu_jobs_dir, Slurm's account and partition from the "
               "environment where kinetod may read it",
               needs="enable_gpu_monitor")
    yield flag("env_attribution_mappings_file", text, "", none,
               "no other variables are read; metrics.gpu_jobs_dir names the jobs", needs="enable_gpu_monitor")
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
    "K8S_NODE_NAME": (FlagOutcome.NO_COUNTERPART, "", "only access.kubernetes needs a name: kubernetes.node_name"),
}
UNIT_SETTINGS = {  # of a unit, and why they are not taken over
    "User": "kinetod.service runs as the user kineto, with an attach helper for other users' processes",
    "Group": "kinetod.service runs as the user kineto, with an attach helper for other users' processes",
    "CPUQuota": "kinetod.service has its own limits: `systemctl edit kinetod` changes them",
    "MemoryMax": "kinetod.service has its own limits: `systemctl edit kinetod` changes them",
    "MemoryLimit": "kinetod.service has its own limits: `systemctl edit kinetod` changes them",
    "StandardOutput": "kinetod logs to the journal; metrics.json_log may name a file for the lines of metrics",
    "StandardError": "kinetod logs to the journal; metrics.json_log may name a file for the lines of metrics",
}
