"""gpu_user_annotation: what an annotation's GPU work looks like on each stream.

Theory of operation
    Every GPU activity extends the span of the innermost annotation around its launch, on the activity's stream: from
    the first start to the last end. So an iteration's span does not cover what only the optimizer step inside it
    launched, as in Kineto's traces. The spans here are exact; Kineto's writer begins them one ns earlier and ends
    them one ns later, which is the exporter's business.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.id_sets import lookup
from kineto_trace.model.trace import API_TABLES, GPU_TABLES, NO_ROW, Table, make_table
from kineto_trace.structure.nesting import last_end, nest_tables

KIND = "gpu_user_annotation"

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spans:
    """Spans (Unix ns) of annotations on streams. place: of the annotation, in its tree."""

    place: npt.NDArray[np.int32]
    device: npt.NDArray[np.uint32]
    stream: npt.NDArray[np.uint32]
    start: Ints
    end: Ints

    def take(self, rows: npt.NDArray[Any]) -> "_Spans":
        """Some of them."""
        return _Spans(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def merged(self) -> "_Spans":
        """One per annotation and stream, in that order."""
        if not len(self.place):
            return self
        queue = self.device.astype(np.uint64) << np.uint64(32) | self.stream
        order = np.lexsort((queue, self.place))
        place, queue = self.place[order], queue[order]
        begins = np.ones(len(order), np.bool_)
        begins[1:] = (place[1:] != place[:-1]) | (queue[1:] != queue[:-1])
        first = np.flatnonzero(begins)
        start = np.minimum.reduceat(self.start[order], first)
        end = np.maximum.reduceat(self.end[order], first)
        return replace(self.take(order[first]), start=start, end=end)


def gpu_annotations(tables: Mapping[str, Table]) -> Table:
    """One row per annotation, device and stream that it has GPU work on. Empty without any of the parts."""
    annotations = tables.get("user_annotation")
    calls = [tables[kind] for kind in API_TABLES if kind in tables and len(tables[kind])]
    work = [tables[kind] for kind in GPU_TABLES if kind in tables and len(tables[kind])]
    if annotations is None or not len(annotations) or not calls or not work:
        return make_table(KIND, 0, {})
    nested = nest_tables([annotations], last_end([annotations, *calls]) + 1)
    thread, time, correlation = (
        np.concatenate([call[name] for call in calls]) for name in ("thread", "start", "correlation")
    )
    place = nested.innermost(thread, time)
    inside = np.flatnonzero((place >= 0) & (correlation != 0))
    launched = np.concatenate([table["correlation"] for table in work])
    spans = _Spans(
        place=lookup(launched, correlation[inside], place[inside], NO_ROW),
        device=np.concatenate([table["device"] for table in work]),
        stream=np.concatenate([table["stream"] for table in work]),
        start=np.concatenate([table["start"] for table in work]),
        end=np.concatenate([table.end() for table in work]),
    )
    merged = spans.take(spans.place >= 0).merged()
    row = nested.order[merged.place]
    columns = {
        "start": merged.start,
        "duration": merged.end - merged.start,
        "name": annotations["name"][row],
        "device": merged.device,
        "stream": merged.stream,
        "external_id": annotations["id"][row],
    }
    return make_table(KIND, len(row), columns)
