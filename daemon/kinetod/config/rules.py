"""What must hold between settings. Each rule yields (name of a key, problem) for what is wrong."""

import importlib.util
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

from kineto_protos.endpoints import is_loopback

from kinetod.base.header_file import headers_in
from kinetod.base.object_store_urls import missing_extra
from kinetod.base.webhook_signature import secret_in
from kinetod.config.metrics_settings import COMPAT_OFF, JSON_LOG_OFF
from kinetod.config.profile_addresses import ProfileForm, parse_profiles
from kinetod.config.settings import SECOND_NS, Config
from kinetod.permissions.role_grants import wrong_names

TLS_KEYS = ("access.tls_certificate", "access.tls_key", "access.tls_client_ca")
MAX_WEBHOOKS = 8


def access_problems(config: Config) -> Iterable[tuple[str, str]]:
    """Conflicts between settings: the name of one of them, and the problem."""
    files = (config.tls_certificate, config.tls_key, config.tls_client_ca)
    if any(files) and not all(files):
        missing = [name for name, file in zip(TLS_KEYS, files, strict=True) if file is None]
        yield missing[0], f"is missing; TLS needs {', '.join(TLS_KEYS)}"
    for name in wrong_names(config.certificates):
        yield f"access.certificates.{name}", "is not a name of a certificate; it must begin with URI:, DNS: or CN:"
    for name in wrong_names(name for name in config.web_proxies if ":" in name):
        yield "access.web_proxies", f"{name!r:.80} is neither a user nor a name of a certificate: URI:, DNS: or CN:"
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


def hook_problems(config: Config) -> Iterable[tuple[str, str]]:
    """Settings of hooks that cannot work."""
    if config.hook_command and (problem := _command_problem(config.hook_command[0])):
        yield "hooks.command", problem
    if len(config.hook_webhooks) > MAX_WEBHOOKS:
        yield "hooks.webhook", f"has {len(config.hook_webhooks)} addresses; at most {MAX_WEBHOOKS} are allowed"
    if config.hook_secret is not None:
        try:
            secret_in(config.hook_secret.read_bytes())
        except (OSError, ValueError) as exc:
            yield "hooks.webhook_secret", f"{config.hook_secret} {exc}"
    pushes_otlp = config.hook_profiles and parse_profiles(config.hook_profiles).form is not ProfileForm.PYROSCOPE
    if pushes_otlp and not has_otlp():
        yield "hooks.profiles", "OTLP needs the package opentelemetry-proto; run pip install 'kinetod[otlp]'"
    if config.hook_profiles_headers is not None:
        try:
            headers_in(config.hook_profiles_headers.read_bytes())
        except (OSError, ValueError) as exc:
            yield "hooks.profiles_headers", f"{config.hook_profiles_headers} {exc}"


def has_otlp() -> bool:
    """Whether the messages of OTLP profiles are installed."""
    try:
        return importlib.util.find_spec("opentelemetry.proto.profiles.v1development") is not None
    except ImportError:  # a package above it is missing
        return False


def _command_problem(program: str) -> str:
    """Why the command cannot or must not be run; "" if it can."""
    path = Path(program)
    if not path.is_absolute():
        return f"{program!r:.80} is not an absolute path; PATH is not searched, and no shell is used"
    try:
        status = path.stat()
    except OSError as exc:
        return f"{path}: {exc.strerror}"
    if not stat.S_ISREG(status.st_mode) or not os.access(path, os.X_OK, effective_ids=True):
        return f"{path} cannot be executed by this user (uid {os.geteuid()}); run chmod +x {path}"
    if status.st_mode & stat.S_IWOTH:
        return f"{path} can be changed by everybody (mode {stat.S_IMODE(status.st_mode):04o}); run chmod o-w {path}"
    return ""


def metrics_problem(config: Config) -> str:
    """Why metrics.listen is refused; "" if it is not."""
    address = config.metrics_listen
    if address is None or config.metrics_allow_remote or is_loopback(address.host):
        return ""
    return (
        f"{address} can be reached from other hosts and does not authenticate them; listen on 127.0.0.1, or set "
        "metrics.allow_remote = true"
    )


def dynolog_problems(config: Config) -> Iterable[tuple[str, str]]:
    """Settings of the door for Dynolog's clients that are refused."""
    address = config.dynolog_rpc
    if address is None:
        return
    if address.path is None and not (config.dynolog_allow_remote or address.is_loopback):
        yield (
            "dynolog.rpc",
            f"{address} can be reached from other hosts, and the protocol does not authenticate them; write loopback, "
            "or set dynolog.allow_remote = true",
        )
    if address.path is None and config.kubernetes:
        yield (
            "dynolog.rpc",
            f"{address} must be unix:/path or empty when access.kubernetes is on: forwarded connections come from a "
            "socket of root",
        )


def compat_problems(config: Config) -> Iterable[tuple[str, str]]:
    """Settings of metrics under other names that would do nothing, or too much."""
    if config.metrics_compat != COMPAT_OFF and config.metrics_listen is None:
        yield "metrics.compat", "serves nothing without metrics.listen, such as 127.0.0.1:8080 for Dynolog's scrapers"
    if config.gpu_interval_ns and config.json_log == JSON_LOG_OFF:
        yield "metrics.gpu_interval", "writes nothing without metrics.json_log; /metrics has the GPUs by itself"
    if 0 < config.gpu_interval_ns < SECOND_NS:
        yield "metrics.gpu_interval", "must be 0 or at least 1s: the drivers measure PCIe for 40 ms of each GPU"


RULES: tuple[Callable[[Config], Iterable[tuple[str, str]]], ...] = (
    access_problems,
    hook_problems,
    lambda config: [("metrics.listen", problem)] if (problem := metrics_problem(config)) else [],
    dynolog_problems,
    compat_problems,
    lambda config: [("upload.url", problem)] if (problem := missing_extra(config.upload_url)) else [],
)
