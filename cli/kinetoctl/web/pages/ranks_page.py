"""The steps of all ranks as a map, and below it the ranks and their collectives."""

from http import HTTPStatus
from typing import Any

from kinetoctl.web.http.web_messages import WebAnswer, WebError, WebRequest, WebSession
from kinetoctl.web.pages.baselines import baseline_of, baseline_values, comparison, comparison_command
from kinetoctl.web.pages.page_context import MAX_ROWS, PageContext, ask, data_address, render, results_answer, row_limit

VIEWS = ("rank_steps", "ranks", "collective_summary")
VALUES = (("step_us", "length of the step"), ("waiting_us", "time waiting for other ranks"))


def ranks_page(context: PageContext, request: WebRequest, session: WebSession, trace_id: str) -> WebAnswer:
    """The page of the ranks. Raises WebError, and the client's errors."""
    context.parts(trace_id)
    value, arguments = _value(request), _arguments(request, trace_id)
    asked = ask(lambda: context.results(trace_id, VIEWS, **arguments))
    known = ask(lambda: context.ranks(context.library.find(trace_id)))
    documents = {document["view"]: document for document in asked.documents}
    return render(
        "ranks.html",
        context,
        request,
        session,
        id=trace_id,
        values=VALUES,
        value=value,
        ranks=request.first("rank"),
        steps=request.first("step"),
        limit=arguments["limit"],
        **baseline_values(context, trace_id, baseline_of(request), known.documents),
        asked=asked,
        documents=documents,
        stepless=documents.get("rank_steps", {}).get("steps") == ["all"],
        command=_command(context, request, trace_id),
        json=data_address(request, without=("limit",)),
    )


def ranks_json(context: PageContext, request: WebRequest, _session: WebSession, trace_id: str) -> WebAnswer:
    """The results behind the page. Raises WebError, AnalysisFailed and the client's errors."""
    arguments = _arguments(request, trace_id, MAX_ROWS)
    return results_answer(context.results(trace_id, VIEWS, wait_s=context.settings.timeout_s, **arguments))


def _command(context: PageContext, request: WebRequest, trace_id: str) -> str:
    baseline = baseline_of(request)
    if baseline.trace_id:
        return comparison_command(context, trace_id, baseline, VIEWS)
    return context.command("report", *(word for view in VIEWS for word in ("--view", view)), context.name(trace_id))


def _value(request: WebRequest) -> str:
    value = request.first("value", VALUES[0][0])
    if value not in dict(VALUES):
        raise WebError(HTTPStatus.BAD_REQUEST, f"value is one of {', '.join(dict(VALUES))}")
    return value


def _arguments(request: WebRequest, trace_id: str, rows: int = 0) -> dict[str, Any]:
    drawing = {
        "value": _value(request),
        "ranks": request.first("rank"),
        "steps": request.first("step"),
        "page": f"/c/{trace_id}",
    }
    limit = rows or row_limit(request)
    return {"drawings": {VIEWS[0]: drawing}, "limit": limit, **comparison(request, VIEWS)}
