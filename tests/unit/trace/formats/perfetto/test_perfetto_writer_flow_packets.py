from pathlib import Path
from typing import Any

import pytest
from kineto_trace.formats.trace_export import export_trace
from support.trace_files.chrome_files import event, load_events
from support.trace_files.event_counts import arrow_ends, count_events

CALL = event("cuda_runtime", "cudaLaunchKernel", 10, 5)
WORK = event("kernel", "k", 20, 5, args={"device": 0, "stream": 7}) | {"pid": 0, "tid": "stream 7"}


def ends(start: dict[str, Any], end: dict[str, Any]) -> list[dict[str, Any]]:
    named = {"id": 1, "cat": "ac2g", "name": "launch"}
    return [{"ph": "s", **named, **start}, {"ph": "f", "bp": "e", **named, **end}]


HERE, THERE = {"pid": 1, "tid": 2, "ts": 10}, {"pid": 0, "tid": "stream 7", "ts": 20}


@pytest.mark.parametrize(
    ("call", "work", "start", "end"),
    [
        (CALL, WORK, HERE, THERE),
        (CALL | {"tid": "2"}, WORK, HERE, THERE),
        (CALL, WORK, HERE | {"pid": "1", "tid": "2"}, THERE),
        (CALL, WORK | {"dur": 0}, HERE, THERE),
        (CALL | {"dur": 0}, WORK, HERE, THERE),
        (CALL, WORK, HERE | {"ts": 15}, THERE),
    ],
    ids=["inside", "text at the slice", "text at the arrow", "to a moment", "from a moment", "at the end"],
)
def test_an_arrow_of_the_file_is_drawn(
    tmp_path: Path, call: dict[str, Any], work: dict[str, Any], start: dict[str, Any], end: dict[str, Any]
) -> None:
    path = tmp_path / "t.pftrace"
    told = export_trace(load_events(call, work, *ends(start, end)), path)
    assert count_events(path)["arrows"] == 1
    assert told.notes == ()


def test_an_arrow_without_a_slice_at_its_end_is_told(tmp_path: Path) -> None:
    told = export_trace(load_events(CALL, WORK, *ends(HERE, THERE | {"ts": 90})), tmp_path / "t.pftrace")
    assert told.notes == ("1 of 1 arrows have no slice at one end, so viewers do not show them",)


def test_an_arrow_goes_to_the_slice_that_begins_at_its_time(tmp_path: Path) -> None:
    around = event("gpu_user_annotation", "around", 18, 20, args={"device": 0, "stream": 7})
    around |= {"pid": 0, "tid": "stream 7"}
    trace = load_events(CALL, around, WORK | {"dur": 0}, *ends(HERE, THERE))
    export_trace(trace, tmp_path / "t.pftrace")
    assert arrow_ends(tmp_path / "t.pftrace") == {"cuda_runtime", "kernel"}
