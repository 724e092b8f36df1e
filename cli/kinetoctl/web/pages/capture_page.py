"""One capture or file: the verdicts, what the time went to, what to change, and the way to every view."""

from http import HTTPStatus
from typing import Any

from kinetoctl.client import enum_names
from kinetoctl.output.json_yaml import plain
from kinetoctl.web.http.sessions import WebSession
from kinetoctl.web.http.web_messages import WebAnswer, WebError, WebRequest
from kinetoctl.web.pages.baselines import baselines
from kinetoctl.web.pages.capture_facts import facts, has_trace, running, target_facts
from kinetoctl.web.pages.json_answers import json_answer
from kinetoctl.web.pages.page_context import WAIT_S, Asked, PageContext, ask, render
from kinetoctl.web.pages.view_groups import grouped

VIEWS = ("time_causes", "findings", "not_recorded")
STEPS = "step_breakdown"  # only compared with a baseline
LEAST_SHARE = ("time_causes.least", "1")


def capture_page(context: PageContext, request: WebRequest, session: WebSession, capture_id: str) -> WebAnswer:
    """The page of one capture. Raises the client's errors."""
    capture = context.capture(capture_id)
    unfinished, base = running(capture), request.first("base")
    asked = Asked(failure="" if unfinished else "This capture has no trace; the verdicts above say why.")
    if not unfinished and has_trace(capture):
        views = (*VIEWS, STEPS) if base else VIEWS
        compare = (VIEWS[0], STEPS) if base else ()
        asked = ask(lambda: context.results(capture_id, views, base=base, compare=compare, settings=[LEAST_SHARE]))
    catalog = ask(lambda: context.catalog(WAIT_S))
    documents = {document["view"]: document for document in asked.documents}
    findings = documents.get("findings")
    name = context.name(capture_id)
    return render(
        "capture.html",
        context,
        request,
        session,
        id=capture_id,
        name=name,
        state="" if capture is None else _status(capture),
        running=unfinished,
        asked=asked,
        time=documents.get("time_causes"),
        steps=documents.get(STEPS),
        bases=[] if unfinished else baselines(context, capture_id),
        base=base,
        base_name=context.name(base),
        missing=documents.get("not_recorded"),
        findings=findings["rows"] if findings else [],
        findings_failure=findings.get("failure", "") if findings else "",
        groups=[] if unfinished else grouped(catalog.documents),
        command=context.command("report", name),
        json="" if capture is None else f"/c/{capture_id}.json",
        headers={**asked.headers, **catalog.headers},
        facts=[] if capture is None else facts(capture),
        targets=[] if capture is None else target_facts(capture),
    )


def capture_json(context: PageContext, _request: WebRequest, _session: WebSession, capture_id: str) -> WebAnswer:
    """The daemon's message of the capture. Raises WebError, and the client's errors."""
    capture = context.capture(capture_id)
    if capture is None:
        raise WebError(HTTPStatus.NOT_FOUND, "a file has no capture")
    return json_answer(plain(capture))


def _status(capture: Any) -> str:
    return enum_names.capture_status(capture.status)
