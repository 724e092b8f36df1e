"""Numbers that no column has room for, wherever a trace states them, are missing values: no view breaks on them."""

import json
from pathlib import Path
from typing import Any

import pytest
from kineto_trace import find_traces, views
from kineto_trace.base.visible_text import one_line
from kineto_trace.catalog.view_runner import Request, run_views
from kineto_trace.errors import TraceError
from kineto_trace.view_api.view import Compat

HUGE: tuple[Any, ...] = (2**63, -(2**64), 10**30, float("inf"), "9" * 5000, [2**70])
COLLECTIVE = {
    "Collective name": "allreduce", "In msg nelems": 4, "Out msg nelems": 4, "dtype": "Float", "Group size": 2,
    "Process Group Name": "0", "Process Group Ranks": [0, 1], "Seq": 3,
}  # fmt: skip
OPERATOR = {"External id": 1, "Input Dims": [[4]], "Input type": ["float"], **COLLECTIVE}
KERNEL = {"device": 0, "stream": 7, "correlation": 1, "External id": 1, **COLLECTIVE}
PLACES = (
    ("rank",),
    *((kind, name) for kind in ("operator", "kernel") for name in ("In msg nelems", "Group size", "Seq")),
    *(("operator", name) for name in ("Input Dims", "Process Group Ranks")),
    ("step",),
    ("device",),
)


def document(place: tuple[str, ...], value: Any) -> str:
    operator, kernel, step, rank, device = {**OPERATOR}, {**KERNEL}, "1", 0, 0
    if place == ("step",):
        step = str(value)
    elif place == ("rank",):
        rank = value
    elif place == ("device",):
        device = value
    else:
        changed = [value, 2] if "Ranks" in place[1] else [[value, 2]] if "Dims" in place[1] else value
        {"operator": operator, "kernel": kernel}[place[0]][place[1]] = changed
    host: dict[str, Any] = {"ph": "X", "pid": 1, "tid": 1}
    events = [
        {**host, "cat": "user_annotation", "name": f"ProfilerStep#{step}", "ts": 0, "dur": 50},
        {**host, "cat": "cpu_op", "name": "record_param_comms", "ts": 1, "dur": 5, "args": operator},
        {**host, "cat": "cpu_op", "name": "nccl:all_reduce", "ts": 1, "dur": 5, "args": operator},
        {**host, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 2, "dur": 1, "args": {"correlation": 1}},
        {
            "ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_f32_RING", "ts": 3, "dur": 9, "pid": 0,
            "tid": 7, "args": kernel,
        },
    ]  # fmt: skip
    of_job = {"backend": "nccl", "rank": rank, "world_size": 2}
    head = {"schemaVersion": 1, "distributedInfo": of_job, "deviceProperties": [{"id": device}]}
    return json.dumps({**head, "traceEvents": events})


@pytest.mark.parametrize("place", PLACES, ids="-".join)
def test_a_number_that_no_column_has_room_for_breaks_no_view(place: tuple[str, ...], tmp_path: Path) -> None:
    for value in HUGE:
        path = tmp_path / "trace.json"
        path.write_text(document(place, value))
        sources = find_traces(path)
        for compat in Compat:
            known = [name for name, view in views().items() if compat is Compat.NONE or compat in view.compat]
            requests = [Request(view=name, compat=compat) for name in known if not name.startswith("diff_")]
            failures = _failures(requests, sources)
            assert not [each for each in failures if "Error" in each], one_line(str(value))[:40]
            assert "" in failures


def _failures(requests: list[Request], sources: list[Any]) -> list[str]:
    try:
        return [result.failure or "" for result in run_views(requests, sources)]
    except TraceError as exc:
        return [str(exc)]
