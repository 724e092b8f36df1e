"""The findings of many ranks, each kind once."""

from dataclasses import replace
from typing import Any

import pyarrow as pa

from kineto_trace.view_api.result import Result


def common_findings(result: Result, ranks: int) -> Result:
    """Of view findings: what several ranks have once, as the rank has it where it costs most; the largest first.

    ranks: how many the job has.
    """
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in result.rows():
        rows.setdefault((row["finding"], row["title"]), []).append(row)
    worst = []
    for same in rows.values():
        row = max(same, key=lambda entry: entry["saving_us"] or 0.0)
        worst.append({**row, "title": f"{row['title']} (on {len(same)} of {ranks} ranks)"} if len(same) > 1 else row)
    worst.sort(key=lambda entry: -(entry["saving_us"] or 0.0))
    return replace(result, table=pa.Table.from_pylist(worst, schema=result.table.schema))
