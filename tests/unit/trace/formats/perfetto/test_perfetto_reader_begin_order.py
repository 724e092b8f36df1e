import json
from pathlib import Path
from typing import Any

import pytest
from kineto_trace.formats.perfetto.perfetto_reader import load_perfetto
from kineto_trace.formats.trace_export import export_trace
from support.trace_files.chrome_files import event, load_events, names, written


@pytest.mark.parametrize("duration", [5, 0])
@pytest.mark.parametrize("category", ["cpu_op", "user_annotation"])
def test_the_order_of_events_with_equal_times_stays(tmp_path: Path, category: str, duration: float) -> None:
    events = [event(category, name, 10, duration) for name in ("outer", "middle", "inner")]
    path = tmp_path / "t.pftrace"
    export_trace(load_events(event("cpu_op", "before", 2, 3), *events, event("cpu_op", "after", 20, 3)), path)
    assert [name for name in names(load_perfetto(path), category) if name not in ("before", "after")] == [
        "outer",
        "middle",
        "inner",
    ]


def test_the_order_over_tables_stays(tmp_path: Path) -> None:
    events = [
        event("user_annotation", "step", 10, 5),
        event("cpu_op", "op", 10, 5),
        event("cuda_runtime", "call", 10, 5),
        event("cpu_op", "elsewhere", 10, 5) | {"tid": 3},
    ]
    path = tmp_path / "t.pftrace"
    export_trace(load_events(*events), path)
    found: list[dict[str, Any]] = json.loads(written(load_perfetto(path)))["traceEvents"]
    assert [row["name"] for row in found if row["ph"] == "X" and row["tid"] == 2] == ["step", "op", "call"]
