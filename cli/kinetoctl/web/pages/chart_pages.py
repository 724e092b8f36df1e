"""Pages of charts of one trace: its steps by ranks, its counters, its memory, and its memory snapshots."""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from kinetoctl.options.trace_arguments import SNAPSHOT_FORMAT, all_snapshots, has_snapshot
from kinetoctl.web.http.web_messages import WebAnswer, WebError, WebRequest, WebSession
from kinetoctl.web.pages.baselines import baseline_of, baseline_values, comparison, comparison_command
from kinetoctl.web.pages.page_context import (
    MAX_ROWS,
    WAIT_S,
    OfHost,
    PageContext,
    ask,
    data_address,
    rank_choices,
    render,
    results_answer,
    row_limit,
    whole_number,
)

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

RANK_VIEWS = ("rank_steps", "ranks", "collective_summary")
VALUES = (("step_us", "length of the step"), ("waiting_us", "time waiting for other ranks"))
COUNTERS, COUNTER_SUMMARY = "counters", "counter_summary"
COUNTER_VIEWS = (COUNTER_SUMMARY, COUNTERS)
COUNTER_SETTINGS = ((f"{COUNTERS}.max_points", "300"),)
# Memory over time: what each device held, by operator, at one moment block by block, and what came and went when.
CURVE, SNAPSHOT, EVENTS, STATISTICS = "memory_curve", "memory_snapshot", "memory_events", "memory_statistics"
MEMORY_COMPARED = ("memory_peak_blocks", STATISTICS)  # with those of a baseline
MEMORY_VIEWS = (CURVE, "memory_fragmentation", "memory_holders", SNAPSHOT, *MEMORY_COMPARED, EVENTS)
DRAWN = (CURVE, "memory_holders", SNAPSHOT)
RESTRICTED = (STATISTICS, EVENTS)  # to the time from t0 to t1
MAX_NS = (1 << 63) - 1
SNAPSHOT_VIEWS = ("snapshot_devices", "snapshot_stacks", "snapshot_ooms")
SNAPSHOT_FIELDS = ("process", "segment", "block")


def ranks_page(context: PageContext, request: WebRequest, session: WebSession, trace_id: str) -> WebAnswer:
    """The steps of all ranks as a map, the ranks and their collectives. Raises WebError, and the client's errors."""
    context.parts(trace_id)
    value, arguments = _value(request), _rank_arguments(request, trace_id)
    asked = ask(lambda: context.results(trace_id, RANK_VIEWS, **arguments))
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
        command=_compared(context, request, trace_id, RANK_VIEWS, "") or _reported(context, trace_id, RANK_VIEWS),
        json=data_address(request, without=("limit",)),
    )


def ranks_json(context: PageContext, request: WebRequest, _session: WebSession, trace_id: str) -> WebAnswer:
    """The results behind the page. Raises WebError, AnalysisFailed and the client's errors."""
    return _data(context, trace_id, RANK_VIEWS, _rank_arguments(request, trace_id, MAX_ROWS))


def _value(request: WebRequest) -> str:
    value = request.first("value", VALUES[0][0])
    if value not in dict(VALUES):
        raise WebError(HTTPStatus.BAD_REQUEST, f"value must be one of {', '.join(dict(VALUES))}")
    return value


def _rank_arguments(request: WebRequest, trace_id: str, rows: int = 0) -> dict[str, Any]:
    drawing = {
        "value": _value(request),
        "ranks": request.first("rank"),
        "steps": request.first("step"),
        "page": f"/c/{trace_id}",
    }
    limit = rows or row_limit(request)
    return {"drawings": {RANK_VIEWS[0]: drawing}, "limit": limit, **comparison(request, RANK_VIEWS)}


def counters_page(context: PageContext, request: WebRequest, session: WebSession, trace_id: str) -> WebAnswer:
    """Every counter over time, beside those of a baseline. Raises WebError, and the client's errors."""
    context.parts(trace_id)
    shown = _of_ranks(context, request, trace_id, COUNTER_VIEWS, _counter_arguments(request))
    command = _compared(context, request, trace_id, [COUNTER_SUMMARY], shown["rank"])
    command = command or _reported(context, trace_id, COUNTER_VIEWS)
    return render("counters.html", context, request, session, **shown, command=command)


def counters_json(context: PageContext, request: WebRequest, _session: WebSession, trace_id: str) -> WebAnswer:
    """The results behind the page. Raises WebError, AnalysisFailed and the client's errors."""
    return _data(context, trace_id, COUNTER_VIEWS, _counter_arguments(request, MAX_ROWS))


def _counter_arguments(request: WebRequest, rows: int = 0) -> dict[str, Any]:
    rank = whole_number(request, "rank")
    return {
        "rank": int(rank) if rank else None,
        "settings": COUNTER_SETTINGS,
        "drawings": {COUNTERS: {}},
        "limit": rows or row_limit(request),
        **comparison(request, (COUNTER_SUMMARY,)),
    }


def _of_ranks(
    context: PageContext, request: WebRequest, trace_id: str, views: Sequence[str], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """What templates show of the results of views that can be narrowed to a rank. arguments: of TraceJobs.views."""
    ranks = ask(lambda: context.ranks(context.library.find(trace_id)))
    asked = ask(lambda: context.results(trace_id, views, **arguments)) if ranks.documents else ranks
    return {
        "id": trace_id,
        "ranks": rank_choices(ranks.documents),
        "rank": request.first("rank"),
        "limit": arguments["limit"],
        "asked": asked,
        "documents": {each["view"]: each for each in asked.documents} if asked is not ranks else {},
        "json": data_address(request, without=("limit",)),
        **baseline_values(context, trace_id, baseline_of(request), ranks.documents),
    }


def _data(context: PageContext, trace_id: str, views: Sequence[str], arguments: Mapping[str, Any]) -> WebAnswer:
    return results_answer(context.results(trace_id, views, wait_s=context.settings.timeout_s, **arguments))


def _compared(context: PageContext, request: WebRequest, trace_id: str, views: Sequence[str], rank: str) -> str:
    """The command that compares these views with the baseline; empty if the address names none."""
    baseline = baseline_of(request)
    return comparison_command(context, trace_id, baseline, views, rank=rank) if baseline.trace_id else ""


def _reported(context: PageContext, trace_id: str, views: Sequence[str], *words: str) -> str:
    """The command that reports these views."""
    viewed = [word for view in views for word in ("--view", view)]
    return context.command("report", *viewed, *words, context.name(trace_id))


def memory_page(context: PageContext, request: WebRequest, session: WebSession, trace_id: str) -> WebAnswer:
    """The page of the memory. Raises WebError, and the client's errors."""
    parts = context.parts(trace_id)
    arguments = _memory_arguments(request)
    shown = _of_ranks(context, request, trace_id, MEMORY_VIEWS, arguments)
    settings = [word for setting in arguments["settings"] for word in ("--set", "=".join(setting))]
    return render(
        "memory.html",
        context,
        request,
        session,
        **shown,
        snapshot=shows_snapshot(context, trace_id, parts),
        times=_times(request),
        whole=_without(request, "t0", "t1"),
        peak=_without(request, "at"),
        spans=_spans(shown["documents"][EVENTS]["rows"]) if shown["documents"] else [],
        command=_compared(context, request, trace_id, MEMORY_COMPARED, shown["rank"])
        or _reported(context, trace_id, MEMORY_VIEWS, *settings),
    )


def memory_json(context: PageContext, request: WebRequest, _session: WebSession, trace_id: str) -> WebAnswer:
    """The results behind the page. Raises WebError, AnalysisFailed and the client's errors."""
    return _data(context, trace_id, MEMORY_VIEWS, _memory_arguments(request, MAX_ROWS))


def _memory_arguments(request: WebRequest, rows: int = 0) -> dict[str, Any]:
    rank, times = whole_number(request, "rank"), _times(request)
    fields = {"start_ns": times["t0"], "end_ns": times["t1"], "at_ns": times["at"]}
    given = {name: value for name, value in fields.items() if value}
    settings = [("memory_curve.max_points", "1000")]
    settings += [
        (f"{view}.{name}", given[name]) for view in RESTRICTED for name in ("start_ns", "end_ns") if name in given
    ]
    settings += [(f"{SNAPSHOT}.at_ns", given["at_ns"])] if "at_ns" in given else []
    return {
        "rank": int(rank) if rank else None,
        "settings": settings,
        "drawings": {**{view: {} for view in DRAWN}, CURVE: {name: int(value) for name, value in given.items()}},
        "limit": rows or row_limit(request),
        **comparison(request, MEMORY_COMPARED),
    }


def _times(request: WebRequest) -> dict[str, str]:
    """The times that the address names, in Unix ns; empty where it names none. Raises WebError."""
    found = {name: whole_number(request, name) for name in ("t0", "t1", "at")}
    for name, value in found.items():
        if value and not 0 <= int(value) <= MAX_NS:
            raise WebError(HTTPStatus.BAD_REQUEST, f"{name} must be a Unix time in ns, not {value}")
    if found["t0"] and found["t1"] and int(found["t1"]) <= int(found["t0"]):
        raise WebError(HTTPStatus.BAD_REQUEST, "t1 must be later than t0 (they are the end and the start, in Unix ns)")
    return found


def _without(request: WebRequest, *names: str) -> str:
    """The address of the page without these fields."""
    kept = [(key, value) for key, value in request.query if value and key not in names]
    return request.path + (f"?{urlencode(kept)}" if kept else "")


def _spans(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """In which curve each block is, and from when to when in us since the recording began; None: its end."""
    return [
        {"curve": f"rank {row['rank']}, {row['device']}", "from": row["allocation_us"], "until": row["release_us"]}
        for row in rows
    ]


def snapshot_page(context: PageContext, request: WebRequest, session: WebSession, trace_id: str) -> WebAnswer:
    """The page of the snapshots of a capture or file. Raises WebError, and the client's errors."""
    context.parts(trace_id)
    limit = row_limit(request)
    asked = ask(lambda: [_values(context, request, trace_id, limit, WAIT_S)])
    found = asked.documents[0] if asked.documents else None
    return render(
        "snapshot.html",
        context,
        request,
        session,
        id=trace_id,
        limit=limit,
        chosen={field: request.first(field) for field in SNAPSHOT_FIELDS},
        asked=asked,
        found=found,
        documents={document["view"]: document for document in found["documents"]} if found else {},
        command=_reported(context, trace_id, SNAPSHOT_VIEWS),
        json=data_address(request, without=("limit", "block")),
    )


def snapshot_json(context: PageContext, request: WebRequest, _session: WebSession, trace_id: str) -> WebAnswer:
    """The results behind the page. Raises WebError, AnalysisFailed and the client's errors."""
    context.parts(trace_id)
    found = _values(context, request, trace_id, MAX_ROWS, context.settings.timeout_s)
    return results_answer(found["documents"])


def shows_snapshot(context: PageContext, trace_id: str, parts: "Sequence[OfHost[pb.Capture]]") -> bool:
    """Whether there is a snapshot for the page. parts: of the capture; none of a file. Raises NotFound, Computing."""
    if context.files:
        return bool(context.library.snapshots(trace_id).paths)
    return any(has_snapshot(part.item) for part in parts)


def only_snapshots(context: PageContext, trace_id: str) -> bool:
    """Whether a name of the command line stands for snapshots, and no trace. Raises NotFound."""
    return all_snapshots(context.library.find(trace_id).paths)


def _values(context: PageContext, request: WebRequest, trace_id: str, limit: int, wait_s: float) -> dict[str, Any]:
    """What SnapshotJob.values returns. Raises WebError and what results raise."""
    snapshots = context.library.snapshots(trace_id, wait_s)
    if not snapshots.paths:
        raise WebError(
            HTTPStatus.NOT_FOUND,
            f"there is no memory snapshot with {context.name(trace_id)}: take one with `kinetoctl memory` or "
            "`kinetoctl trace --activities kernel,memory_snapshot`",
        )
    chosen = {field: request.first(field) for field in SNAPSHOT_FIELDS}
    job = {"job": "snapshot", "paths": snapshots.paths, "page": f"/c/{trace_id}/snapshot", "limit": limit, **chosen}
    found: dict[str, Any] = context.queue.result(f"{SNAPSHOT_FORMAT} {snapshots.identity}", job, wait_s=wait_s)
    return found
