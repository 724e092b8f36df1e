"""Puts the parts of kinetod-web together and serves them: the pages at their doors, the Perfetto UI at others."""

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from kineto_trace.base.own_processes import python, safe_environment

from kinetoctl.base.common_options import CommonOptions
from kinetoctl.base.value_types import removable_folder
from kinetoctl.web.analyses import worker_main
from kinetoctl.web.analyses.analysis_queue import (
    START_S,
    WORKERS,
    AnalysisFailed,
    AnalysisQueue,
    ResultCache,
    SocketProcess,
    WorkerLimits,
    answered,
)
from kinetoctl.web.application import page_answer
from kinetoctl.web.http.web_messages import (
    STATIC,
    Origins,
    WebAnswer,
    WebError,
    WebRequest,
    page_policy,
    static_file,
    ui_policy,
)
from kinetoctl.web.pages.timeline_page import ui_file
from kinetoctl.web.shared.doors import (
    PageUser,
    ProxyEntrance,
    SharedSite,
    TlsEntrance,
    WebDoor,
    WebEntrance,
    WebTlsFiles,
    listening_tcp,
    listening_unix,
)
from kinetoctl.web.shared.fleet_hosts import FleetHosts, HostSource
from kinetoctl.web.shared.user_spaces import MAX_RUNNING, UserSpaces

RESULTS_BYTES = 8 << 20  # of JSON; the values take some ten times as much memory
_SANDBOX = "kinetod.sandbox.confined_sessions"
_WORK = "kinetoctl.web.shared.confined_work:serve_confined"
# A fork must leave nothing locked, and Arrow's allocator has a thread of its own.
_ONE_THREAD = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
_CPU_S = 3600  # of one user's process, then it is replaced


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
        ui = SharedSite(
            origin=options.origins.ui,
            policy=ui_policy(options.origins),
            application=lambda request, _user: ui_file(request),  # the same for everybody
        )
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


class SharedApplication:
    """Answers every request that passed `check_request`, for the user whom its connection names."""

    def __init__(self, spaces: UserSpaces) -> None:
        self._spaces = spaces

    def __call__(self, request: WebRequest, user: PageUser) -> WebAnswer:
        """The answer. Raises WebError for what is no page."""
        _check_sender(request)
        if request.path.startswith(STATIC):
            return static_file(request)
        with self._spaces.entered(user) as space:
            return page_answer(space.context, request, space.session)


def _check_sender(request: WebRequest) -> None:
    """Other sites may link to pages, and neither load them into theirs nor have them work. Raises WebError.

    There is no cookie that the browser could keep to itself: certificates and proxies know the user on every request.
    """
    headers = request.headers
    from_here = headers.get("sec-fetch-site", "none") in ("same-origin", "none")
    navigates = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    if not from_here and not navigates:
        raise WebError(HTTPStatus.FORBIDDEN, "this request came from another site")


# Workers that a trace cannot take the server through: each serves one user at a time, in the daemon's own sandbox.
#
# Traces are hostile, and whoever took over a worker with the rights of this server could ask the
# daemon in the name of every user. So a warm process (`kinetod.sandbox.confined_sessions`, started by its name),
# which has imported the library of traces (`confined_work`) and never looks at one, forks a process for each user,
# which reaches the code and that user's folder and nothing else: no socket, no other process, no other folder. When
# the next job is another user's, the process is ended and another one takes its place.
class WarmProcess(SocketProcess):
    """The process that forks."""

    _kind = socket.SOCK_SEQPACKET
    _environ = staticmethod(lambda: {**safe_environment(), **_ONE_THREAD})

    def session(self, folder: str) -> tuple[socket.socket, int]:
        """A new worker for this folder: the socket to it, and its pidfd. Raises AnalysisFailed."""
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                child = self._forked(folder, theirs)
            ours.settimeout(START_S)
            try:
                worker_main.receive(ours)
            except (EOFError, OSError):
                os.close(child)
                raise AnalysisFailed("the analysis process could not be confined; see the log") from None
            ours.settimeout(self._limits.job_s)
        except BaseException:
            ours.close()
            raise
        return ours, child

    def _forked(self, folder: str, theirs: socket.socket) -> int:
        """The pidfd of the new process. Raises AnalysisFailed."""
        control = self._started()
        asked = {"folder": folder, "memory_bytes": self._limits.memory_bytes, "cpu_s": _CPU_S}
        try:
            socket.send_fds(control, [json.dumps(asked).encode()], [theirs.fileno()])
            answer, descriptors, _, _ = socket.recv_fds(control, 64, 1)
        except OSError as exc:
            raise AnalysisFailed("the process that starts analyses is not responding") from exc
        if not answer or not descriptors:
            raise AnalysisFailed("the analysis process ended at once; see the server's log")
        return descriptors[0]

    def _command(self, theirs: int) -> tuple[str, ...]:
        return python(_SANDBOX, str(theirs), _WORK)

    def _wait_until_ready(self, ours: socket.socket) -> None:
        with suppress(OSError):
            if ours.recv(64):
                return
        raise AnalysisFailed("the process that starts analyses did not start; see the server's log")


class ConfinedWorker:
    """One worker at a time. A job names its user's folder as `folder`. Thread-safe."""

    def __init__(self, warm: WarmProcess, limits: WorkerLimits) -> None:
        self._warm = warm
        self._limits = limits
        self._lock = threading.Lock()
        self._folder = ""
        self._sock: socket.socket | None = None
        self._child: int | None = None

    def start(self) -> None:
        """Starts the warm process."""
        with suppress(AnalysisFailed):  # the first job will say it
            self._warm.start()

    def ask(self, job: dict[str, Any]) -> Any:
        """The value of a job. Raises AnalysisFailed."""
        asked = {name: value for name, value in job.items() if name != "folder"}
        with self._lock:
            return answered(self._session(job["folder"]), asked, self._limits, self._end)

    def close(self) -> None:
        """Ends the worker, also in the middle of a job."""
        self._kill()
        with self._lock:
            self._end()

    def _session(self, folder: str) -> socket.socket:
        if self._sock is not None and self._folder == folder:
            return self._sock
        self._end()
        self._sock, self._child = self._warm.session(folder)
        self._folder = folder
        return self._sock

    def _kill(self) -> None:
        child = self._child
        if child is not None:
            with suppress(OSError):
                signal.pidfd_send_signal(child, signal.SIGKILL)

    def _end(self) -> None:
        self._kill()
        if self._sock is not None:
            self._sock.close()
        if self._child is not None:
            os.close(self._child)
        self._sock = self._child = None
