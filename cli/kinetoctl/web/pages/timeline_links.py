"""Where in the timeline the rows of a result are: addresses of the part of the trace around each."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

STARTS = ("start_ns", "time_ns")
LENGTHS = ("duration_us", "step_us", "idle_us", "total_us")  # of what begins at such a time, in columns of the row
LEAST_MARGIN_NS, MARGIN = 100_000, 0.25  # on either side, as in kineto_trace.conversion.time_cut
NS_PER_US = 1000


def place_of(row: Mapping[str, Any], trace_id: str, rank: str = "") -> str:
    """The address of the timeline at the place of a row; empty if the row does not say when it was.

    rank: of the trace, if the row has none. A finding is shown where its operator, or its first kernel, ran longest.
    """
    own = row.get("rank")
    of_rank = {"rank": own} if own is not None else {"rank": rank} if rank else {}
    start = next((row[name] for name in STARTS if row.get(name)), None)
    if start is not None:
        length = next((row[name] for name in LENGTHS if row.get(name)), 0.0) * NS_PER_US
        margin = max(LEAST_MARGIN_NS, int(MARGIN * length))
        fields = {**of_rank, "t0": start - margin, "t1": start + int(length) + margin}
    else:
        name = _subject(row)
        if not name:
            return ""
        fields = {**of_rank, "name": name}
    return f"/c/{trace_id}/timeline?{urlencode(fields)}"


def places_of(document: Mapping[str, Any], trace_id: str, rank: str = "") -> list[str]:
    """The place of each row of a result; none at all if no row has one."""
    found = [place_of(row, trace_id, rank) for row in document["rows"]]
    return found if any(found) else []


def _subject(row: Mapping[str, Any]) -> str:
    """What a finding is about."""
    if "finding" not in row:
        return ""
    return str(row.get("op") or next(iter(row.get("kernels") or []), ""))
