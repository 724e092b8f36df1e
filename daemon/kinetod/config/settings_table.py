"""The table of all settings. Options, environment variables, the file, its documents and their checks come from it.

To add a setting: one row in KEYS and a field of the same meaning with its default in `settings.Config`; then
`make config-docs`. A rule about several settings at once is a function in RULES.

    name        section.key, as in the file
    field       of Config
    kind        how it is read and written (value_kinds)
    meaning     one sentence, without the default
    option      on the command line, where there is one; its variable is then KINETOD_<OPTION>, else
                KINETOD_<SECTION>_<KEY>. Secrets have none: everybody can read command lines
    reload      a SIGHUP is enough: whoever uses it reads `settings.current.<field>` each time, or subscribes
    computed    the default where it depends on the host or the user (Config's own is then not used)
    says        that default in words, and `shown` as the example file has it
    off_switch  the option and its variable turn the setting off (--no-attach)
    secret      the value is never shown, and its file must not be readable by everybody
"""

import os
from collections.abc import Callable, Iterable

from kinetod.base.object_store_urls import checked_endpoint, checked_url, missing_extra
from kinetod.config.access_settings import ACCESS_KEYS, access_problems
from kinetod.config.hook_settings import HOOK_KEYS, hook_problems
from kinetod.config.setting import VARIABLE_PREFIX as VARIABLE_PREFIX
from kinetod.config.setting import SettingSpec as SettingSpec
from kinetod.config.settings import (
    Config,
    checked_socket_path,
    default_agent_socket,
    default_helper_socket,
    default_listen,
    default_state_dir,
    metrics_problem,
    parse_listen,
    parse_metrics_listen,
)
from kinetod.config.value_kinds import (
    Choice,
    Count,
    Duration,
    FolderPath,
    Kind,
    ListOf,
    Maybe,
    ParsedText,
    SecretFile,
    Size,
    Switch,
)

CONFIG_VARIABLE = "KINETOD_CONFIG"

SECTIONS = {
    "server": "Where the daemon can be reached, and what it logs.",
    "captures": "What a capture may take, and how long its steps may last.",
    "attach": "Attaching the agent to processes that were started without it.",
    "store": "Where captures are kept, and for how long; see docs/storage.md.",
    "upload": "Captures in an object store; see docs/storage.md.",
    "hooks": "What is run or called when a capture has ended; see docs/orchestration.md.",
    "access": "Who may do what, and how much; see docs/access.md.",
    "kubernetes": "What the daemon asks Kubernetes; see docs/kubernetes.md.",
    "metrics": "What Prometheus can read; see docs/metrics.md.",
}


def _default_decode_workers() -> int:
    return min(max(2, os.cpu_count() or 2), 4)


KEYS: tuple[SettingSpec, ...] = (
    SettingSpec(
        name="server.listen",
        field="listen",
        kind=ListOf(ParsedText("address", parse_listen)),
        meaning="where clients connect: unix:/path, or host:port, which needs certificates (access.tls_…)",
        option="--listen",
        computed=lambda: (default_listen(),),
        says="unix:<runtime dir>/kinetod.sock",
        shown='["unix:/run/kineto/kinetod.sock"]',
    ),
    SettingSpec(
        name="server.agent_socket",
        field="agent_socket",
        kind=ParsedText("path", checked_socket_path),
        meaning="where agents connect",
        option="--agent-socket",
        computed=default_agent_socket,
        says="<runtime dir>/agent.sock",
        shown='"/run/kineto/agent.sock"',
    ),
    SettingSpec(
        name="server.log_level",
        field="log_level",
        kind=Choice("debug", "info", "warning", "error"),
        meaning="what to log to standard error: debug, info, warning or error",
        option="--log-level",
        reload=True,
    ),
    SettingSpec(
        name="captures.buffer_limit",
        field="buffer_limit_bytes",
        kind=Size(),
        meaning="recording buffers per target unless a request says otherwise",
        option="--buffer-limit",
        reload=True,
    ),
    SettingSpec(
        name="captures.max_duration",
        field="max_duration_ns",
        kind=Duration(),
        meaning="longest capture that may be requested",
        option="--max-duration",
        reload=True,
    ),
    SettingSpec(
        name="captures.max_captures",
        field="max_captures",
        kind=Count(1),
        meaning="captures that may run at the same time",
        option="--max-captures",
        reload=True,
    ),
    SettingSpec(
        name="captures.max_trace_bytes",
        field="max_trace_bytes",
        kind=Size(),
        meaning="raw bytes per target after which a capture is stopped; what was recorded until then is kept",
        option="--max-trace-bytes",
        reload=True,
    ),
    SettingSpec(
        name="captures.agent_deadline",
        field="agent_deadline_ns",
        kind=Duration(),
        meaning="how long an agent may take to answer before its target fails",
        option="--agent-deadline",
        reload=True,
    ),
    SettingSpec(
        name="captures.process_deadline",
        field="process_deadline_ns",
        kind=Duration(),
        meaning="how long an agent may take to stop its sources",
        option="--process-deadline",
        reload=True,
    ),
    SettingSpec(
        name="captures.decode_deadline",
        field="decode_deadline_ns",
        kind=Duration(),
        meaning="how long decoding one target may take",
        option="--decode-deadline",
        reload=True,
    ),
    SettingSpec(
        name="captures.decode_workers",
        field="decode_workers",
        kind=Count(1, 64),
        meaning="processes that decode traces",
        option="--decode-workers",
        computed=_default_decode_workers,
        says="2 to 4, by CPU count",
        shown="2",
    ),
    SettingSpec(
        name="captures.decode_memory",
        field="decode_memory_bytes",
        kind=Size(least=256 << 20),
        meaning="private memory that decoding one target may take; beyond it that target fails with OUT_OF_MEMORY",
        reload=True,
    ),
    SettingSpec(
        name="captures.decode_sandbox",
        field="decode_sandbox",
        kind=Choice("available", "required"),
        meaning="how decoders are confined; available: with what this kernel offers; required: kinetod does not start "
        "without Landlock and seccomp",
    ),
    SettingSpec(
        name="attach.enabled",
        field="attach",
        kind=Switch(),
        meaning="whether processes that have no agent get one; --no-attach: only trace processes that have one",
        option="--no-attach",
        off_switch=True,
    ),
    SettingSpec(
        name="attach.deadline",
        field="attach_deadline_ns",
        kind=Duration(),
        meaning="how long attaching an agent to a process may take",
        option="--attach-deadline",
        reload=True,
    ),
    SettingSpec(
        name="attach.keep_agent",
        field="keep_agent_ns",
        kind=Duration(least_ns=0),
        meaning="how long an attached agent stays after its last capture; 0: it leaves at once",
        option="--keep-agent",
        reload=True,
    ),
    SettingSpec(
        name="attach.helper_socket",
        field="helper_socket",
        kind=Maybe(ParsedText("path", checked_socket_path)),
        meaning="socket of the attach helper service, which attaches to other users' processes for a daemon that may "
        "not; empty: the daemon attaches by itself, as far as its own rights allow",
        computed=default_helper_socket,
        says="/run/kinetod-attach/attach.sock if this user may use it; root needs none",
        shown='"/run/kinetod-attach/attach.sock"',
    ),
    SettingSpec(
        name="store.state_dir",
        field="state_dir",
        kind=FolderPath(),
        meaning="where captures are stored",
        option="--state-dir",
        computed=default_state_dir,
        says="/var/lib/kineto for root, else ~/.local/state/kineto",
        shown='"/var/lib/kineto"',
    ),
    SettingSpec(
        name="store.min_free_bytes",
        field="min_free_bytes",
        kind=Size(least=0),
        meaning="space to leave free on the disk of the state folder; captures stop at it",
        option="--min-free-bytes",
        reload=True,
    ),
    SettingSpec(
        name="store.min_free_percent",
        field="min_free_percent",
        kind=Count(0, 90),
        meaning="the same as a percentage of that disk; the larger of the two applies",
        reload=True,
    ),
    SettingSpec(
        name="store.start_free_bytes",
        field="start_free_bytes",
        kind=Size(least=0),
        meaning="space that must be free beyond store.min_free_bytes for a new capture to begin",
        reload=True,
    ),
    SettingSpec(
        name="store.max_age",
        field="max_age_ns",
        kind=Duration(least_ns=0),
        meaning="how long a capture stays after its end, unless it is pinned or not yet uploaded; 0: no limit",
        reload=True,
    ),
    SettingSpec(
        name="store.max_bytes",
        field="max_store_bytes",
        kind=Size(least=0),
        meaning="what all captures may take on this disk; beyond it, who takes most loses the oldest; 0: no limit",
        reload=True,
    ),
    SettingSpec(
        name="store.max_bytes_per_user",
        field="max_user_bytes",
        kind=Size(least=0),
        meaning="what the captures of one user may take; beyond it, that user's oldest are removed; 0: no limit",
        reload=True,
    ),
    SettingSpec(
        name="store.share_per_user",
        field="user_share_percent",
        kind=Count(0, 100),
        meaning="percentage of store.max_bytes, or of the disk if that is less, guaranteed to each user; what cannot "
        "be removed of one user (pinned, running, not yet uploaded) takes no more; 0: no shares",
        reload=True,
    ),
    SettingSpec(
        name="store.max_captures_per_user",
        field="max_user_captures",
        kind=Count(0),
        meaning="captures of one user in the store; beyond it, that user's oldest are removed; 0: no limit",
        reload=True,
    ),
    SettingSpec(
        name="store.max_entry_age",
        field="max_entry_age_ns",
        kind=Duration(least_ns=0),
        meaning="how long an uploaded capture stays in the list once its files are no longer here; 0: forever",
        reload=True,
    ),
    SettingSpec(
        name="store.retention_interval",
        field="retention_interval_ns",
        kind=Duration(),
        meaning="how often to look for captures to remove, besides at the end of each capture",
        reload=True,
    ),
    SettingSpec(
        name="store.keep_local",
        field="keep_local",
        kind=Switch(),
        meaning="whether a capture stays on this disk once it is uploaded and verified, until retention removes it",
        reload=True,
    ),
    SettingSpec(
        name="upload.url",
        field="upload_url",
        kind=ParsedText("address", checked_url),
        meaning="where ended captures go: s3://bucket/prefix, gs://…, az://container/… or file:///…; empty: nowhere",
        reload=True,
    ),
    SettingSpec(
        name="upload.credentials",
        field="upload_credentials",
        kind=Maybe(SecretFile()),
        meaning="file with the object store's credentials, or credential:NAME; empty: where its library looks for them",
        reload=True,
    ),
    SettingSpec(
        name="upload.endpoint",
        field="upload_endpoint",
        kind=ParsedText("address", checked_endpoint),
        meaning="https://host:port of an S3-compatible store; empty: Amazon's, or what AWS_ENDPOINT_URL says",
        reload=True,
    ),
    SettingSpec(
        name="upload.parallel",
        field="upload_parallel",
        kind=Count(1, 32),
        meaning="captures uploaded at the same time; a user with none in progress gets one more",
        reload=True,
    ),
    SettingSpec(
        name="upload.max_bytes_per_second",
        field="upload_bytes_per_second",
        kind=Size(least=0),
        meaning="what all uploads together may send per second; 0: no limit",
        reload=True,
    ),
    SettingSpec(
        name="upload.retry_pause",
        field="upload_retry_pause_ns",
        kind=Duration(),
        meaning="the longest pause between two attempts; the first is one second, and each one doubles",
        reload=True,
    ),
    SettingSpec(
        name="upload.timeout",
        field="upload_timeout_ns",
        kind=Duration(),
        meaning="how long the object store may be silent before an attempt fails",
        reload=True,
    ),
    *HOOK_KEYS,
    *ACCESS_KEYS,
    SettingSpec(
        name="kubernetes.pod_resources",
        field="pod_resources",
        kind=Switch(),
        meaning="whether to ask the kubelet which containers have which GPUs; with an attach helper, the connection "
        "comes from `kubelet_socket` in its attach.toml",
    ),
    SettingSpec(
        name="kubernetes.kubelet_socket",
        field="kubelet_socket",
        kind=ParsedText("path", checked_socket_path),
        meaning="where a daemon without an attach helper asks it",
    ),
    SettingSpec(
        name="kubernetes.node_name",
        field="node_name",
        kind=Kind(),
        meaning="this node's name at the API server, for access.kubernetes",
    ),
    SettingSpec(
        name="kubernetes.account_dir",
        field="account_dir",
        kind=FolderPath(),
        meaning="folder with `token` and `ca.crt`, with which kinetod asks the API server",
    ),
    SettingSpec(
        name="metrics.listen",
        field="metrics_listen",
        kind=Maybe(ParsedText("address", parse_metrics_listen)),
        meaning="where to serve /metrics and /health over HTTP, as host:port such as 127.0.0.1:9417; empty: nowhere",
    ),
    SettingSpec(
        name="metrics.allow_remote",
        field="metrics_allow_remote",
        kind=Switch(),
        meaning="whether metrics.listen may be an address that other hosts can reach; they are not authenticated",
    ),
    SettingSpec(
        name="metrics.gpu_jobs_dir",
        field="gpu_jobs_dir",
        kind=FolderPath(),
        meaning="folder that says which batch jobs have which GPU, as dcgm-exporter's --hpc-job-mapping-dir; the "
        "prolog of deploy/slurm keeps it",
    ),
)

# What must hold between settings: each yields (name of a key, problem) for what is wrong.
RULES: tuple[Callable[[Config], Iterable[tuple[str, str]]], ...] = (
    access_problems,
    hook_problems,
    lambda config: [("metrics.listen", problem)] if (problem := metrics_problem(config)) else [],
    lambda config: [("upload.url", problem)] if (problem := missing_extra(config.upload_url)) else [],
)

BY_NAME = {key.name: key for key in KEYS}
