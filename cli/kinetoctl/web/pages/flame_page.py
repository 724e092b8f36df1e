"""Flame graphs of one capture: of Python, operators, kernels or modules; merged, timed or around one function."""

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

from kinetoctl.web.http.web_messages import WebAnswer, WebError, WebRequest, WebSession
from kinetoctl.web.pages.baselines import Baseline, baseline_of, baseline_values
from kinetoctl.web.pages.page_context import (
    WAIT_S,
    PageContext,
    ask,
    data_address,
    json_answer,
    rank_choices,
    render,
    whole_number,
)

OF = {
    "ops": "operators",
    "kernels": "GPU work",
    "python": "Python",
    "modules": "modules, on the host",
    "modules_gpu": "modules, on the GPU",
}
ON_GPU = ("kernels", "modules_gpu")
ORDERS = {"merged": "merged", "time": "in time order", "sandwich": "sandwich: one function"}
IDLE = {"yes": "with idle samples"}
NUMBERS = ("rank", "step", "thread", "base_rank")
KEPT = ("of", "order", *NUMBERS, "idle", "base")  # fields that stay when a frame is chosen
ONLY_OF_PAGES = ("charts", "path")
# What colours mean, by what the graph is of.
LEGEND: Mapping[str, tuple[tuple[str, str], ...]] = {
    "ops": (("annotation", "annotation"), ("operator", "operator"), ("others", "others")),
    "kernels": (
        ("function", "Python"),
        ("annotation", "annotation"),
        ("operator", "operator"),
        ("gpu", "kernel, copy or fill"),
        ("others", "others"),
    ),
    "modules": (("module", "module"), ("others", "others")),
    "modules_gpu": (("module", "module"), ("others", "others")),
    "python": (
        ("function", "running or unknown"),
        ("waiting", "waiting for the GIL"),
        ("idle", "idle"),
        ("others", "others"),
    ),
}
DIFFERENCES = (
    *((f"less-{strength}", "less" if strength == 4 else "") for strength in (4, 3, 2, 1)),
    ("same", "same"),
    *((f"more-{strength}", "more than in the baseline" if strength == 4 else "") for strength in (1, 2, 3, 4)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlameFields:
    """What the address asks for; fields are "" without a value."""

    trace_id: str
    fields: Mapping[str, str]
    root: str
    focus: str

    def job(self) -> dict[str, Any]:
        """The job for a worker."""
        numbers = {name: int(self.fields[name]) if self.fields[name] else None for name in NUMBERS}
        return {
            "job": "flame",
            **numbers,
            "of": self.fields["of"],
            "order": self.fields["order"],
            "idle": bool(self.fields["idle"]),
            "root": self.root,
            "focus": self.focus,
            "address": f"/c/{self.trace_id}/flame",
            "fields": [(name, value) for name, value in self.fields.items() if value],
        }


def flame_page(context: PageContext, request: WebRequest, session: WebSession, trace_id: str) -> WebAnswer:
    """The page. Raises WebError, and the client's errors."""
    asked_for = _fields(request, trace_id)
    fields = asked_for.fields
    ranks = ask(lambda: context.ranks(context.library.find(trace_id)))
    asked = ranks if not ranks.documents else ask(lambda: [_values(context, asked_for, WAIT_S)])
    values = asked.documents[0] if asked.documents and asked is not ranks else None
    return render(
        "flame.html",
        context,
        request,
        session,
        id=trace_id,
        fields=fields,
        ofs=list(OF.items()),
        orders=list(ORDERS.items()),
        on_gpu=fields["of"] in ON_GPU,
        idles=list(IDLE.items()),
        ranks=rank_choices(ranks.documents),
        all_ranks="first" if fields["order"] == "time" else "all",
        **baseline_values(context, trace_id, baseline_of(request), ranks.documents),
        focus=asked_for.focus,
        zoomed=bool(asked_for.root or asked_for.focus),
        legend=DIFFERENCES if values and values["compares"] and fields["order"] != "time" else LEGEND[fields["of"]],
        asked=asked,
        values=values,
        whole=f"{request.path}?{urlencode([(name, value) for name, value in fields.items() if value])}",
        command=_command(context, asked_for),
        json=data_address(request),
    )


def flame_json(context: PageContext, request: WebRequest, _session: WebSession, trace_id: str) -> WebAnswer:
    """The frames and functions that the page shows. Raises WebError, AnalysisFailed and the client's errors."""
    values = _values(context, _fields(request, trace_id), context.settings.timeout_s)
    functions = [{key: value for key, value in each.items() if key != "link"} for each in values["functions"]]
    shown = {key: value for key, value in values.items() if key not in ONLY_OF_PAGES}
    return json_answer({**shown, "functions": functions})


def _fields(request: WebRequest, trace_id: str) -> FlameFields:
    """Raises WebError for values that there are not."""
    fields = {name: request.first(name) for name in KEPT} | {
        **{name: whole_number(request, name) for name in NUMBERS},
        "of": request.first("of") or "ops",
        "order": request.first("order") or "merged",
    }
    for name, known in (("of", OF), ("order", ORDERS)):
        if fields[name] not in known:
            raise WebError(HTTPStatus.BAD_REQUEST, f"{name} must be one of {', '.join(known)}")
    return FlameFields(trace_id=trace_id, fields=fields, root=request.first("root"), focus=request.first("focus"))


def _values(context: PageContext, asked_for: FlameFields, wait_s: float) -> Mapping[str, Any]:
    found: Mapping[str, Any] = context.answer(
        asked_for.trace_id, asked_for.job(), base=asked_for.fields["base"], wait_s=wait_s
    )
    return found


def _command(context: PageContext, asked_for: FlameFields) -> str:
    """The command that lists the stacks, or of two traces how their functions differ."""
    fields = asked_for.fields
    own = context.name(asked_for.trace_id)
    if fields["base"]:
        ranks = Baseline(trace_id=fields["base"], rank=fields["base_rank"]).words(fields["rank"])
        by = fields["of"].removesuffix("_gpu")
        return context.command("diff", "--by", by, *ranks, context.name(fields["base"]), own)
    chosen = {"of": fields["of"], "thread": fields["thread"], "step": fields["step"], "idle": fields["idle"] and "true"}
    settings = [word for name, value in chosen.items() if value for word in ("--set", f"{name}={value}")]
    return context.command("report", "--view", "flame_graph", *settings, own)
