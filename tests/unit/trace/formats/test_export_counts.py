"""No export loses events, arrows or names: counted without our readers (support/trace_files/event_counts.py)."""

import re
from pathlib import Path

import pytest
from kineto_trace.errors import FileError
from kineto_trace.formats.trace_export import Exported, export_trace
from kineto_trace.model.trace import Trace
from kineto_trace.open.trace_opener import open_trace
from support.trace_files.event_counts import Counts, count_events, names
from support.trace_files.public_traces import trace_paths, unpacked

LOOSE = re.compile(r"(\d+) of (\d+) arrows have no slice at one end, so viewers do not show them")


def exported(trace: Trace, path: Path, format_name: str = "") -> tuple[Path, Exported]:
    return path, export_trace(trace, path, format_name)


def shown(counts: Counts) -> Counts:
    """Without what .pftrace has in another form: names, flow events, which are arrows there, and counters' events."""
    hidden = ("metadata", "flow events", "events of phase C")
    return {name: number for name, number in counts.items() if not name.startswith(hidden)}


@pytest.mark.parametrize("source", trace_paths(), ids=lambda path: path.name)
def test_exports_have_the_counts_of_their_source(source: Path, tmp_path: Path) -> None:
    source = unpacked(source, tmp_path)
    try:
        trace = open_trace(source)
    except FileError as exc:
        pytest.skip(f"no trace: {exc}")
    expected = count_events(source)
    chrome, _ = exported(trace, tmp_path / "a.json.gz")
    perfetto, told = exported(trace, tmp_path / "a.pftrace")
    stored, _ = exported(trace, tmp_path / "stored", "store")
    from_perfetto, _ = exported(open_trace(perfetto), tmp_path / "b.json.gz")
    from_store, _ = exported(open_trace(stored), tmp_path / "c.json.gz")
    for path in (chrome, from_perfetto, from_store):
        assert count_events(path) == expected, path.name
    in_perfetto = dict(count_events(perfetto))
    if not expected.get("arrows") and (drawn := in_perfetto.pop("arrows", 0)):
        assert told.notes == (f"the file has no arrows; {drawn} were added from correlation and sequence numbers",)
    for loose, every in (match.groups() for note in told.notes if (match := LOOSE.match(note))):
        assert int(every) == expected["arrows"]
        in_perfetto["arrows"] += int(loose)
    assert in_perfetto == shown(expected)
    assert [name for name in names(source) if not any(name in track for track in names(perfetto))] == []
