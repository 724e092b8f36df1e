"""The settings that other profilers' processes and clients need; a part of settings.Config."""

from dataclasses import dataclass
from pathlib import Path

from kinetod.config.addresses import ListenAddress, checked_socket_path, parse_dynolog_rpc
from kinetod.config.default_paths import WRITER_SOCKET
from kinetod.config.setting import setting
from kinetod.config.value_kinds import Choice, FolderPath, ListOf, Maybe, ParsedText, Switch, Text


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
