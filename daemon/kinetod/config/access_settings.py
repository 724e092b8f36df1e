"""The settings about access, as rows for the table of all settings."""

from collections.abc import Iterable

from kinetod.config.setting import SettingSpec
from kinetod.config.settings import Config, parse_listen
from kinetod.config.value_kinds import (
    Count,
    ExistingFile,
    FolderPath,
    Kind,
    ListOf,
    Maybe,
    ParsedText,
    SecretFile,
    Size,
    Switch,
    TableOf,
)
from kinetod.permissions.role_grants import parse_grant, parse_role, wrong_names

TLS_KEYS = ("access.tls_certificate", "access.tls_key", "access.tls_client_ca")

ACCESS_KEYS: tuple[SettingSpec, ...] = (
    SettingSpec(
        name="access.local_roles",
        field="local_roles",
        kind=ListOf(ParsedText("role", parse_role)),
        meaning="roles of every user of this host: own, jobs, viewer, admin; an empty list: only those named below",
        reload=True,
    ),
    SettingSpec(
        name="access.admin_users",
        field="admin_users",
        kind=ListOf(Kind()),
        meaning="users of this host who may do everything, besides root and the daemon's own user",
        reload=True,
    ),
    SettingSpec(
        name="access.admin_groups",
        field="admin_groups",
        kind=ListOf(Kind()),
        meaning="groups of this host whose members may do everything",
        reload=True,
    ),
    SettingSpec(
        name="access.viewer_users",
        field="viewer_users",
        kind=ListOf(Kind()),
        meaning="users of this host who may see and fetch everything",
        reload=True,
    ),
    SettingSpec(
        name="access.viewer_groups",
        field="viewer_groups",
        kind=ListOf(Kind()),
        meaning="groups of this host whose members may see and fetch everything",
        reload=True,
    ),
    SettingSpec(
        name="access.certificates",
        field="certificates",
        kind=TableOf(ParsedText("roles", parse_grant)),
        meaning='whom a client stands for, by its certificate\'s URI:…, DNS:… or CN:…: "own as ada", "viewer", "admin"',
        computed=dict,
        reload=True,
    ),
    SettingSpec(
        name="access.tls_certificate",
        field="tls_certificate",
        kind=Maybe(ExistingFile()),
        meaning="the server's certificate and its chain (PEM), or credential:NAME; it is read again when it changes",
    ),
    SettingSpec(
        name="access.tls_key",
        field="tls_key",
        kind=Maybe(SecretFile()),
        meaning="the key of that certificate (PEM), or credential:NAME",
    ),
    SettingSpec(
        name="access.tls_client_ca",
        field="tls_client_ca",
        kind=Maybe(ExistingFile()),
        meaning="the authorities that sign clients' certificates (PEM), or credential:NAME",
    ),
    SettingSpec(
        name="access.loopback_without_tls",
        field="loopback_without_tls",
        kind=Switch(),
        meaning="whether host:port on loopback is served without TLS; callers are then identified by the kernel's "
        "table of connections",
    ),
    SettingSpec(
        name="access.kubernetes",
        field="kubernetes",
        kind=Switch(),
        meaning="whether callers with a Kubernetes token are served at access.kubernetes_listen; they may trace the "
        "pods on which they may create pods/exec",
    ),
    SettingSpec(
        name="access.kubernetes_listen",
        field="kubernetes_listen",
        kind=ParsedText("address", parse_listen),
        meaning="host:port for them: on loopback without TLS, where `kubectl port-forward` ends; elsewhere "
        "with the server's certificate, but without client certificates",
    ),
    SettingSpec(
        name="access.kubernetes_audiences",
        field="kubernetes_audiences",
        kind=ListOf(Kind()),
        meaning="accepted audiences of tokens; an empty list: the API server's own",
        reload=True,
    ),
    SettingSpec(
        name="access.audit_file",
        field="audit_file",
        kind=Maybe(FolderPath()),
        meaning="file of the audit log, one JSON object per line; empty: the journal. It is reopened on a reload",
    ),
    SettingSpec(
        name="access.requests_per_second",
        field="requests_per_second",
        kind=Count(1, 1_000_000),
        meaning="requests that one caller may send per second; four seconds' worth may come at once",
        reload=True,
    ),
    SettingSpec(
        name="access.max_connections",
        field="max_connections",
        kind=Count(1, 4096),
        meaning="connections that one user, or one address beyond loopback, may have at the same time",
        reload=True,
    ),
    SettingSpec(
        name="access.max_calls_per_user",
        field="max_calls_per_user",
        kind=Count(1, 4096),
        meaning="calls that one caller may have in progress at the same time, health checks and watches included",
        reload=True,
    ),
    SettingSpec(
        name="access.max_watches_per_user",
        field="max_watches_per_user",
        kind=Count(1, 1024),
        meaning="of these, watches of the host (`kinetoctl top`)",
        reload=True,
    ),
    SettingSpec(
        name="access.max_streams_per_user",
        field="max_streams_per_user",
        kind=Count(1, 4096),
        meaning="of these, fetches and verifications of stored files",
        reload=True,
    ),
    SettingSpec(
        name="access.max_captures_per_user",
        field="max_captures_per_user",
        kind=Count(1),
        meaning="captures that one user may have running at the same time; administrators have captures.max_captures",
        reload=True,
    ),
    SettingSpec(
        name="access.quota_per_user",
        field="quota_per_user_bytes",
        kind=Size(least=0),
        meaning="what the captures of one user may take before the next one is refused; 0: no limit. It does not apply "
        "to administrators",
        reload=True,
    ),
)


def _kubernetes_problems(config: Config) -> Iterable[tuple[str, str]]:
    if not config.kubernetes:
        return
    if not config.node_name:
        yield "kubernetes.node_name", "is missing; access.kubernetes needs it to know the pods of this node"
    if config.loopback_without_tls:
        yield (
            "access.loopback_without_tls",
            "must be off when access.kubernetes is on: forwarded connections come from a socket of root",
        )
    address = config.kubernetes_listen
    if address.path is not None:
        yield (
            "access.kubernetes_listen",
            f"{address} is not host:port; callers on a socket are identified without a token",
        )
    elif not address.is_loopback and not config.has_tls:
        yield (
            "access.kubernetes_listen",
            f"{address} is not a loopback address and needs certificates ({', '.join(TLS_KEYS)}): tokens must not be "
            "sent in the clear",
        )


def access_problems(config: Config) -> Iterable[tuple[str, str]]:
    """Conflicts between settings: the name of one of them, and the problem."""
    files = (config.tls_certificate, config.tls_key, config.tls_client_ca)
    if any(files) and not all(files):
        missing = [name for name, file in zip(TLS_KEYS, files, strict=True) if file is None]
        yield missing[0], f"is missing; TLS needs {', '.join(TLS_KEYS)}"
    for name in wrong_names(config.certificates):
        yield f"access.certificates.{name}", "is not a name of a certificate; it must begin with URI:, DNS: or CN:"
    yield from _kubernetes_problems(config)
    if config.has_tls:
        return
    for address in config.listen:
        if address.is_loopback and not config.loopback_without_tls:
            yield (
                "server.listen",
                f"{address} needs certificates ({', '.join(TLS_KEYS)}), or access.loopback_without_tls = true",
            )
        elif address.path is None and not address.is_loopback:
            yield (
                "server.listen",
                f"{address} is not a loopback address and needs certificates ({', '.join(TLS_KEYS)}): without TLS "
                "anybody on the network could trace processes here. You can also listen on unix:/path and use ssh -L",
            )
