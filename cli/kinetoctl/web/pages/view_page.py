"""One view of one capture: its chart, its table, its definition, its selectors; and queries in SQL."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

from kinetoctl.base.view_settings import DIFF_VIEWS, TREE, TREE_VIEWS
from kinetoctl.errors import CliError
from kinetoctl.web.http.web_messages import WebAnswer, WebError, WebRequest, WebSession
from kinetoctl.web.pages.baselines import Baseline, baseline_of, baseline_values, comparison_command
from kinetoctl.web.pages.list_pages import MAX_CAPTURES, listed
from kinetoctl.web.pages.page_context import (
    ALL_BARS,
    BARS,
    DEFAULT_ROWS,
    MAX_BARS,
    MAX_ROWS,
    WAIT_S,
    Asked,
    PageContext,
    ask,
    bar_limit,
    csv_answer,
    data_address,
    rank_choices,
    render,
    results_answer,
    row_limit,
    whole_number,
    word,
)

DIFF, SETTING = "diff_", "set."
ONLY_SHOWN = ("limit", "chart", "bars")  # fields that change what a page shows of the values, not the values
YES_OR_NO = {"yes or no": [("true", "yes"), ("false", "no")]}
COMPATS, NO_COMPAT = {"plugin": "TensorBoard plug-in", "hta": "HTA"}, "none"
PATH = "set.path"  # the field of the address
_LEVEL = "-"  # between the numbers of a path


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewChoice:
    """What of a view is asked for.

    rank and step: empty for all; baseline: the traces to compare with; compat: the tool whose figures the view
    reproduces, or empty. chart: the column that the chart is of, or empty for its usual ones; bars: how many it has.
    """

    name: str
    trace_id: str
    rank: str
    step: str
    baseline: Baseline
    compat: str
    settings: tuple[tuple[str, str], ...]
    limit: int
    chart: str
    bars: int

    @property
    def compares(self) -> bool:
        """Whether the view needs a baseline."""
        return self.name.startswith(DIFF)


def view_page(context: PageContext, request: WebRequest, session: WebSession, trace_id: str, name: str) -> WebAnswer:
    """The page of a view. Raises WebError, and the client's errors."""
    view = _view(context, name)
    choice = _choice(request, trace_id, view)
    ranks = ask(lambda: context.ranks(context.library.find(trace_id)))
    asked = ranks
    if ranks.documents and (choice.baseline.trace_id or not choice.compares):
        asked = ask(lambda: _documents(context, choice, WAIT_S, drawings(request, name)))
    document = asked.documents[0] if asked.documents and asked is not ranks else None
    return render(
        "view.html",
        context,
        request,
        session,
        id=trace_id,
        view=view,
        options=_options(view, choice),
        ranks=rank_choices(ranks.documents),
        rank=choice.rank,
        steps=[(step, step) for step in document["steps"]] if document else [],
        step=choice.step,
        **baseline_values(context, trace_id, choice.baseline, ranks.documents),
        compats=[(tool, COMPATS[tool]) for tool in view["compat"]],
        compat=choice.compat,
        charts=view["charts"],
        chart=choice.chart,
        bar_counts=_bar_counts(document),
        bars=request.first("bars"),
        bar_limit=choice.bars,
        compares=choice.compares,
        limit=choice.limit,
        asked=asked,
        document=document,
        level=tree_level(request, document) if document else None,
        command=_command(context, choice),
        json=data_address(request, without=ONLY_SHOWN),
        csv=data_address(request, without=ONLY_SHOWN, suffix=".csv"),
    )


def view_json(context: PageContext, request: WebRequest, _session: WebSession, trace_id: str, name: str) -> WebAnswer:
    """The result as `kinetoctl report -o json` prints it. Raises WebError, AnalysisFailed and the client's errors."""
    choice = _choice(request, trace_id, _view(context, name), MAX_ROWS)
    return results_answer(_documents(context, choice, context.settings.timeout_s))


def view_csv(context: PageContext, request: WebRequest, _session: WebSession, trace_id: str, name: str) -> WebAnswer:
    """The result as `kinetoctl report -o csv` prints it. Raises WebError, AnalysisFailed and the client's errors."""
    choice = _choice(request, trace_id, _view(context, name))
    job = {
        "job": "csv",
        "name": name,
        "rank": int(choice.rank) if choice.rank else None,
        "step": choice.step,
        "settings": choice.settings,
        "base_rank": choice.baseline.rank_number,
        "compat": choice.compat or NO_COMPAT,
    }
    base = choice.baseline.trace_id if choice.compares else ""
    return csv_answer(context.answer(trace_id, job, base=base, wait_s=context.settings.timeout_s), name)


def _view(context: PageContext, name: str) -> Mapping[str, Any]:
    found = context.view(name)
    if found is None:
        raise WebError(HTTPStatus.NOT_FOUND, f"there is no view {name}")
    return found


def _choice(request: WebRequest, trace_id: str, view: Mapping[str, Any], rows: int = DEFAULT_ROWS) -> ViewChoice:
    """Raises WebError for numbers that are none, and words that there are not."""
    settings = tuple(
        (key.removeprefix(SETTING), value) for key, value in request.query if key.startswith(SETTING) and value
    )
    return ViewChoice(
        name=view["name"],
        trace_id=trace_id,
        rank=whole_number(request, "rank"),
        step=request.first("step"),
        baseline=baseline_of(request),
        compat=word(request, "compat", view["compat"]),
        settings=settings,
        limit=row_limit(request, rows),
        chart=word(request, "chart", [name for name, _ in view["charts"]]),
        bars=bar_limit(request),
    )


def _documents(
    context: PageContext, choice: ViewChoice, wait_s: float, drawn: Mapping[str, Mapping[str, Any]] | None = None
) -> Sequence[Mapping[str, Any]]:
    """drawn: what the view's chart is told."""
    return context.results(
        choice.trace_id,
        [choice.name],
        base=choice.baseline.trace_id,
        base_rank=choice.baseline.rank_number,
        compare=[choice.name] if choice.baseline.trace_id and not choice.compares else [],
        wait_s=wait_s,
        rank=int(choice.rank) if choice.rank else None,
        step=choice.step,
        settings=choice.settings,
        compat=choice.compat or NO_COMPAT,
        limit=choice.limit,
        drawings=drawn or {},
        chart=choice.chart,
        bars=choice.bars,
    )


def _options(view: Mapping[str, Any], choice: ViewChoice) -> list[dict[str, Any]]:
    """The view's options with their values, and with what they can be set to, if that is one of a few words."""
    set_to = dict(choice.settings)
    return [
        {
            **option,
            "value": set_to.get(option["name"], ""),
            "choices": [(each, each) for each in option["words"]] or YES_OR_NO.get(option["type"], []),
        }
        for option in view["options"]
    ]


def _bar_counts(document: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """The numbers of bars that can be chosen for a chart; none for one that shows all of them anyway."""
    count = document["bars"] if document else 0
    fewer = [(str(number), str(number)) for number in BARS[1:] if number < count]
    return [*fewer, (ALL_BARS, f"all {count}" if count <= MAX_BARS else f"{MAX_BARS:,}")] if count > BARS[0] else []


def _command(context: PageContext, choice: ViewChoice) -> str:
    name, trace_id, baseline = choice.name, choice.trace_id, choice.baseline
    compat = ["--compat", choice.compat] if choice.compat else []
    tree = _tree_words(choice)
    if tree:
        traces = context.name(baseline.trace_id) or "BASELINE", context.name(trace_id)
        return context.command("diff", *tree, *compat, *baseline.words(choice.rank), *traces)
    if name in DIFF_VIEWS.values() or (baseline.trace_id and not choice.compares):
        return comparison_command(context, trace_id, baseline, [name], rank=choice.rank, settings=choice.settings)
    settings = [part for key, value in choice.settings for part in ("--set", f"{key}={value}")]
    return context.command("report", "--view", name, *compat, *settings, context.name(trace_id))


def _tree_words(choice: ViewChoice) -> list[str]:
    """What `kinetoctl diff` is told to show a node of the tree, or its operators; nothing for other views."""
    by = next((each for each, view in TREE_VIEWS.items() if view == choice.name), None)
    path = dict(choice.settings).get("path", "" if by == TREE else "0")
    return [] if by is None else ["--by", by, *(("--path", path) if path else ())]


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeLevel:
    """Where the page of a node leads. above: paths and addresses of the nodes around it, the root first.

    inside: the address of each row's node; empty for those that have nothing inside. operators: that of its operators.
    """

    above: list[tuple[str, str]]
    inside: list[str]
    operators: str


def drawings(request: WebRequest, name: str) -> dict[str, dict[str, str]]:
    """What the chart of a view is told, beside its rows."""
    return {name: {"address": _address(request, "")}} if name == TREE_VIEWS[TREE] else {}


def tree_level(request: WebRequest, document: Mapping[str, Any]) -> TreeLevel | None:
    """The way from here; None for other views, and without rows."""
    rows = document["rows"]
    if document["view"] != TREE_VIEWS[TREE] or not rows:
        return None
    numbers = rows[0]["path"].split(_LEVEL)
    paths = [_LEVEL.join(numbers[:count]) for count in range(1, len(numbers))]
    page = request.path.removesuffix(TREE_VIEWS[TREE])
    return TreeLevel(
        above=[(path, _address(request, path)) for path in paths],
        inside=[_address(request, row["path"]) if at and row["children"] else "" for at, row in enumerate(rows)],
        operators=f"{page}{TREE_VIEWS['ops']}?{_fields(request, rows[0]['path'])}",
    )


def _address(request: WebRequest, path: str) -> str:
    return f"{request.path}?{_fields(request, path)}"


def _fields(request: WebRequest, path: str) -> str:
    """The fields of the address, the path last."""
    kept = [(key, value) for key, value in request.query if key != PATH and value]
    return urlencode([*kept, (PATH, path)])


# Queries in SQL, and those that were run before.
EXAMPLE = (
    "SELECT name, count(*) AS calls, sum(duration_ns) AS total_ns\nFROM events GROUP BY 1 ORDER BY 3 DESC LIMIT 20"
)
SQL_ROWS = 500


def sql_page(context: PageContext, request: WebRequest, session: WebSession) -> WebAnswer:
    """The form with the result of its query. Raises the client's errors."""
    trace_id, sql = request.first("c"), request.first("sql").strip()
    asked = Asked()
    if trace_id and sql:
        session.remember(sql)
        asked = ask(lambda: _result(context, trace_id, sql, WAIT_S, SQL_ROWS))
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
    return results_answer(_result(context, request.first("c"), sql, limit, SQL_ROWS * 10))


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
