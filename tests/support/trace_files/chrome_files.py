"""Chrome traces in memory, for tests of their loader and of the way back."""

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kineto_trace.formats.chrome.chrome_reader import load_chrome
from kineto_trace.formats.chrome.chrome_writer import write_chrome
from kineto_trace.formats.text_sinks import TextSink
from kineto_trace.model.trace import Trace

BASE_NS = 1_790_857_026_000_000_000


def event(category: str, name: str, ts: float = 0, dur: float = 0, **members: Any) -> dict[str, Any]:
    """A complete event in process 1, thread 2."""
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 2, "ts": ts, "dur": dur, **members}


def document(*events: Mapping[str, Any], **head: Any) -> str:
    """A document whose times are relative to BASE_NS."""
    return json.dumps({"baseTimeNanoseconds": BASE_NS, **head, "traceEvents": list(events)})


def load(text: str | bytes) -> Trace:
    """The trace of this document."""
    return load_chrome(io.BytesIO(text.encode() if isinstance(text, str) else text), name="trace.json")


def load_events(*events: Mapping[str, Any], **head: Any) -> Trace:
    """The trace of these events."""
    return load(document(*events, **head))


def written(trace: Trace) -> bytes:
    """The trace as a Chrome trace."""
    out = io.BytesIO()
    with TextSink(out) as sink:
        write_chrome(trace, sink, trace_name="unused")
    return out.getvalue()


def back(text: str | bytes) -> Any:
    """The document after it was read and written again."""
    return json.loads(written(load(text)))


def names(trace: Trace, kind: str) -> Sequence[str]:
    """The names of a table's rows."""
    return [trace.strings[number] for number in trace.table(kind)["name"].tolist()]
