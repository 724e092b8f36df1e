"""The daemon's settings: each is declared once, as a field of Config, and the value in force.

Options, environment variables, the file, its documents and their checks come from these declarations.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from kinetod.base.logs import in_terminal
from kinetod.base.object_store_urls import checked_endpoint, checked_url
from kinetod.config.addresses import (
    HELPER_SOCKET,
    ListenAddress,
    checked_profiles,
    checked_socket_path,
    checked_webhook,
    default_agent_socket,
    default_helper_socket,
    default_listen,
    default_state_dir,
    parse_listen,
)
from kinetod.config.metrics_settings import MetricsConfig
from kinetod.config.value_kinds import (
    METADATA,
    Choice,
    Count,
    Duration,
    ExistingFile,
    FolderPath,
    HostDefault,
    ListOf,
    Maybe,
    ParsedText,
    SecretFile,
    SettingSpec,
    Size,
    Switch,
    TableOf,
    Text,
    checked_plugin,
    setting,
)
from kinetod.permissions.role_grants import Grant, parse_grant, parse_role
from kinetod.permissions.role_policy import Role

SECOND_NS = 10**9
DAY_NS = 86_400 * SECOND_NS
ALL_ENDS = "all"  # of captures, for hooks

SECTIONS = {
    "server": "Where the daemon can be reached, and what it logs.",
    "captures": "Limits on captures, and on how long their steps may take.",
    "attach": "Attaching the agent to processes that were started without it.",
    "plugins": "Accelerators that plug-ins add; see docs/plugins.md.",
    "store": "Where captures are kept, and for how long; see docs/storage.md.",
    "upload": "Uploading captures to an object store; see docs/storage.md.",
    "hooks": "What to run or call when a capture has ended; see docs/orchestration.md.",
    "access": "Who may do what, and how much; see docs/access.md.",
    "kubernetes": "What the daemon asks Kubernetes for; see docs/kubernetes.md.",
    "counters": "Hardware counters of GPUs; see docs/counters.md.",
    "metrics": "Metrics for Prometheus; see docs/metrics.md.",
    "dynolog": "Processes and clients made for Dynolog; see docs/dynolog.md.",
}


def _default_log_level() -> str:
    """A terminal may belong to who uses kinetoctl in it, too: it gets warnings alone."""
    return "warning" if in_terminal() else "info"


def _default_listen() -> tuple[ListenAddress, ...]:
    return (default_listen(),)


def _default_decode_workers() -> int:
    return min(max(2, os.cpu_count() or 2), 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(MetricsConfig):
    """Everything that can be set, in the order of the documents. Sizes are bytes, durations nanoseconds."""

    # By hand: a line of facts and one of meaning for each setting.
    # fmt: off
    listen: tuple[ListenAddress, ...] = setting(
        "server.listen", ListOf(ParsedText("address", parse_listen)),
        HostDefault(_default_listen, "unix:<runtime dir>/kinetod.sock", '["unix:/run/kineto/kinetod.sock"]'),
        option="--listen",
        meaning="where clients connect: unix:/path, or host:port, which needs certificates (access.tls_…)",
    )
    agent_socket: Path = setting(
        "server.agent_socket", ParsedText("path", checked_socket_path),
        HostDefault(default_agent_socket, "<runtime dir>/agent.sock", '"/run/kineto/agent.sock"'),
        option="--agent-socket",
        meaning="where agents connect",
    )
    log_level: str = setting(
        "server.log_level", Choice("debug", "info", "warning", "error"),
        HostDefault(_default_log_level, '"info"; in a terminal "warning"', '"info"'), option="--log-level", reload=True,
        meaning="what to log to standard error: debug, info, warning or error",
    )

    buffer_limit_bytes: int = setting(
        "captures.buffer_limit", Size(), 128 << 20, option="--buffer-limit", reload=True,
        meaning="memory for recording buffers per target, unless a request specifies it",
    )
    max_duration_ns: int = setting(
        "captures.max_duration", Duration(), 600 * SECOND_NS, option="--max-duration", reload=True,
        meaning="longest duration that a capture may have",
    )
    max_captures: int = setting(
        "captures.max_captures", Count(1), 32, option="--max-captures", reload=True,
        meaning="how many captures may run at the same time",
    )
    max_trace_bytes: int = setting(
        "captures.max_trace_bytes", Size(), 8 << 30, option="--max-trace-bytes", reload=True,
        meaning="raw bytes per target after which a capture is stopped; what was recorded up to then is kept",
    )
    agent_deadline_ns: int = setting(
        "captures.agent_deadline", Duration(), 10 * SECOND_NS, option="--agent-deadline", reload=True,
        meaning="how long an agent may take to answer before its target fails",
    )
    process_deadline_ns: int = setting(
        "captures.process_deadline", Duration(), 30 * SECOND_NS, option="--process-deadline", reload=True,
        meaning="how long an agent may take to stop its sources",
    )
    gpu_drain_limit_ns: int = setting(
        "captures.gpu_drain_limit", Duration(least_ns=10**6), 300 * 10**6, option="--gpu-drain-limit", reload=True,
        meaning="how long CUPTI's first and last call may wait for work queued on a GPU (this delays the program's "
        "launches, too); if the wait would be longer, CUPTI is not called",
    )
    decode_deadline_ns: int = setting(
        "captures.decode_deadline", Duration(), 600 * SECOND_NS, option="--decode-deadline", reload=True,
        meaning="how long decoding one target may take",
    )
    decode_workers: int = setting(
        "captures.decode_workers", Count(1, 64), HostDefault(_default_decode_workers, "2 to 4, by CPU count", "2"),
        option="--decode-workers",
        meaning="number of processes that decode traces",
    )
    decode_memory_bytes: int = setting(
        "captures.decode_memory", Size(least=256 << 20), 1 << 30, reload=True,
        meaning="private memory that decoding one target may use; a target that needs more fails with OUT_OF_MEMORY",
    )
    decode_sandbox: str = setting(
        "captures.decode_sandbox", Choice("available", "required"), "available",
        meaning="how decoders are confined; available: as far as this kernel allows; required: kinetod does not start "
        "without Landlock and seccomp",
    )

    attach: bool = setting(
        "attach.enabled", Switch(), True, option="--no-attach",
        meaning="whether to attach an agent to processes that have none; --no-attach: trace only processes "
        "that have one",
    )
    attach_deadline_ns: int = setting(
        "attach.deadline", Duration(), 10 * SECOND_NS, option="--attach-deadline", reload=True,
        meaning="how long attaching an agent to a process may take",
    )
    keep_agent_ns: int = setting(
        "attach.keep_agent", Duration(least_ns=0), 600 * SECOND_NS, option="--keep-agent", reload=True,
        meaning="how long an attached agent stays after its last capture; 0: it leaves at once",
    )
    helper_socket: Path | None = setting(
        "attach.helper_socket", Maybe(ParsedText("path", checked_socket_path)),
        HostDefault(
            default_helper_socket, f"{HELPER_SOCKET} if this user may use it; root needs none", f'"{HELPER_SOCKET}"',
        ),
        meaning="socket of the attach helper service, which attaches to other users' processes for a daemon that is "
        "not allowed to; empty: the daemon attaches by itself, as far as its own permissions allow",
    )

    plugins: tuple[str, ...] = setting(
        "plugins.sources", ListOf(ParsedText("name", checked_plugin)), (),
        meaning="plug-ins that agents use, by entry point name; `kinetoctl plugin list` lists the installed ones; an "
        "empty list: none",
    )

    state_dir: Path = setting(
        "store.state_dir", FolderPath(),
        HostDefault(default_state_dir, "/var/lib/kineto for root, else ~/.local/state/kineto", '"/var/lib/kineto"'),
        option="--state-dir",
        meaning="where captures are stored",
    )
    min_free_bytes: int = setting(
        "store.min_free_bytes", Size(least=0), 1 << 30, option="--min-free-bytes", reload=True,
        meaning="space to leave free on the disk of the state folder; captures are stopped when less is left",
    )
    min_free_percent: int = setting(
        "store.min_free_percent", Count(0, 90), 0, reload=True,  # min_free_bytes takes precedence if it is larger
        meaning="percentage of the state folder's disk to leave free; the larger of this and store.min_free_bytes "
        "applies",
    )
    start_free_bytes: int = setting(
        "store.start_free_bytes", Size(least=0), 256 << 20, reload=True,
        meaning="space that must be free, in addition to store.min_free_bytes, for a new capture to begin",
    )
    max_age_ns: int = setting(
        "store.max_age", Duration(least_ns=0), 30 * DAY_NS, reload=True,
        meaning="how long a capture is kept after its end, unless it is pinned or not yet uploaded; 0: no limit",
    )
    max_store_bytes: int = setting(
        "store.max_bytes", Size(least=0), 100 << 30, reload=True,
        meaning="space that all captures may occupy on this disk; beyond it, the oldest captures of the user who "
        "occupies the most are removed; 0: no limit",
    )
    max_user_bytes: int = setting(
        "store.max_bytes_per_user", Size(least=0), 0, reload=True,
        meaning="space that the captures of one user may occupy; beyond it, that user's oldest are removed; 0: no "
        "limit",
    )
    user_share_percent: int = setting(
        "store.share_per_user", Count(0, 100), 25, reload=True,
        meaning="percentage of store.max_bytes (of the disk, if that is smaller) that is guaranteed to each user; it "
        "also limits a user's captures that cannot be removed (pinned, running, not yet uploaded); 0: off",
    )
    max_user_captures: int = setting(
        "store.max_captures_per_user", Count(0), 5000, reload=True,
        meaning="number of captures that one user may have in the store; beyond it, that user's oldest are removed; 0: "
        "no limit",
    )
    max_entry_age_ns: int = setting(
        "store.max_entry_age", Duration(least_ns=0), 365 * DAY_NS, reload=True,
        meaning="how long an uploaded capture stays in the list once its files are no longer on this host; 0: forever",
    )
    retention_interval_ns: int = setting(
        "store.retention_interval", Duration(), 600 * SECOND_NS, reload=True,
        meaning="how often to look for captures to remove; this also happens whenever a capture ends",
    )
    keep_local: bool = setting(
        "store.keep_local", Switch(), True, reload=True,
        meaning="whether an uploaded and verified capture also stays on this disk, until retention removes it",
    )

    upload_url: str = setting(
        "upload.url", ParsedText("address", checked_url), "", reload=True,
        meaning="where to upload captures that have ended: s3://bucket/prefix, gs://…, az://container/… or "
        "file:///…; empty: nowhere",
    )
    upload_credentials: Path | None = setting(
        "upload.credentials", Maybe(SecretFile()), None, reload=True,
        meaning="file with the object store's credentials, or credential:NAME; empty: those that its client library "
        "finds",
    )
    upload_endpoint: str = setting(
        "upload.endpoint", ParsedText("address", checked_endpoint), "", reload=True,
        meaning="https://host:port of an S3-compatible store; empty: Amazon's, or the one in AWS_ENDPOINT_URL",
    )
    upload_parallel: int = setting(
        "upload.parallel", Count(1, 32), 2, reload=True,
        meaning="how many captures are uploaded at the same time, plus one for a user who has none in progress",
    )
    upload_bytes_per_second: int = setting(
        "upload.max_bytes_per_second", Size(least=0), 0, reload=True,
        meaning="bytes that all uploads together may send per second; 0: no limit",
    )
    upload_retry_pause_ns: int = setting(
        "upload.retry_pause", Duration(), 600 * SECOND_NS, reload=True,
        meaning="longest pause between two attempts; pauses start at one second and double each time",
    )
    upload_timeout_ns: int = setting(
        "upload.timeout", Duration(), 60 * SECOND_NS, reload=True,
        meaning="how long the object store may be silent before an attempt fails",
    )

    hook_on: tuple[str, ...] = setting(
        "hooks.on", ListOf(Choice(ALL_ENDS, "done", "partial", "failed", "cancelled")), (ALL_ENDS,), reload=True,
        meaning="which captures trigger hooks, by how they ended: all, done, partial, failed, cancelled",
    )
    hook_command: tuple[str, ...] = setting(
        "hooks.command", ListOf(Text()), (), reload=True,
        meaning="program to run when a capture has ended, and its arguments; it gets the capture's JSON on standard "
        "input; empty: none",
    )
    hook_webhooks: tuple[str, ...] = setting(
        "hooks.webhook", ListOf(ParsedText("address", checked_webhook)), (), reload=True,
        meaning="https addresses to which the JSON of a capture that has ended is posted (http only on this host)",
    )
    hook_secret: Path | None = setting(
        "hooks.webhook_secret", Maybe(SecretFile()), None, reload=True,
        meaning="file with the secret for signing webhooks, or credential:NAME; empty: they are not signed",
    )
    hook_ca: Path | None = setting(
        "hooks.webhook_ca", Maybe(ExistingFile()), None, reload=True,
        meaning="file (PEM) with the certificate authorities to trust for webhooks; empty: the system's",
    )
    hook_profiles: str = setting(
        "hooks.profiles", ParsedText("address", checked_profiles), "", reload=True,
        meaning="where to push the profiles of captures: otlp+https://host:4318, otlp+grpcs://host:4317 or "
        "pyroscope+https://host:4040 (without TLS only on this host); empty: nowhere; see docs/profiles.md",
    )
    hook_profiles_headers: Path | None = setting(
        "hooks.profiles_headers", Maybe(SecretFile()), None, reload=True,
        meaning="file with headers for pushing profiles, such as Authorization, one `Name: value` per line, or "
        "credential:NAME; empty: none",
    )
    hook_profiles_ca: Path | None = setting(
        "hooks.profiles_ca", Maybe(ExistingFile()), None, reload=True,
        meaning="file (PEM) with the certificate authorities to trust for the receiver of profiles; empty: the "
        "system's",
    )
    hook_timeout_ns: int = setting(
        "hooks.timeout", Duration(), 30 * SECOND_NS, reload=True,
        meaning="how long the command, or one attempt to call a webhook or push profiles, may take",
    )
    hook_retry_ns: int = setting(
        "hooks.retry_for", Duration(least_ns=0), 600 * SECOND_NS, reload=True,
        meaning="how long to retry a failing webhook or push, with pauses that start at one second and double each "
        "time; 0: never",
    )
    hook_parallel: int = setting(
        "hooks.parallel", Count(1, 32), 2, reload=True,
        meaning="how many runs of the command, or calls to one address, may be in progress at a time, plus one for a "
        "user who has none in progress",
    )

    local_roles: tuple[Role, ...] = setting(
        "access.local_roles", ListOf(ParsedText("role", parse_role)), (Role.OWN, Role.JOBS), reload=True,
        meaning="roles of every user of this host: own, jobs, viewer, admin; an empty list: only those granted below",
    )
    admin_users: tuple[str, ...] = setting(
        "access.admin_users", ListOf(Text()), (), reload=True,
        meaning="users of this host who may do everything, besides root and the daemon's own user",
    )
    admin_groups: tuple[str, ...] = setting(
        "access.admin_groups", ListOf(Text()), (), reload=True,
        meaning="groups of this host whose members may do everything",
    )
    viewer_users: tuple[str, ...] = setting(
        "access.viewer_users", ListOf(Text()), (), reload=True,
        meaning="users of this host who may see and fetch everything",
    )
    viewer_groups: tuple[str, ...] = setting(
        "access.viewer_groups", ListOf(Text()), (), reload=True,
        meaning="groups of this host whose members may see and fetch everything",
    )
    certificates: Mapping[str, Grant] = setting(
        "access.certificates", TableOf(ParsedText("roles", parse_grant)), {}, reload=True,
        meaning='roles of clients, and the user they act as, by URI:…, DNS:… or CN:… of their certificate: "own as '
        'ada", "viewer", "admin"',
    )
    web_proxies: tuple[str, ...] = setting(
        "access.web_proxies", ListOf(Text()), (), reload=True,
        meaning="web front ends (kinetod-web) that may act for the users of their pages: a user of this host (for the "
        "Unix socket), or the URI:…, DNS:… or CN:… of a certificate",
    )
    web_proxy_roles: tuple[Role, ...] = setting(
        "access.web_proxy_roles", ListOf(ParsedText("role", parse_role)), (Role.OWN, Role.JOBS, Role.VIEWER),
        reload=True,
        meaning="which of their roles users keep when they come through a web front end; root and the daemon's own "
        "user keep none",
    )
    tls_certificate: Path | None = setting(
        "access.tls_certificate", Maybe(ExistingFile()), None,
        meaning="the server's certificate and chain (PEM), or credential:NAME; it is read again when it changes",
    )
    tls_key: Path | None = setting(
        "access.tls_key", Maybe(SecretFile()), None,
        meaning="the private key of the server's certificate (PEM), or credential:NAME",
    )
    tls_client_ca: Path | None = setting(
        "access.tls_client_ca", Maybe(ExistingFile()), None,
        meaning="the certificate authorities that sign clients' certificates (PEM), or credential:NAME",
    )
    loopback_without_tls: bool = setting(
        "access.loopback_without_tls", Switch(), False,
        meaning="whether host:port on loopback is served without TLS; callers are then identified with the kernel's "
        "connection table",
    )
    kubernetes: bool = setting(
        "access.kubernetes", Switch(), False,
        meaning="whether callers with a Kubernetes token are served at access.kubernetes_listen; they may trace the "
        "pods in which they are allowed to create pods/exec",
    )
    kubernetes_listen: ListenAddress = setting(
        "access.kubernetes_listen", ParsedText("address", parse_listen), ListenAddress(host="127.0.0.1", port=50052),
        meaning="host:port for callers with a Kubernetes token: without TLS on loopback, where `kubectl port-forward` "
        "connects; elsewhere with the server's certificate, but without client certificates",
    )
    kubernetes_audiences: tuple[str, ...] = setting(
        "access.kubernetes_audiences", ListOf(Text()), (), reload=True,
        meaning="audiences accepted in tokens; an empty list: the API server's own",
    )
    audit_file: Path | None = setting(
        "access.audit_file", Maybe(FolderPath()), None,
        meaning="file of the audit log, one JSON object per line, reopened on a reload; empty: audit.jsonl in the "
        "state folder, if systemd created it or the daemon runs in a terminal, otherwise the journal",
    )
    requests_per_second: int = setting(
        "access.requests_per_second", Count(1, 1_000_000), 50, reload=True,
        meaning="requests that one caller may send per second; bursts of four seconds' worth are allowed",
    )
    max_connections: int = setting(
        "access.max_connections", Count(1, 4096), 64, reload=True,
        meaning="connections that one user, or one address other than loopback, may have at the same time",
    )
    max_calls_per_user: int = setting(
        "access.max_calls_per_user", Count(1, 4096), 64, reload=True,
        meaning="calls that one caller may have in progress at the same time, health checks and watches included",
    )
    max_watches_per_user: int = setting(
        "access.max_watches_per_user", Count(1, 1024), 4, reload=True,
        meaning="host watches (`kinetoctl top`) that one caller may have in progress, and as many counter watches; "
        "both also count as calls",
    )
    max_streams_per_user: int = setting(
        "access.max_streams_per_user", Count(1, 4096), 16, reload=True,
        meaning="fetches and verifications of stored files, and reads of stacks, that one caller may have in progress; "
        "they also count as calls",
    )
    max_captures_per_user: int = setting(
        "access.max_captures_per_user", Count(1), 8, reload=True,
        meaning="captures that one user may have running at the same time; for administrators only "
        "captures.max_captures applies",
    )
    quota_per_user_bytes: int = setting(
        "access.quota_per_user", Size(least=0), 0, reload=True,
        meaning="space that the captures of one user may occupy before new captures are refused; 0: no limit. "
        "Administrators are exempt",
    )

    pod_resources: bool = setting(
        "kubernetes.pod_resources", Switch(), False,
        meaning="whether to ask the kubelet which containers have which GPUs; if there is an attach helper, it opens "
        "the connection (to `kubelet_socket` in its attach.toml)",
    )
    kubelet_socket: Path = setting(
        "kubernetes.kubelet_socket", ParsedText("path", checked_socket_path),
        Path("/var/lib/kubelet/pod-resources/kubelet.sock"),
        meaning="the kubelet's socket, for a daemon without an attach helper",
    )
    node_name: str = setting(
        "kubernetes.node_name", Text(), "",
        meaning="this node's name in the Kubernetes API, for access.kubernetes",
    )
    account_dir: Path = setting(
        "kubernetes.account_dir", FolderPath(), Path("/var/run/secrets/kubernetes.io/serviceaccount"),
        meaning="folder with the `token` and `ca.crt` that kinetod uses for the API server",
    )
    # fmt: on

    @property
    def needed_bytes(self) -> int:
        """Bytes that must be free on the disk for a capture to begin."""
        return self.min_free_bytes + self.start_free_bytes

    @property
    def has_tls(self) -> bool:
        """Whether certificates are configured."""
        return all((self.tls_certificate, self.tls_key, self.tls_client_ca))


class Settings:
    """The configuration in force. Only a reload replaces it, as a whole, on the event loop.

    Read `current` at every use: a stored value does not change with a reload.
    """

    def __init__(self, config: Config) -> None:
        self.current = config
        self._subscribers: list[Callable[[Config], None]] = []

    def subscribe(self, changed: Callable[[Config], None]) -> None:
        """Calls `changed` with every later configuration, on the event loop; it must not block or raise."""
        self._subscribers.append(changed)

    def replace(self, config: Config) -> None:
        """Puts another configuration in force and notifies the subscribers."""
        self.current = config
        for changed in self._subscribers:
            changed(config)


def serves_everybody(config: Config) -> bool:
    """Whether the daemon can reach the processes of all users, or only those of its own."""
    return os.geteuid() == 0 or config.helper_socket is not None


def socket_mode(config: Config) -> int:
    """The mode of a socket that users connect to: the kernel identifies them."""
    return 0o666 if serves_everybody(config) else 0o600


_DECLARED = (replace(each.metadata[METADATA], field=each.name) for each in fields(Config))
KEYS: tuple[SettingSpec, ...] = tuple(sorted(_DECLARED, key=lambda key: list(SECTIONS).index(key.section)))
BY_NAME = {key.name: key for key in KEYS}
