"""Queries in SQL, and those that were run before."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from kinetoctl.errors import CliError
from kinetoctl.web.http.web_messages import WebAnswer, WebRequest, WebSession
from kinetoctl.web.pages.captures_page import MAX_CAPTURES, listed
from kinetoctl.web.pages.page_context import (
    WAIT_S,
    Asked,
    PageContext,
    ask,
    csv_answer,
    data_address,
    render,
    results_answer,
)

EXAMPLE = (
    "SELECT name, count(*) AS calls, sum(duration_ns) AS total_ns\nFROM events GROUP BY 1 ORDER BY 3 DESC LIMIT 20"
)
MAX_ROWS = 500


def sql_page(context: PageContext, request: WebRequest, session: WebSession) -> WebAnswer:
    """The form with the result of its query. Raises the client's errors."""
    trace_id, sql = request.first("c"), request.first("sql").strip()
    asked = Asked()
    if trace_id and sql:
        session.remember(sql)
        asked = ask(lambda: _result(context, trace_id, sql, WAIT_S, MAX_ROWS))
    history = [{"sql": old, "href": f"/sql?{urlencode({'c': trace_id, 'sql': old})}"} for old in session.history]
    return render(
        "sql.html",
        context,
        request,
        session,
        id=trace_id,
        sql=sql or ("" if trace_id else EXAMPLE),
        traces=_traces(context),
        asked=asked,
        document=asked.documents[0] if asked.documents else None,
        history=history,
        command=context.command("query", sql, context.name(trace_id)),
        json=data_address(request),
        csv=data_address(request, suffix=".csv"),
    )


def sql_json(context: PageContext, request: WebRequest, _session: WebSession) -> WebAnswer:
    """The result as JSON. Raises AnalysisFailed and the client's errors."""
    sql = request.first("sql").strip()
    limit = context.settings.timeout_s
    return results_answer(_result(context, request.first("c"), sql, limit, MAX_ROWS * 10))


def sql_csv(context: PageContext, request: WebRequest, _session: WebSession) -> WebAnswer:
    """The result as `kinetoctl query -o csv` prints it. Raises AnalysisFailed and the client's errors."""
    job = {"job": "query_csv", "sql": request.first("sql").strip()}
    return csv_answer(context.answer(request.first("c"), job, wait_s=context.settings.timeout_s), "query")


def _result(context: PageContext, trace_id: str, sql: str, wait_s: float, limit: int) -> Sequence[Mapping[str, Any]]:
    traces = context.library.find(trace_id, wait_s)
    job = {"job": "query", "sql": sql, "paths": traces.paths, "limit": limit}
    found: Sequence[Mapping[str, Any]] = context.queue.result(traces.identity, job, wait_s=wait_s)
    return found


def _traces(context: PageContext) -> list[tuple[str, str]]:
    if context.files:
        return list(context.library.files.items())
    try:
        found = listed(context.daemons.captures(MAX_CAPTURES).items)[:MAX_CAPTURES]
        return [(capture_id, capture_id) for capture_id, _ in found]
    except CliError:
        return []
