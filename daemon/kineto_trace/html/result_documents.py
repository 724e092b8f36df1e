"""Documents of results (html/documents.py), with their charts."""

from dataclasses import replace
from typing import Any

from markupsafe import Markup

from kineto_trace.html.view_charts import MAX_BARS, bar_count, chart
from kineto_trace.view_api.result import Result


def document(result: Result, limit: int) -> dict[str, Any]:
    """The result as a plain value, with its first rows and its chart."""
    shown = replace(result, table=result.table.slice(0, limit)) if len(result) > limit else result
    return {
        "rows": shown.rows(),
        **({"failure": result.failure} if result.failure else {}),
        "notes": list(result.notes),
        "columns": [column._asdict() for column in result.columns],
        **page_parts(result),
    }


def page_parts(
    result: Result, drawn: Markup | None = None, *, column: str = "", bars: int = MAX_BARS
) -> dict[str, Any]:
    """What pages show of a result beside its rows.

    drawn: instead of the view's own chart, for which column and bars are those of `chart`.
    """
    if drawn is None:
        drawn = Markup("") if result.failure else chart(result, column, bars)
    return {
        "view": result.view,
        "total": len(result),
        "chart": str(drawn),
        "bars": bar_count(result),
    }
