import json
from pathlib import Path
from typing import Any

import pytest
from kineto_trace.errors import SpoolError
from kineto_trace.model.target_info import TargetInfo

TARGET = TargetInfo(
    capture_id="c",
    host="h",
    pid=7,
    process_name="python",
    command=["python", "x.py"],
    rank=1,
    world_size=2,
    window_start_ns=5,
    window_end_ns=9,
    threads={7: "main"},
    labels={"run": "a"},
    activity_types=["kernel"],
    not_recorded={"kernel": "CUPTI is taken"},
    step_ratio=1.25,
    least_step_ratio=1.125,
    complete=True,
)


def test_survives_json() -> None:
    assert TargetInfo.from_json(TARGET.to_json()) == TARGET


def test_survives_a_file(tmp_path: Path) -> None:
    TARGET.write(tmp_path)
    assert TargetInfo.read(tmp_path) == TARGET
    assert [path.name for path in tmp_path.iterdir()] == ["target.json"]


def test_skips_keys_of_a_newer_daemon() -> None:
    assert TargetInfo.from_json(json.dumps({**json.loads(TARGET.to_json()), "colour": "red"})) == TARGET


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pid": "7"}, "pid has a wrong type: '7'"),
        ({"rank": 1.5}, "rank has a wrong type"),
        ({"threads": {"x": "main"}}, "does not describe a target"),
        ({"complete": 1}, "complete has a wrong type"),
        ({"activity_types": "kernel"}, "activity_types has a wrong type"),
        ({"activity_types": [7]}, "activity_types has a wrong type"),
        ({"not_recorded": {"kernel": 7}}, "not_recorded has a wrong type"),
        ({"step_ratio": float("nan")}, "step_ratio has a wrong type"),
        ({"step_ratio": -1.0}, "step_ratio has a wrong type"),
        ({"least_step_ratio": float("nan")}, "least_step_ratio has a wrong type"),
    ],
)
def test_wrong_types_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpoolError, match=message):
        TargetInfo.from_json(json.dumps({**json.loads(TARGET.to_json()), **change}))


@pytest.mark.parametrize("text", ["", "5", "[]", '{"pid": 7}'])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(SpoolError):
        TargetInfo.from_json(text)


def test_a_missing_file_is_a_spool_error(tmp_path: Path) -> None:
    with pytest.raises(SpoolError, match="cannot read"):
        TargetInfo.read(tmp_path)
