"""Puts the parts together and serves them until Ctrl-C: the pages and the Perfetto UI, each at a host of its own."""

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial

from kinetoctl.base.common_options import CommonOptions
from kinetoctl.client.daemon_client import Client
from kinetoctl.errors import Refused
from kinetoctl.web.analyses.analysis_queue import AnalysisQueue, WorkerLimits
from kinetoctl.web.analyses.trace_library import DEFAULT_ROOM, TraceLibrary
from kinetoctl.web.application import ENTRY, WebApplication
from kinetoctl.web.http.request_handler import RequestHandler, WebServer, WebSite
from kinetoctl.web.http.web_messages import HOST, HOST_V6, Origins, Sessions, origin, page_policy, ui_origin, ui_policy
from kinetoctl.web.pages.page_context import OneDaemon, PageContext
from kinetoctl.web.pages.timeline_page import ui_file

TRIES = 10  # for a port that is free on both addresses


@dataclass(frozen=True, slots=True, kw_only=True)
class WebOptions:
    """traces: files, folders, patterns and URLs, instead of a daemon. url_space: bytes for copies of URLs.

    port: 0 for any free one. editor: template of links that open a source file; empty for none.
    """

    traces: Sequence[str] = ()
    url_space: int = DEFAULT_ROOM
    port: int = 0
    editor: str = ""
    limits: WorkerLimits = WorkerLimits()  # noqa: RUF009 - frozen


@dataclass(frozen=True, slots=True)
class RunningWeb:
    """A server that serves. `address` has the token for the next browser."""

    pages: WebServer
    sessions: Sessions

    @property
    def address(self) -> str:
        """What the browser opens, once."""
        return f"{origin(self.pages.port)}{ENTRY}#{self.sessions.token}"


@contextmanager
def running_web(
    options: WebOptions, settings: CommonOptions, on_entry: Callable[[str], None] = lambda _address: None
) -> Iterator[RunningWeb]:
    """Serves within the context. on_entry: is given the next address when one was used. Raises Refused."""
    sessions = Sessions()
    with ExitStack() as stack:
        library = stack.enter_context(closing(TraceLibrary(settings, options.traces, options.url_space)))
        queue = stack.enter_context(AnalysisQueue(options.limits))
        servers = _listening(options.port)
        for server in servers:
            stack.enter_context(server)
        pages = servers[0]
        origins = Origins(origin(pages.port), ui_origin(pages.port))
        running = RunningWeb(pages, sessions)
        context = PageContext(
            settings=settings,
            library=library,
            queue=queue,
            daemons=OneDaemon(lambda: Client(settings.address, timeout_s=settings.timeout_s), settings.address),
            ui_origin=origins.ui,
            editor=options.editor,
        )
        application = WebApplication(context, sessions, on_entry=lambda: on_entry(running.address))
        sites = (
            WebSite(origin=origins.pages, policy=page_policy(origins), application=application),
            WebSite(origin=origins.ui, policy=ui_policy(origins), application=ui_file),
        )
        for server in servers:
            server.answer_with(partial(RequestHandler, sites))
            threading.Thread(target=server.serve, name="web", daemon=True).start()
            stack.callback(server.shutdown)
        yield running


def _listening(port: int) -> list[WebServer]:
    """Servers on this port of both loopback addresses; on IPv4 alone if this machine has no IPv6. Raises Refused."""
    for _ in range(1 if port else TRIES):
        first = _server(port, HOST)
        try:
            return [first, WebServer(first.port, host=HOST_V6)]
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE:
                return [first]
            first.server_close()
            taken = first.port
    raise Refused(f"port {taken} on {HOST_V6} cannot be used: {os.strerror(errno.EADDRINUSE)}")


def _server(port: int, host: str) -> WebServer:
    try:
        return WebServer(port, host=host)
    except OSError as exc:
        raise Refused(f"port {port} on {host} cannot be used: {exc.strerror or exc}") from exc
