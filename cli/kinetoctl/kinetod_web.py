"""`kinetod-web`: the web page for the users of a host or of many, as an unprivileged client of their daemons."""

import logging
import os
import pwd
import re
import signal
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
from kineto_protos.options import Parsed
from kineto_trace.base.install_advice import install_advice

from kinetoctl.base.common_options import DEFAULT_TIMEOUT_NS, CommonOptions
from kinetoctl.base.value_types import ADDRESS, DURATION, SIZE
from kinetoctl.errors import CliError, Refused
from kinetoctl.exit_codes import ExitCode
from kinetoctl.output.console import say, wait_until_set

NS_PER_S = 10**9
MIN_MEMORY_BYTES = 512 << 20
ANSWER_BYTES = 32 << 20  # of a worker, which a trace may have taken over
DEFAULT_ADDRESS = "unix:/run/kineto/kinetod.sock"
DEFAULT_HEADER = "X-Remote-User"
_TLS = ("tls_certificate", "tls_key", "tls_client_ca")
_HEADER = re.compile(r"[A-Za-z0-9-]{1,100}")
_SERVICE = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]{0,252}):(\d{1,5})")


def _parse_origin(text: str) -> str:
    """Scheme, host and port as browsers send them. Raises ValueError."""
    parts = urlsplit(text)
    if parts.scheme not in ("https", "http") or not parts.hostname or text != f"{parts.scheme}://{parts.netloc}":
        raise ValueError(f"expected https://name or https://name:port, got {text!r}")
    if "@" in parts.netloc or parts.netloc != parts.netloc.lower():
        raise ValueError(f"expected a lower-case name without a user, got {text!r}")
    if parts.port in (80, 443):
        raise ValueError(f"leave out port {parts.port}, as browsers do")
    return text


def _parse_listen(text: str) -> tuple[str, int]:
    """Host and port. Raises ValueError."""
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+):(\d{1,5})", text)
    if not match or int(match[2]) > 65_534:
        raise ValueError(f"expected host:port, got {text!r}")
    return match[1].strip("[]"), int(match[2])


def _parse_service(text: str) -> tuple[str, int]:
    """Name and port. Raises ValueError."""
    match = _SERVICE.fullmatch(text)
    if not match or not 0 < int(match[2]) < 65_536:
        raise ValueError(f"expected name:port, got {text!r}")
    return match[1], int(match[2])


def _parse_user(text: str) -> int:
    """The uid of a user of this host. Raises ValueError."""
    try:
        uid = int(text) if text.isascii() and text.isdigit() else pwd.getpwnam(text).pw_uid
    except KeyError:
        raise ValueError(f"this host has no user {text!r}") from None
    if uid == int(Path("/proc/sys/kernel/overflowuid").read_text()):
        raise ValueError(f"{text!r} is not one user: it stands for all users that the kernel cannot map here")
    return uid


def _parse_header(text: str) -> str:
    """Raises ValueError."""
    if not _HEADER.fullmatch(text):
        raise ValueError(f"expected a header name, got {text!r}")
    return text


_PATH = click.Path(path_type=Path)
_OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--origin", {"type": Parsed("origin", _parse_origin), "required": True,
                  "help": "Origin of the pages as browsers see it: https://name:port."}),
    ("--ui-origin", {"type": Parsed("origin", _parse_origin),
                     "help": "Origin of the Perfetto UI, which must differ from --origin in name or port; without "
                     "it, there is no timeline."}),
    ("--listen", {"type": Parsed("address", _parse_listen), "metavar": "HOST:PORT",
                  "help": "Address for browsers that have client certificates; the Perfetto UI gets the next port."}),
    ("--tls-certificate", {"type": _PATH, "help": "The server's certificate with its chain, for --listen (PEM)."}),
    ("--tls-key", {"type": _PATH, "help": "The key of the server's certificate (PEM)."}),
    ("--tls-client-ca", {"type": _PATH, "help": "The certificate authorities that sign users' certificates (PEM)."}),
    ("--socket", {"type": _PATH, "help": "Serve proxies on this Unix socket; the Perfetto UI gets one ending in .ui."}),
    ("--proxy-user", {"multiple": True, "metavar": "USER",
                      "help": "User account of a proxy that is trusted to name users on --socket; repeatable."}),
    ("--user-header", {"type": Parsed("header", _parse_header), "default": DEFAULT_HEADER, "show_default": True,
                       "help": "Header in which proxies name the user."}),
    ("--address", {"type": ADDRESS, "help": "Address of the daemon: unix:/path or host:port.  "
                   f"[default: {DEFAULT_ADDRESS}]"}),
    ("--hosts", {"multiple": True, "metavar": "FILE|A,B,C",
                 "help": "Many hosts instead of one daemon, as in `kinetoctl ps --hosts`: a list, or a file (FILE, "
                 "@FILE) that is read again regularly; repeatable."}),
    ("--service", {"type": Parsed("service", _parse_service), "metavar": "NAME:PORT",
                   "help": "Instead of --hosts: the daemons at all addresses of a name, such as that of a headless "
                   "Kubernetes service; it is resolved again regularly."}),
    ("--timeout", {"type": DURATION, "default": DEFAULT_TIMEOUT_NS, "help": "How long to wait for each response from "
                   "the daemon.  [default: 30s]"}),
    ("--worker-memory", {"type": SIZE, "default": "2GiB",
                         "help": "Memory limit of each of the two processes that analyse traces.  [default: 2GiB]"}),
    ("--worker-time", {"type": DURATION, "default": "60s",
                       "help": "Time limit for one analysis.  [default: 60s]"}),
    ("--user-space", {"type": SIZE, "default": "2GiB",
                      "help": "Disk space per user for the traces that they view.  [default: 2GiB]"}),
)  # fmt: skip


def _variable(option: str) -> str:
    return f"KINETOD_WEB_{option.removeprefix('--').replace('-', '_').upper()}"


VARIABLES = tuple(_variable(name) for name, _ in _OPTIONS)


def _with_options(function: Any) -> Any:
    for name, attributes in reversed(_OPTIONS):
        function = click.option(name, envvar=_variable(name), show_envvar=True, **attributes)(function)
    return function


@click.command("kinetod-web", context_settings={"help_option_names": ["-h", "--help"]})
@_with_options
def command(**given: Any) -> int:
    """Serve the web page to the users of a host, or of many (--hosts, --service).

    A client certificate (--listen) or a proxy in front (--socket) identifies the user. The daemon of each host decides
    what that user is allowed to do; its setting access.web_proxies must name the user or certificate of this server.
    At least one of --listen and --socket is required, and nothing is served over TCP without TLS.
    """
    if find_spec("h11") is None:
        raise Refused(f"kinetod-web needs h11, which is not installed: {install_advice('h11')}")
    from kinetoctl.web.shared.serving import running_shared  # with the rest of what only the server needs

    options = _options(given)
    settings = CommonOptions(
        address=given["address"] or DEFAULT_ADDRESS,
        output="table",
        color=False,
        quiet=True,
        timeout_s=given["timeout"] / NS_PER_S,
    )
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    with running_shared(options, settings):
        logging.getLogger(__name__).info("serving %s", given["origin"])
        wait_until_set(ended)
    return ExitCode.DONE


def _options(given: dict[str, Any]) -> Any:
    """The options of the server. Raises UsageError."""
    from kinetoctl.web.analyses.analysis_queue import WorkerLimits
    from kinetoctl.web.http.web_messages import Origins
    from kinetoctl.web.shared.serving import SharedOptions

    if given["listen"] is None and given["socket"] is None:
        raise click.UsageError("give --listen, --socket, or both")
    if given["ui_origin"] == given["origin"]:
        raise click.UsageError("--ui-origin must differ from --origin: the Perfetto UI needs a weaker security policy")
    limits = WorkerLimits(
        memory_bytes=max(given["worker_memory"], MIN_MEMORY_BYTES),
        job_s=max(1, given["worker_time"] // NS_PER_S),
        answer_bytes=ANSWER_BYTES,
    )
    return SharedOptions(
        origins=Origins(given["origin"], given["ui_origin"] or ""),
        tcp=_tcp(given),
        proxy=_proxy(given),
        user_header=given["user_header"],
        limits=limits,
        user_space=given["user_space"],
        hosts=_hosts(given),
    )


def _hosts(given: dict[str, Any]) -> Any:
    """Where the hosts of a fleet are looked up; None for one daemon. Raises UsageError."""
    from kinetoctl.web.shared.fleet_hosts import hosts_of_lists, hosts_of_service

    if len(twice := [f"--{name}" for name in ("address", "hosts", "service") if given[name]]) > 1:
        raise click.UsageError(f"{' and '.join(twice)} cannot be combined: use only one of them")
    if given["service"] is not None:
        return hosts_of_service(*given["service"])
    try:
        return hosts_of_lists(given["hosts"]) if given["hosts"] else None
    except ValueError as exc:
        raise click.UsageError(f"--hosts: {exc}") from exc


def _tcp(given: dict[str, Any]) -> Any:
    from kinetoctl.web.shared.doors import WebTlsFiles
    from kinetoctl.web.shared.serving import TcpDoor

    if given["listen"] is None:
        return None
    if missing := [name for name in _TLS if given[name] is None]:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise click.UsageError(f"--listen needs {names}: TCP is served only with TLS and client certificates")
    if not given["origin"].startswith("https://"):
        raise click.UsageError("--listen serves https: --origin must begin with https://")
    host, port = given["listen"]
    certificate, key, client_ca = (given[name] for name in _TLS)
    files = WebTlsFiles(certificate=certificate, key=key, client_ca=client_ca)
    return TcpDoor(host=host, port=port, ui=port and port + 1 if given["ui_origin"] else None, files=files)


def _proxy(given: dict[str, Any]) -> Any:
    from kinetoctl.web.shared.serving import ProxyDoor

    if given["socket"] is None:
        return None
    if not given["proxy_user"]:
        raise click.UsageError("--socket needs --proxy-user: only these accounts are allowed to name users there")
    try:
        uids = [_parse_user(text) for text in given["proxy_user"]]
    except ValueError as exc:
        raise click.UsageError(f"--proxy-user: {exc}") from exc
    path: Path = given["socket"]
    return ProxyDoor(socket=path, ui=path.with_name(f"{path.name}.ui") if given["ui_origin"] else None, uids=uids)


def main() -> None:
    """Runs `kinetod-web` and exits."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    os.umask(0o077)
    try:
        sys.exit(command.main(prog_name="kinetod-web", standalone_mode=False))
    except click.ClickException as exc:
        exc.show()
        sys.exit(ExitCode.USAGE)
    except CliError as exc:
        say(f"kinetod-web: {exc}", err=True)
        sys.exit(exc.exit_code)


if __name__ == "__main__":
    main()
