"""Every view answers on every trace, or says why not, with figures that can be true."""

from pathlib import Path

import pytest
from kineto_trace import find_traces, open_trace, run_view, run_views, views
from kineto_trace.errors import FileError, TraceError
from kineto_trace.model.context import Context
from kineto_trace.view_api.result import Result
from support.trace_files.h200 import DATA
from support.trace_files.public_traces import trace_paths, unpacked

ROUNDING = 1e-6
NOTHING_SAID = "the trace has no data for this view"
SIGNED = {
    ("counters", "time_us"),
    ("event_selection", "time_us"),
    ("ranks", "slower_pct"),
    ("rank_what_if", "saving_us"),
    ("rank_what_if", "saving_pct"),
}  # differences, and times from the start of the window, which begins with the first activity if the file has none


def impossible(result: Result) -> list[str]:
    """Figures that cannot be true, and answers that say nothing."""
    found = []
    for column in result.columns:
        if column.type not in ("int", "float") or column.unit not in ("%", "us", "ns"):
            continue
        if (result.view, column.name) in SIGNED:
            continue
        values = [value for value in result.values(column.name) if value is not None]
        limit = 100 + ROUNDING if column.unit == "%" else float("inf")
        wrong = [value for value in values if not -ROUNDING <= value <= limit]
        if wrong:
            found.append(
                f"{result.view}.{column.name}: {len(wrong)} of {len(values)}, such as {wrong[0]} {column.unit}"
            )
    if not len(result) and set(result.notes) <= {NOTHING_SAID}:
        found.append(f"{result.view}: no rows, and no note why")
    return found


@pytest.mark.parametrize("source", trace_paths(), ids=lambda path: path.name)
def test_all_views_of_a_trace(source: Path, tmp_path: Path) -> None:
    try:
        context = Context(open_trace(unpacked(source, tmp_path)))
    except FileError as exc:
        pytest.skip(f"no trace: {exc}")
    found = []
    for name, view in views().items():
        try:
            found += impossible(run_view(name, context))
        except TraceError as exc:
            assert str(exc)
        for compat in view.compat:
            try:
                run_view(name, context, compat=compat)
            except TraceError as exc:
                assert str(exc)
    assert found == []


def test_views_that_compare_two_traces() -> None:
    names = [name for name in views() if name.startswith("diff_")]
    pair = [DATA / "ddp4" / f"rank{rank}.json.gz" for rank in (0, 1)]
    assert [result.view for result in run_views(names, pair) if not len(result) and not result.notes] == []


def test_all_views_of_a_job() -> None:
    results = run_views([name for name in views() if not name.startswith("diff_")], find_traces(DATA / "ddp4"))
    assert [line for result in results for line in impossible(result)] == []
