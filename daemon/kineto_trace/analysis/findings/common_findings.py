"""The findings of many ranks, each kind once."""

from dataclasses import replace
from typing import Any

import pyarrow as pa

from kineto_trace.view_api.result import Result

MANY_RANKS = 6  # from so many on, nobody reads them rank by rank


def common_findings(result: Result) -> Result:
    """Of view findings: what several ranks have once, as the rank has it where it costs most; the largest first."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in result.rows():
        rows.setdefault((row["finding"], row["title"]), []).append(row)
    worst = []
    for same in rows.values():
        row = max(same, key=lambda entry: entry["saving_us"] or 0.0)
        worst.append({**row, "title": f"{row['title']} (on {len(same)} ranks)"} if len(same) > 1 else row)
    worst.sort(key=lambda entry: -(entry["saving_us"] or 0.0))
    return replace(result, table=pa.Table.from_pylist(worst, schema=result.table.schema))
