"""A memory snapshot: what the allocator holds, segment by segment and stack by stack, and what it did before."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from kinetoctl.options.snapshot_arguments import SNAPSHOT_FORMAT, all_snapshots, has_snapshot
from kinetoctl.web.http.sessions import WebSession
from kinetoctl.web.http.web_messages import WebAnswer, WebError, WebRequest
from kinetoctl.web.pages.json_answers import data_address, results_answer
from kinetoctl.web.pages.page_context import WAIT_S, PageContext, ask, render
from kinetoctl.web.pages.selectors import MAX_ROWS, row_limit

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

    from kinetoctl.web.pages.daemons import OfHost

VIEWS = ("snapshot_devices", "snapshot_stacks", "snapshot_ooms")
FIELDS = ("process", "segment", "block")


def snapshot_page(context: PageContext, request: WebRequest, session: WebSession, trace_id: str) -> WebAnswer:
    """The page of the snapshots of a capture or file. Raises WebError, and the client's errors."""
    context.parts(trace_id)
    limit = row_limit(request)
    asked = ask(lambda: [_values(context, request, trace_id, limit, WAIT_S)])
    found = asked.documents[0] if asked.documents else None
    name = context.name(trace_id)
    return render(
        "snapshot.html",
        context,
        request,
        session,
        id=trace_id,
        name=name,
        limit=limit,
        chosen={field: request.first(field) for field in FIELDS},
        asked=asked,
        found=found,
        documents={document["view"]: document for document in found["documents"]} if found else {},
        command=context.command("report", *(word for view in VIEWS for word in ("--view", view)), name),
        json=data_address(request, without=("limit", "block")),
        headers=asked.headers,
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
            f"there is no memory snapshot beside {context.name(trace_id)}: `kinetoctl memory` takes one, and so does "
            "`kinetoctl trace --activities kernel,memory_snapshot`",
        )
    chosen = {field: request.first(field) for field in FIELDS}
    job = {"job": "snapshot", "paths": snapshots.paths, "page": f"/c/{trace_id}/snapshot", "limit": limit, **chosen}
    found: dict[str, Any] = context.queue.result(f"{SNAPSHOT_FORMAT} {snapshots.identity}", job, wait_s=wait_s)
    return found
