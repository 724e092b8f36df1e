"""Chrome events made by hand, as HTA would read them; times in us."""

from collections.abc import Sequence
from typing import Any

from kineto_trace.catalog.view_catalog import find_view
from kineto_trace.model.context import Context
from kineto_trace.view_api.view import Compat

from support.trace_files.chrome_files import load_events

Event = dict[str, Any]


def event(category: str, name: str, ts: float, dur: float, pid: int = 1, tid: int = 1, **args: Any) -> Event:
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def op(name: str, ts: float, dur: float, tid: int = 1) -> Event:
    return event("cpu_op", name, ts, dur, tid=tid)


def launch(correlation: int, ts: float, dur: float = 1, name: str = "cudaLaunchKernel", tid: int = 1) -> Event:
    return event("cuda_runtime", name, ts, dur, tid=tid, correlation=correlation)


def gpu(
    name: str, ts: float, dur: float, correlation: int, stream: int = 7, kind: str = "kernel", **args: Any
) -> Event:
    numbers = {"device": 0, "stream": stream, "correlation": correlation}
    return event(kind, name, ts, dur, 0, stream, **{**numbers, **args})


def step(number: int, ts: float, dur: float) -> Event:
    return event("user_annotation", f"ProfilerStep#{number}", ts, dur)


def context(events: Sequence[Event]) -> Context:
    return Context(load_events(*events))


def rows(events: Sequence[Event], view: str, *names: str, hta: bool = True, **options: Any) -> list[tuple[Any, ...]]:
    """These columns of a view of the events."""
    result = find_view(view)(context(events), compat=Compat.HTA if hta else Compat.NONE, **options)
    return [tuple(row[name] for name in names) for row in result.rows()]
