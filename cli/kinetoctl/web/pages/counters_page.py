"""Every counter of a trace over time, each in a small chart of its own, and beside those of a baseline."""

from typing import Any

from kinetoctl.web.http.web_messages import WebAnswer, WebRequest, WebSession
from kinetoctl.web.pages.baselines import baseline_of, baseline_values, comparison, comparison_command
from kinetoctl.web.pages.page_context import (
    MAX_ROWS,
    PageContext,
    ask,
    data_address,
    rank_choices,
    render,
    results_answer,
    row_limit,
    whole_number,
)

VIEW, SUMMARY = "counters", "counter_summary"
VIEWS = (SUMMARY, VIEW)
SETTINGS = ((f"{VIEW}.max_points", "300"),)


def counters_page(context: PageContext, request: WebRequest, session: WebSession, trace_id: str) -> WebAnswer:
    """The page of the counters. Raises WebError, and the client's errors."""
    context.parts(trace_id)
    arguments = _arguments(request)
    ranks = ask(lambda: context.ranks(context.library.find(trace_id)))
    asked = ask(lambda: context.results(trace_id, VIEWS, **arguments)) if ranks.documents else ranks
    documents = {document["view"]: document for document in asked.documents} if asked is not ranks else {}
    return render(
        "counters.html",
        context,
        request,
        session,
        id=trace_id,
        ranks=rank_choices(ranks.documents),
        rank=request.first("rank"),
        limit=arguments["limit"],
        asked=asked,
        **baseline_values(context, trace_id, baseline_of(request), ranks.documents),
        documents=documents,
        command=_command(context, request, trace_id),
        json=data_address(request, without=("limit",)),
    )


def counters_json(context: PageContext, request: WebRequest, _session: WebSession, trace_id: str) -> WebAnswer:
    """The result behind the page. Raises WebError, AnalysisFailed and the client's errors."""
    arguments = _arguments(request, MAX_ROWS)
    return results_answer(context.results(trace_id, VIEWS, wait_s=context.settings.timeout_s, **arguments))


def _command(context: PageContext, request: WebRequest, trace_id: str) -> str:
    baseline = baseline_of(request)
    if baseline.trace_id:
        return comparison_command(context, trace_id, baseline, [SUMMARY], rank=request.first("rank"))
    return context.command("report", "--view", SUMMARY, "--view", VIEW, context.name(trace_id))


def _arguments(request: WebRequest, rows: int = 0) -> dict[str, Any]:
    rank = whole_number(request, "rank")
    return {
        "rank": int(rank) if rank else None,
        "settings": SETTINGS,
        "drawings": {VIEW: {}},
        "limit": rows or row_limit(request),
        **comparison(request, (SUMMARY,)),
    }
