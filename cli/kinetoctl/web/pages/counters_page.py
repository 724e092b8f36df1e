"""Every counter of a trace over time, each in a small chart of its own."""

from typing import Any

from kinetoctl.web.http.sessions import WebSession
from kinetoctl.web.http.web_messages import WebAnswer, WebRequest
from kinetoctl.web.pages.json_answers import data_address, results_answer
from kinetoctl.web.pages.page_context import PageContext, ask, render
from kinetoctl.web.pages.selectors import MAX_ROWS, rank_choices, row_limit, whole_number

VIEW = "counters"
SETTINGS = (("max_points", "300"),)


def counters_page(context: PageContext, request: WebRequest, session: WebSession, trace_id: str) -> WebAnswer:
    """The page of the counters. Raises WebError, and the client's errors."""
    context.parts(trace_id)
    arguments = _arguments(request)
    ranks = ask(lambda: context.ranks(context.library.find(trace_id)))
    asked = ask(lambda: context.results(trace_id, [VIEW], **arguments)) if ranks.documents else ranks
    name = context.name(trace_id)
    return render(
        "counters.html",
        context,
        request,
        session,
        id=trace_id,
        name=name,
        ranks=rank_choices(ranks.documents),
        rank=request.first("rank"),
        limit=arguments["limit"],
        asked=asked,
        document=asked.documents[0] if asked.documents and asked is not ranks else None,
        command=context.command("report", "--view", VIEW, name),
        json=data_address(request, without=("limit",)),
        headers=asked.headers,
    )


def counters_json(context: PageContext, request: WebRequest, _session: WebSession, trace_id: str) -> WebAnswer:
    """The result behind the page. Raises WebError, AnalysisFailed and the client's errors."""
    arguments = _arguments(request, MAX_ROWS)
    return results_answer(context.results(trace_id, [VIEW], wait_s=context.settings.timeout_s, **arguments))


def _arguments(request: WebRequest, rows: int = 0) -> dict[str, Any]:
    rank = whole_number(request, "rank")
    return {
        "rank": int(rank) if rank else None,
        "settings": SETTINGS,
        "drawings": {VIEW: {}},
        "limit": rows or row_limit(request),
    }
