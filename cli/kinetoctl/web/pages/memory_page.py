"""Memory over time: what each device held, by operator, and what the peak consisted of."""

from typing import Any

from kinetoctl.web.http.sessions import WebSession
from kinetoctl.web.http.web_messages import WebAnswer, WebRequest
from kinetoctl.web.pages.baselines import baseline_of, baseline_values, comparison_command
from kinetoctl.web.pages.json_answers import data_address, results_answer
from kinetoctl.web.pages.page_context import PageContext, ask, render
from kinetoctl.web.pages.selectors import MAX_ROWS, rank_choices, row_limit, whole_number

VIEWS = ("memory_curve", "memory_holders", "memory_peak_blocks", "memory_statistics")
SETTINGS = (("memory_curve.max_points", "1000"),)


def memory_page(context: PageContext, request: WebRequest, session: WebSession, trace_id: str) -> WebAnswer:
    """The page of the memory. Raises WebError, and the client's errors."""
    context.parts(trace_id)
    arguments = _arguments(request)
    ranks = ask(lambda: context.ranks(context.library.find(trace_id)))
    asked = ask(lambda: context.results(trace_id, VIEWS, **arguments)) if ranks.documents else ranks
    name = context.name(trace_id)
    return render(
        "memory.html",
        context,
        request,
        session,
        id=trace_id,
        name=name,
        ranks=rank_choices(ranks.documents),
        rank=request.first("rank"),
        limit=arguments["limit"],
        **baseline_values(context, trace_id, baseline_of(request), ranks.documents),
        asked=asked,
        documents={document["view"]: document for document in asked.documents} if asked is not ranks else {},
        command=_command(context, request, trace_id),
        json=data_address(request, without=("limit",)),
        headers=asked.headers,
    )


def memory_json(context: PageContext, request: WebRequest, _session: WebSession, trace_id: str) -> WebAnswer:
    """The results behind the page. Raises WebError, AnalysisFailed and the client's errors."""
    arguments = _arguments(request, MAX_ROWS)
    return results_answer(context.results(trace_id, VIEWS, wait_s=context.settings.timeout_s, **arguments))


def _command(context: PageContext, request: WebRequest, trace_id: str) -> str:
    baseline = baseline_of(request)
    if baseline.trace_id:
        return comparison_command(context, trace_id, baseline, VIEWS[2:], rank=request.first("rank"))
    return context.command("report", *(word for view in VIEWS for word in ("--view", view)), context.name(trace_id))


def _arguments(request: WebRequest, rows: int = 0) -> dict[str, Any]:
    rank, baseline = whole_number(request, "rank"), baseline_of(request)
    return {
        "rank": int(rank) if rank else None,
        "settings": SETTINGS,
        "drawings": {view: {} for view in VIEWS[:2]},
        "limit": rows or row_limit(request),
        "base": baseline.trace_id,
        "base_rank": baseline.rank_number,
        "compare": VIEWS[2:] if baseline.trace_id else (),
    }
