"""Times that can be: an event that ends before it begins, as some profilers wrote them, lasts for no time.

Exports write such events back as they are. In an analysis they would make sums and shares negative. Tables of a store,
whose columns are read when they are needed, stay as they are.
"""

from dataclasses import replace

import numpy as np

from kineto_trace.model.trace import Table, Trace


def with_possible_times(trace: Trace) -> Trace:
    """Returns the trace with negative durations as 0, and a note that counts them."""
    if not isinstance(trace.tables, dict):
        return trace
    tables, count = dict(trace.tables), 0
    for kind, table in trace.tables.items():
        duration = table.columns.get("duration")
        if duration is not None and len(duration) and duration.min() < 0:
            count += int(np.count_nonzero(duration < 0))
            tables[kind] = Table(kind, {**table.columns, "duration": np.maximum(duration, 0)}, table.origin)
    if not count:
        return trace
    whose = "1 event has a negative duration" if count == 1 else f"{count} events have negative durations"
    return replace(trace, tables=tables, notes=(*trace.notes, f"{whose}: 0 is taken"))
