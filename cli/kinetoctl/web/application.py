"""From a checked request to its page, for everybody; for one user, the way in, and the server on loopback."""

import errno
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

from kinetoctl.base.common_options import CommonOptions
from kinetoctl.client.daemon_client import Client
from kinetoctl.errors import CliError, Denied, NotFound, Refused, Unreachable, UsageProblem
from kinetoctl.web.analyses.analysis_queue import AnalysisFailed, AnalysisQueue, Computing, TooBusy, WorkerLimits
from kinetoctl.web.analyses.trace_library import DEFAULT_ROOM, TraceLibrary
from kinetoctl.web.http.request_handler import RequestHandler, WebServer, WebSite
from kinetoctl.web.http.web_messages import (
    COOKIE,
    HOST,
    HOST_V6,
    LIFETIME_S,
    SAFE_METHODS,
    STATIC,
    Origins,
    Sessions,
    WebAnswer,
    WebError,
    WebRequest,
    WebSession,
    origin,
    page_policy,
    redirect,
    static_file,
    ui_origin,
    ui_policy,
)
from kinetoctl.web.pages.capture_page import capture_json, capture_page, stop_form
from kinetoctl.web.pages.chart_pages import (
    counters_json,
    counters_page,
    memory_json,
    memory_page,
    ranks_json,
    ranks_page,
    snapshot_json,
    snapshot_page,
)
from kinetoctl.web.pages.flame_page import flame_json, flame_page
from kinetoctl.web.pages.list_pages import (
    captures_json,
    captures_page,
    live_json,
    live_page,
    trace_form,
    traces_json,
)
from kinetoctl.web.pages.page_context import REFRESH_S, OneDaemon, PageContext, plain_page, render
from kinetoctl.web.pages.stacks_page import stacks_json, stacks_page
from kinetoctl.web.pages.timeline_page import timeline_page, timeline_trace, ui_file
from kinetoctl.web.pages.view_page import sql_csv, sql_json, sql_page, view_csv, view_json, view_page

ENTRY = "/enter"
Page = Callable[..., WebAnswer]
_ID, _NAME = r"(?P<id>[\w-]{1,100})", r"(?P<name>\w{1,64})"
_ROUTES: tuple[tuple[str, re.Pattern[str], Page], ...] = tuple(
    (method, re.compile(pattern), page)
    for method, pattern, page in (
        ("GET", "/", captures_page),
        ("GET", r"/captures\.json", captures_json),
        ("GET", r"/traces\.json", traces_json),
        ("GET", "/live", live_page),
        ("GET", r"/live\.json", live_json),
        ("POST", "/live/trace", trace_form),
        ("GET", "/live/trace", live_page),  # what a form that came back is refreshed from
        ("GET", "/live/stacks", stacks_page),
        ("GET", r"/live/stacks\.json", stacks_json),
        ("GET", "/sql", sql_page),
        ("GET", r"/sql\.json", sql_json),
        ("GET", r"/sql\.csv", sql_csv),
        ("GET", f"/c/{_ID}", capture_page),
        ("GET", rf"/c/{_ID}\.json", capture_json),
        ("POST", f"/c/{_ID}/stop", stop_form),
        ("GET", f"/c/{_ID}/view/{_NAME}", view_page),
        ("GET", rf"/c/{_ID}/view/{_NAME}\.json", view_json),
        ("GET", rf"/c/{_ID}/view/{_NAME}\.csv", view_csv),
        ("GET", f"/c/{_ID}/flame", flame_page),
        ("GET", rf"/c/{_ID}/flame\.json", flame_json),
        ("GET", f"/c/{_ID}/ranks", ranks_page),
        ("GET", rf"/c/{_ID}/ranks\.json", ranks_json),
        ("GET", f"/c/{_ID}/memory", memory_page),
        ("GET", rf"/c/{_ID}/memory\.json", memory_json),
        ("GET", f"/c/{_ID}/snapshot", snapshot_page),
        ("GET", rf"/c/{_ID}/snapshot\.json", snapshot_json),
        ("GET", f"/c/{_ID}/counters", counters_page),
        ("GET", rf"/c/{_ID}/counters\.json", counters_json),
        ("GET", f"/c/{_ID}/timeline", timeline_page),
        ("GET", f"/c/{_ID}/timeline/trace", timeline_trace),
    )
)
_WITH_DAEMON = ("/live", "/captures.json")
_STATUS: tuple[tuple[type[Exception], HTTPStatus], ...] = (
    (NotFound, HTTPStatus.NOT_FOUND),
    (Denied, HTTPStatus.FORBIDDEN),
    (UsageProblem, HTTPStatus.BAD_REQUEST),
    (Unreachable, HTTPStatus.BAD_GATEWAY),
    (CliError, HTTPStatus.UNPROCESSABLE_ENTITY),
    (AnalysisFailed, HTTPStatus.UNPROCESSABLE_ENTITY),
    (TooBusy, HTTPStatus.SERVICE_UNAVAILABLE),
    (Computing, HTTPStatus.SERVICE_UNAVAILABLE),
)


class WebApplication:
    """Answers every request of one user that passed `check`. on_entry: called when a token was used."""

    def __init__(self, context: PageContext, sessions: Sessions, on_entry: Callable[[], None] = lambda: None) -> None:
        self._context = context
        self._sessions = sessions
        self._on_entry = on_entry

    def __call__(self, request: WebRequest) -> WebAnswer:
        """The answer. Raises WebError for what is no page."""
        if request.path.startswith(STATIC):
            return static_file(request)
        if request.path == ENTRY:
            return self._enter(request) if request.method == "POST" else _way_in(HTTPStatus.OK, refused=False)
        session = self._sessions.find(request.cookie(COOKIE))
        if session is None:
            return _way_in(HTTPStatus.UNAUTHORIZED, refused=False)
        return page_answer(self._context, request, session)

    def _enter(self, request: WebRequest) -> WebAnswer:
        key = self._sessions.enter(request.first("token"))
        if key is None:
            return _way_in(HTTPStatus.FORBIDDEN, refused=True)
        self._on_entry()
        to = request.first("to")
        own = to if re.fullmatch(r"/(?![/\\])[\x21-\x5b\x5d-\x7e]*", to) else "/"
        cookie = f"{COOKIE}={key}; HttpOnly; SameSite=Strict; Path=/; Max-Age={LIFETIME_S}"
        return redirect(own, {"Set-Cookie": cookie})


def page_answer(context: PageContext, request: WebRequest, session: WebSession) -> WebAnswer:
    """The page of a user who is known. Raises WebError for a form that was not made for the session."""
    if request.method not in SAFE_METHODS and not session.owns(request.first("form_secret")):
        raise WebError(HTTPStatus.FORBIDDEN, "this form does not belong to your session: open its page again")
    page, found = _route(request)
    if page is None or (context.files and request.path.startswith(_WITH_DAEMON)):
        nowhere = WebError(HTTPStatus.NOT_FOUND, f"there is no page {request.path}")
        return _problem(context, request, session, nowhere)
    try:
        return page(context, request, session, *found.values())
    except (CliError, AnalysisFailed, TooBusy, Computing, WebError) as exc:
        return _problem(context, request, session, exc)


def _problem(context: PageContext, request: WebRequest, session: WebSession, exc: Exception) -> WebAnswer:
    status = exc.status if isinstance(exc, WebError) else next(code for kind, code in _STATUS if isinstance(exc, kind))
    waits = isinstance(exc, (TooBusy, Computing))
    text = "Other results are being computed; this page reloads by itself." if waits else str(exc)
    answer = render(
        "problem.html",
        context,
        request,
        session,
        heading=status.phrase,
        failure=text,
        help_text=getattr(exc, "help_text", ""),
        headers={"Refresh": REFRESH_S} if waits else {},
    )
    return WebAnswer(status=status, content=answer.content, headers=answer.headers)


def _route(request: WebRequest) -> tuple[Page | None, dict[str, Any]]:
    """The page of a request, and what its address names."""
    method = "GET" if request.method in SAFE_METHODS else request.method
    for wanted, pattern, page in _ROUTES:
        match = pattern.fullmatch(request.path)
        if match and wanted == method:
            return page, match.groupdict()
    return None, {}


def _way_in(status: HTTPStatus, *, refused: bool) -> WebAnswer:
    return WebAnswer(status=status, content=plain_page("enter.html", refused=refused))


# Puts the parts together and serves them until Ctrl-C: the pages and the Perfetto UI, each at a host of its own.
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
