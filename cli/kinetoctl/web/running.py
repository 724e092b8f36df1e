"""Puts the parts together and serves them until Ctrl-C: the pages on one port, the Perfetto UI on another."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial

from kinetoctl.base.common_options import CommonOptions
from kinetoctl.client.daemon_client import Client
from kinetoctl.errors import Refused
from kinetoctl.web.analyses.analysis_queue import AnalysisQueue
from kinetoctl.web.analyses.trace_library import TraceLibrary
from kinetoctl.web.analyses.url_copies import DEFAULT_ROOM
from kinetoctl.web.analyses.worker_process import WorkerLimits
from kinetoctl.web.application import ENTRY, WebApplication
from kinetoctl.web.http.request_handler import RequestHandler, WebSite
from kinetoctl.web.http.security import HOST, Origins, origin, page_policy, ui_policy
from kinetoctl.web.http.sessions import Sessions
from kinetoctl.web.http.web_server import WebServer
from kinetoctl.web.pages.page_context import PageContext
from kinetoctl.web.pages.timeline_page import ui_file


@dataclass(frozen=True, slots=True, kw_only=True)
class WebOptions:
    """traces: files, folders, patterns and URLs, instead of a daemon. url_space: bytes for copies of URLs.

    port: of the pages, the UI has the next one; 0: any free ones.
    """

    traces: Sequence[str] = ()
    url_space: int = DEFAULT_ROOM
    port: int = 0
    limits: WorkerLimits = WorkerLimits()  # noqa: RUF009 - frozen


@dataclass(frozen=True, slots=True)
class RunningWeb:
    """A server that serves. `address` has the token for the next browser."""

    pages: WebServer
    ui: WebServer
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
        pages = stack.enter_context(_listening(options.port))
        ui = stack.enter_context(_listening(options.port + 1 if options.port else 0))
        origins = Origins(origin(pages.port), origin(ui.port))
        running = RunningWeb(pages, ui, sessions)
        context = PageContext(
            settings=settings,
            library=library,
            queue=queue,
            connect=lambda: Client(settings.address, timeout_s=settings.timeout_s),
            ui_origin=origins.ui,
        )
        application = WebApplication(context, sessions, on_entry=lambda: on_entry(running.address))
        sites = {
            pages: WebSite(origin=origins.pages, policy=page_policy(origins), application=application),
            ui: WebSite(origin=origins.ui, policy=ui_policy(origins), application=ui_file),
        }
        for server, site in sites.items():
            server.answer_with(partial(RequestHandler, site))
            threading.Thread(target=server.serve, name="web", daemon=True).start()
            stack.callback(server.shutdown)
        yield running


def _listening(port: int) -> WebServer:
    try:
        return WebServer(port)
    except OSError as exc:
        raise Refused(f"port {port} on {HOST} cannot be used: {exc.strerror or exc}") from exc
