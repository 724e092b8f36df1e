"""One capture or file: the verdicts, what the time went to, what to change, and the way to every view."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from kineto_trace.view_api.cell_texts import view_sentence

from kinetoctl.base.view_settings import COMPARED_FIRST
from kinetoctl.client.tracing import has_ended
from kinetoctl.errors import Refused
from kinetoctl.output.console import plain
from kinetoctl.web.http.web_messages import WebAnswer, WebError, WebRequest, WebSession, redirect
from kinetoctl.web.pages.baselines import baseline_of, baseline_values, comparison_command
from kinetoctl.web.pages.chart_pages import only_snapshots, shows_snapshot
from kinetoctl.web.pages.list_pages import all_done, facts, has_trace, running, status_of, target_facts
from kinetoctl.web.pages.page_context import WAIT_S, Asked, PageContext, ask, hosts_answer, json_answer, render

# A view belongs to the first group that one of whose words begins its name; all others are in the last one.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "Where the time goes": ("overview", "time_causes", "step", "profiler_steps", "findings", "recommendations",
                            "critical_path", "flame_graph", "annotation", "recordings", "settings", "not_recorded",
                            "validate"),
    "GPU": ("kernel", "operator_flops", "flops", "gpu", "idle", "temporal", "sm_", "tensor_core", "queue", "blocked",
            "launch", "op_kernel", "cuda_graphs", "graph_", "memory_bandwidth", "counter", "roofline", "throttling",
            "op_counters", "module_counters"),
    "Memory": ("memory", "tensors"),
    "Host and Python": ("operators", "modules", "call_tree", "python", "hot_lines", "thread", "process", "child",
                        "data_loading", "frequent", "event"),
    "Ranks and collectives": ("rank", "collective", "comm", "distributed", "stragglers"),
    "Compared with a baseline": ("diff",),
}  # fmt: skip
OTHERS = "Others"
# What most people ask first: the link, its place below the capture, the question that it answers, and the parts of a
# trace (view validate) without all of which it has nothing to show.
QUESTIONS = (
    ("Step time", "view/time_causes", "Where does the time of a step go?", ("step time",)),
    ("Kernels", "view/kernels", "Which kernels take the GPU's time?", ("GPU activities",)),
    ("Idle GPU", "view/idle_causes", "Is the GPU waiting, and for what?", ("GPU activities",)),
    ("Memory", "memory", "What is in the GPU's memory, and what allocated it?", ("allocations",)),
    ("Ranks", "ranks", "Which rank is slow, and which ones wait for it?", ("ranks",)),
    ("Timeline", "timeline", "What happens when, on which thread and stream?", ("events",)),
    ("Flame graphs", "flame", "Which operators and Python functions take the time?", ("operators", "Python stacks")),
    ("Counters", "counters", "How were the CPUs, the memory and the GPUs' units used?", ("counters",)),
)
# The same parts for the other views, whose names begin with one of the words; the first one counts.
NEEDS: Sequence[tuple[tuple[str, ...], tuple[str, ...]]] = (
    (("hardware counters",), ("annotation_counters", "collective_counters", "counter_curves", "gpu_clocks",
                              "gpu_counters", "kernel_counters", "module_counters", "op_counters", "roofline",
                              "step_counters", "throttling")),
    (("profiled ranges",), ("counters_with_operators",)),
    (("counters",), ("counter", "process_use", "thread_times", "child_processes")),
    (("counters", "Python stacks"), ("threads",)),
    (("launches of GPU activities",), ("blocked", "launch_stats", "op_kernel_delay", "queue_length")),
    (("GPU activities",), ("comm_comp", "cuda_graphs", "distributed_devices", "frequent", "gpu", "graph", "idle",
                           "kernel", "memory_bandwidth", "sm_", "temporal")),
    (("allocations",), ("memory",)),
    (("GPU activities", "operators"), ("collective", "distributed_ops", "flops", "hlo_ops")),
    (("operators",), ("operator", "tensors")),
    (("operators", "annotations", "Python stacks"), ("call_tree", "flame_graph", "modules")),
    (("annotations",), ("annotation",)),
    (("Python stacks",), ("hot_lines", "python")),
    (("ranks",), ("rank_waits", "rank_what_if")),
    (("step time",), ("time_causes", "rank_time_causes")),
    (("events",), ("event_selection", "profiler_steps", "rank_steps", "recommendations", "step_breakdown",
                   "step_spread")),
)  # fmt: skip


def capture_page(context: PageContext, request: WebRequest, session: WebSession, capture_id: str) -> WebAnswer:
    """The page of one capture. Raises the client's errors."""
    parts = context.parts(capture_id)
    if context.files and only_snapshots(context, capture_id):
        return redirect(f"/c/{capture_id}/snapshot")
    unfinished, baseline = running(parts), baseline_of(request)
    asked = Asked(failure="" if unfinished else "This capture has no trace; the verdicts above say why.")
    if not unfinished and (context.files or has_trace(parts)):
        asked = ask(lambda: context.first_screen(capture_id, baseline.trace_id, baseline.rank_number))
    ranks = (
        [] if asked.failure or unfinished else ask(lambda: context.ranks(context.library.find(capture_id))).documents
    )
    catalog = ask(lambda: context.catalog(WAIT_S))
    first = asked.documents[0] if asked.documents else None
    name, reasons = context.name(capture_id), nothing_because(first)
    groups = [] if unfinished else grouped(catalog.documents, reasons)
    return render(
        "capture.html",
        context,
        request,
        session,
        id=capture_id,
        name=name,
        state=status_of(parts) if parts else "",
        running=unfinished,
        traceless=bool(parts) and not unfinished and not has_trace(parts),
        snapshot=not unfinished and shows_snapshot(context, capture_id, parts),
        asked=asked,
        first=first,
        **({"bases": []} if unfinished else baseline_values(context, capture_id, baseline, ranks)),
        questions=[(*question, _why(needs, reasons)) for *question, needs in QUESTIONS],
        groups=groups,
        count=sum(len(views) for _, views in groups),
        command=comparison_command(context, capture_id, baseline, COMPARED_FIRST)
        if baseline.trace_id
        else context.command("report", name),
        json=f"/c/{capture_id}.json" if parts else "",
        headers={**asked.headers, **catalog.headers},
        facts=facts(parts) if parts else _facts(first),
        targets=target_facts(parts),
        whole=not unfinished and all_done(parts),
    )


def nothing_because(first: Mapping[str, Any] | None) -> dict[str, str]:
    """The parts that the traces lack, each with the reason; empty while that is not known."""
    if first is None:
        return {}
    reasons = {part: f"no {part}" for part in first["lacking"]}
    for row in first["missing"]["rows"]:
        if reasons.get(row["what"]) == f"no {row['what']}":  # else a part of it was lost, or ranks have several reasons
            reasons[row["what"]] += f": {row['why']}"
    if not first["several"]:
        reasons["ranks"] = "only one process was recorded"
    if not first["time"]["rows"] and not first["time"].get("failure"):
        reasons["step time"] = next(iter(first["time"]["notes"]), "").removeprefix("not shown: ")
    return reasons


def _why(needs: Sequence[str], reasons: Mapping[str, str]) -> str:
    """Why there is nothing to show: the reason of the first part; "" if one of the parts is there."""
    return reasons[needs[0]] if needs and all(part in reasons for part in needs) else ""


def stop_form(context: PageContext, _request: WebRequest, _session: WebSession, capture_id: str) -> WebAnswer:
    """Stops a capture, which keeps what was recorded, and shows it. Raises the client's errors."""
    for part in context.parts(capture_id):
        if not has_ended(part.item):
            with context.daemons.client(part.place) as client, suppress(Refused):  # it has ended by itself
                client.cancel(part.item.id, keep_partial=True)
    return redirect(f"/c/{capture_id}")


def capture_json(context: PageContext, _request: WebRequest, _session: WebSession, capture_id: str) -> WebAnswer:
    """The daemon's message of the capture, or those of its hosts. Raises WebError, and the client's errors."""
    if context.files:
        raise WebError(HTTPStatus.NOT_FOUND, "trace files do not belong to a capture")
    found = context.daemons.parts(capture_id)
    if context.daemons.several:
        return hosts_answer(found, "captures", several=True)
    return json_answer(plain(found.items[0].item))


def _facts(first: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    return [(label, text) for label, text in first["facts"]] if first else []


def grouped(catalog: Sequence[Mapping[str, Any]], reasons: Mapping[str, str]) -> list[tuple[str, list[dict[str, str]]]]:
    """The views by group, in the order of its words, each with its name and the first sentence of its description.

    reasons: of nothing_because, for `why` a view has nothing to show.
    """
    groups: dict[str, list[dict[str, str]]] = {name: [] for name in (*GROUPS, OTHERS)}
    for view in sorted(catalog, key=lambda view: (_place(view["name"]), str(view["name"]))):
        groups[_place(view["name"])[0]].append(
            {
                "name": view["name"],
                "about": view_sentence(view["name"], view["description"]),
                "why": _why(needs_of(view["name"]), reasons),
            }
        )
    return [(name, views) for name, views in groups.items() if views]


def needs_of(name: str) -> tuple[str, ...]:
    """The parts of a trace without all of which this view is empty; none if it never is, or that is not known."""
    return next((parts for parts, words in NEEDS if name.startswith(words)), ())


def _place(name: str) -> tuple[str, int]:
    """The group of a view, and the place of its word there."""
    places = ((group, place, word) for group, words in GROUPS.items() for place, word in enumerate(words))
    return next(((group, place) for group, place, word in places if name.startswith(word)), (OTHERS, 0))
