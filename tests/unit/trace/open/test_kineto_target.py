"""A target whose own libkineto recorded: its file is the trace if it is whole and repeats the number of the request."""

import gzip
import json
from pathlib import Path

import pytest
from kineto_trace.errors import DamagedError
from kineto_trace.model.target_info import TargetInfo
from kineto_trace.open.kineto_target import load_kineto_target
from kineto_trace.open.trace_opener import open_trace
from kineto_trace.spool.kineto_file import OnDemandRequest, kineto_file
from support.peers.on_demand_kineto import trace_text

TRACE_ID = 42
INFO = TargetInfo(capture_id="c1", host="node7", pid=99, process_name="python", labels={"team": "vision"}, rank=3)


def target_with(folder: Path, text: str | bytes) -> Path:
    OnDemandRequest(trace_id=TRACE_ID, folder="/tmp", name="x_99.json").write(folder)
    INFO.write(folder)
    kineto_file(folder).write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


def test_the_file_is_joined_with_what_the_daemon_knows(tmp_path: Path) -> None:
    loaded = load_kineto_target(target_with(tmp_path, trace_text(TRACE_ID)))
    target = loaded.trace.target
    assert (target.capture_id, target.host, target.labels, target.rank) == ("c1", "node7", {"team": "vision"}, 3)
    assert (target.complete, target.window_start_ns) == (True, loaded.trace.window_start_ns)
    assert len(loaded.trace.table("cpu_op")) == 2
    assert loaded.warnings == ()


def test_a_target_that_was_not_converted_is_opened_by_its_file(tmp_path: Path) -> None:
    assert len(open_trace(target_with(tmp_path, trace_text(TRACE_ID))).table("cpu_op")) == 2


def test_a_file_without_activities_is_a_trace(tmp_path: Path) -> None:
    assert not len(load_kineto_target(target_with(tmp_path, trace_text(TRACE_ID, []))).trace.table("cpu_op"))


WHOLE = trace_text(TRACE_ID)


@pytest.mark.parametrize("tenths", range(11))
def test_a_file_that_ends_too_early_is_damaged_wherever_it_ends(tmp_path: Path, tenths: int) -> None:
    """Its length differs with the times in it, which no name of a test may: the workers must collect the same tests."""
    with pytest.raises(DamagedError):
        load_kineto_target(target_with(tmp_path, WHOLE[: (len(WHOLE) - 3) * tenths // 10]))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (trace_text(TRACE_ID + 1), "has the trace id '43' instead of 42"),
        (json.dumps({"traceEvents": []}), "has no trace id instead of 42"),
        (gzip.compress(WHOLE.encode()), "does not begin as libkineto's files do"),
        (json.dumps({"a": 1}), "has no traceEvents list"),
    ],
)
def test_another_file_is_not_the_trace(tmp_path: Path, text: str | bytes, why: str) -> None:
    with pytest.raises(DamagedError, match=why):
        load_kineto_target(target_with(tmp_path, text))
