"""One view of one capture: its chart, its table, its definition, and the selectors that it takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

from kinetoctl.base.diff_names import DIFF_VIEWS
from kinetoctl.web.http.sessions import WebSession
from kinetoctl.web.http.web_messages import WebAnswer, WebError, WebRequest
from kinetoctl.web.pages.baselines import baselines
from kinetoctl.web.pages.json_answers import result_answer
from kinetoctl.web.pages.page_context import WAIT_S, PageContext, ask, render
from kinetoctl.web.pages.view_groups import sentence

DEFAULT_ROWS, MAX_ROWS = 100, 20_000
DIFF, SETTING = "diff_", "set."


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewChoice:
    """What of a view is asked for. rank and step: empty for all; base: the id of the traces to compare with."""

    name: str
    trace_id: str
    rank: str
    step: str
    base: str
    settings: tuple[tuple[str, str], ...]
    limit: int

    @property
    def compares(self) -> bool:
        """Whether the view needs a baseline."""
        return self.name.startswith(DIFF)


def view_page(context: PageContext, request: WebRequest, session: WebSession, trace_id: str, name: str) -> WebAnswer:
    """The page of a view. Raises WebError, and the client's errors."""
    view, choice = _view(context, name), _choice(request, trace_id, name)
    ranks = ask(lambda: context.ranks(context.library.find(trace_id)))
    asked = ranks
    if ranks.documents and (choice.base or not choice.compares):
        asked = ask(lambda: _documents(context, choice, WAIT_S))
    document = asked.documents[0] if asked.documents and asked is not ranks else None
    set_to = dict(choice.settings)
    options = [{**option, "value": set_to.get(option["name"], "")} for option in view["options"]]
    return render(
        "view.html",
        context,
        request,
        session,
        id=trace_id,
        name=context.name(trace_id),
        view={**view, "options": options},
        sentence=sentence(view["description"]),
        ranks=[(each["rank"], f"{each['rank']} ({each['name']})") for each in ranks.documents],
        rank=choice.rank,
        steps=[(step, step) for step in document["steps"]] if document else [],
        step=choice.step,
        bases=baselines(context, trace_id) if choice.compares else None,
        base=choice.base,
        limit=choice.limit,
        asked=asked,
        document=document,
        command=_command(context, choice),
        json=_json_address(request),
        headers=asked.headers,
    )


def view_json(context: PageContext, request: WebRequest, _session: WebSession, trace_id: str, name: str) -> WebAnswer:
    """The result as `kinetoctl report -o json` prints it. Raises WebError, AnalysisFailed and the client's errors."""
    _view(context, name)
    choice = _choice(request, trace_id, name, MAX_ROWS)
    return result_answer(_documents(context, choice, context.settings.timeout_s)[0])


def _view(context: PageContext, name: str) -> Mapping[str, Any]:
    found = context.view(name)
    if found is None:
        raise WebError(HTTPStatus.NOT_FOUND, f"there is no view {name}")
    return found


def _choice(request: WebRequest, trace_id: str, name: str, rows: int = DEFAULT_ROWS) -> ViewChoice:
    """Raises WebError for numbers that are none."""
    rank = request.first("rank")
    try:
        limit = min(MAX_ROWS, max(1, int(request.first("limit") or rows)))
        rank = str(int(rank)) if rank else ""
    except ValueError as exc:
        raise WebError(HTTPStatus.BAD_REQUEST, f"rank and limit are whole numbers: {exc}") from exc
    settings = tuple(
        (key.removeprefix(SETTING), value) for key, value in request.query if key.startswith(SETTING) and value
    )
    return ViewChoice(
        name=name,
        trace_id=trace_id,
        rank=rank,
        step=request.first("step"),
        base=request.first("base"),
        settings=settings,
        limit=limit,
    )


def _documents(context: PageContext, choice: ViewChoice, wait_s: float) -> Sequence[Mapping[str, Any]]:
    traces = context.library.find(choice.trace_id, wait_s)
    identity, base = traces.identity, ()
    if choice.compares and choice.base:
        before = context.library.find(choice.base, wait_s)
        identity, base = f"{identity} {before.identity}", before.paths  # type: ignore[assignment]
    job = {
        "job": "views",
        "names": [choice.name],
        "paths": traces.paths,
        "base": base,
        "rank": int(choice.rank) if choice.rank else None,
        "step": choice.step,
        "settings": choice.settings,
        "limit": choice.limit,
    }
    found: Sequence[Mapping[str, Any]] = context.queue.result(identity, job, wait_s=wait_s)
    return found


def _command(context: PageContext, choice: ViewChoice) -> str:
    by = next((word for word, view in DIFF_VIEWS.items() if view == choice.name), None)
    if by is not None:
        return context.command(
            "diff", "--by", by, context.name(choice.base) or "BASELINE", context.name(choice.trace_id)
        )
    settings = [word for name, value in choice.settings for word in ("--set", f"{name}={value}")]
    base = [context.name(choice.base)] if choice.base else []
    return context.command("report", "--view", choice.name, *settings, *base, context.name(choice.trace_id))


def _json_address(request: WebRequest) -> str:
    kept = [(key, value) for key, value in request.query if value and key != "limit"]
    return f"{request.path}.json" + (f"?{urlencode(kept)}" if kept else "")
