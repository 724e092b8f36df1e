"""Puts the parts of kinetod-web together and serves them: the pages at their doors, the Perfetto UI at others."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kinetoctl.base.common_options import CommonOptions
from kinetoctl.base.temporary_folders import removable_folder
from kinetoctl.web.analyses.analysis_queue import WORKERS, AnalysisQueue
from kinetoctl.web.analyses.result_cache import ResultCache
from kinetoctl.web.analyses.worker_process import WorkerLimits
from kinetoctl.web.http.security import Origins, page_policy, ui_policy
from kinetoctl.web.http.web_messages import WebAnswer, WebRequest
from kinetoctl.web.pages.timeline_page import ui_file
from kinetoctl.web.shared.confined_worker import ConfinedWorker, WarmProcess
from kinetoctl.web.shared.doors import (
    ProxyEntrance,
    TlsEntrance,
    WebDoor,
    WebEntrance,
    WebTlsFiles,
    listening_tcp,
    listening_unix,
)
from kinetoctl.web.shared.fleet_hosts import FleetHosts, HostSource
from kinetoctl.web.shared.http_connection import SharedSite
from kinetoctl.web.shared.page_user import PageUser
from kinetoctl.web.shared.shared_application import SharedApplication
from kinetoctl.web.shared.user_spaces import MAX_RUNNING, UserSpaces

RESULTS_BYTES = 8 << 20  # of JSON; the values take some ten times as much memory


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpDoor:
    """Where browsers with certificates connect. ui: port of the Perfetto UI; None: none."""

    host: str
    port: int
    ui: int | None
    files: WebTlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyDoor:
    """Where the proxies of these users connect. ui: socket of the Perfetto UI; None: none."""

    socket: Path
    ui: Path | None
    uids: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedOptions:
    """origins: where browsers see both parts. user_space: bytes of downloaded traces of one user.

    hosts: of a fleet, instead of one daemon.
    """

    origins: Origins
    tcp: TcpDoor | None = None
    proxy: ProxyDoor | None = None
    user_header: str
    limits: WorkerLimits
    user_space: int
    hosts: HostSource | None = None


@dataclass(frozen=True, slots=True)
class RunningShared:
    """A server that serves: the port of its TCP door, if it has one, and its spaces."""

    port: int | None
    spaces: UserSpaces


@contextmanager
def running_shared(options: SharedOptions, settings: CommonOptions) -> Iterator[RunningShared]:
    """Serves within the context. Raises Refused."""
    with ExitStack() as stack:
        root = stack.enter_context(removable_folder("kinetod-web-"))
        warm = stack.enter_context(closing(WarmProcess(options.limits)))
        workers = [ConfinedWorker(warm, options.limits) for _ in range(WORKERS)]
        queue = AnalysisQueue(options.limits, workers=workers, cache=ResultCache(RESULTS_BYTES), most_each=MAX_RUNNING)
        stack.enter_context(queue)
        hosts = stack.enter_context(closing(FleetHosts(options.hosts))) if options.hosts is not None else None
        spaces = UserSpaces(
            settings, queue, root, ui_origin=options.origins.ui, most_bytes=options.user_space, hosts=hosts
        )
        stack.enter_context(closing(spaces))
        pages = SharedSite(
            origin=options.origins.pages,
            policy=page_policy(options.origins),
            application=SharedApplication(spaces),
        )
        ui = SharedSite(origin=options.origins.ui, policy=ui_policy(options.origins), application=_ui_file)
        port = _open_tcp(options, pages, ui, stack) if options.tcp is not None else None
        if options.proxy is not None:
            _open_proxy(options.proxy, options.user_header, pages, ui, stack)
        yield RunningShared(port, spaces)


def _open_tcp(options: SharedOptions, pages: SharedSite, ui: SharedSite, stack: ExitStack) -> int:
    assert options.tcp is not None
    tcp = options.tcp
    entrance = TlsEntrance(tcp.files, options.user_header)
    door = _opened(WebDoor(listening_tcp(tcp.host, tcp.port), entrance, pages), stack)
    if tcp.ui is not None:
        _opened(WebDoor(listening_tcp(tcp.host, tcp.ui), entrance, ui), stack)
    return int(door.server_address[1])


def _open_proxy(proxy: ProxyDoor, user_header: str, pages: SharedSite, ui: SharedSite, stack: ExitStack) -> None:
    entrance: WebEntrance = ProxyEntrance(proxy.uids, user_header)
    _opened(WebDoor(listening_unix(proxy.socket), entrance, pages), stack)
    stack.callback(proxy.socket.unlink, missing_ok=True)
    if proxy.ui is not None:
        _opened(WebDoor(listening_unix(proxy.ui), entrance, ui), stack)
        stack.callback(proxy.ui.unlink, missing_ok=True)


def _opened(door: WebDoor, stack: ExitStack) -> WebDoor:
    stack.callback(door.server_close)
    threading.Thread(target=door.serve, name="door", daemon=True).start()
    stack.callback(door.shutdown)
    return door


def _ui_file(request: WebRequest, _user: PageUser) -> WebAnswer:
    """A file of the Perfetto UI, the same for everybody. Raises WebError."""
    return ui_file(request)
