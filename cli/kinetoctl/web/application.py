"""From a checked request to its page: routes, files of the pages, and errors as pages; for one user, the way in."""

import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from kinetoctl.errors import CliError, Denied, NotFound, Unreachable, UsageProblem
from kinetoctl.web.analyses.analysis_queue import AnalysisFailed, Computing, TooBusy
from kinetoctl.web.http.web_messages import (
    COOKIE,
    LIFETIME_S,
    SAFE_METHODS,
    STATIC,
    Sessions,
    WebAnswer,
    WebError,
    WebRequest,
    WebSession,
    redirect,
    static_file,
)
from kinetoctl.web.pages.capture_page import capture_json, capture_page
from kinetoctl.web.pages.captures_page import captures_json, captures_page, traces_json
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
from kinetoctl.web.pages.live_page import live_json, live_page, trace_form
from kinetoctl.web.pages.page_context import REFRESH_S, PageContext, plain_page, render
from kinetoctl.web.pages.sql_page import sql_csv, sql_json, sql_page
from kinetoctl.web.pages.timeline_page import timeline_page, timeline_trace
from kinetoctl.web.pages.view_page import view_csv, view_json, view_page

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
        ("GET", "/sql", sql_page),
        ("GET", r"/sql\.json", sql_json),
        ("GET", r"/sql\.csv", sql_csv),
        ("GET", f"/c/{_ID}", capture_page),
        ("GET", rf"/c/{_ID}\.json", capture_json),
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
        raise WebError(HTTPStatus.FORBIDDEN, "this form was not made for your session: load its page again")
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
    text = "Other results are being computed; this page loads itself again." if waits else str(exc)
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
