"""The list of traces that keeps itself up to date."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from kinetoctl.web.analyses import trace_list
from kinetoctl.web.analyses.trace_list import TraceList
from support.waiting import scaled


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first look is waited for."""
    monkeypatch.setattr(trace_list, "FIRST_S", scaled(20))


def write(path: Path, changed_s: float = 1.0) -> Path:
    path.write_text(json.dumps({"traceEvents": []}))
    os.utime(path, (changed_s, changed_s))
    return path


class Time:
    """Both clocks. Each look is due."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def at() -> Time:
    return Time()


@pytest.fixture
def listed(tmp_path: Path, at: Time) -> Iterator[TraceList]:
    found = TraceList([str(tmp_path)], clock=at, timer=at)
    yield found
    found.close()


def states(listed: TraceList) -> dict[str, str]:
    return {Path(trace.name).name: trace.state for trace in listed.traces()}


def test_files_appear_and_are_gone_without_a_restart(tmp_path: Path, listed: TraceList) -> None:
    assert (states(listed), listed.looked, listed.changes) == ({}, True, True)
    path = write(tmp_path / "a.json")
    listed.look()
    assert states(listed) == {"a.json": ""}
    path.unlink()
    listed.look()
    assert states(listed) == {"a.json": "gone"}
    write(path)
    listed.look()
    assert states(listed) == {"a.json": ""}


def test_a_list_that_is_old_is_made_again(tmp_path: Path, listed: TraceList, at: Time) -> None:
    assert states(listed) == {}
    write(tmp_path / "a.json")
    assert states(listed) == {}
    at.now += trace_list.LOOK_S
    listed.traces()
    listed._pool.submit(lambda: None).result()  # behind the look that this started
    assert states(listed) == {"a.json": ""}


def test_a_file_that_just_changed_is_being_written(tmp_path: Path, listed: TraceList, at: Time) -> None:
    write(tmp_path / "a.json", at.now - 1)
    write(tmp_path / "b.json", at.now - 10)
    write(tmp_path / "c.json", at.now + 3600)
    assert states(listed) == {"a.json": "being written", "b.json": "", "c.json": ""}


def test_an_address_stays_when_a_file_becomes_a_part_of_a_job(tmp_path: Path, listed: TraceList) -> None:
    write(tmp_path / "a.json")
    (before,) = listed.traces()
    for path in (tmp_path / "rank0.json", tmp_path / "rank1.json"):
        write(path)
    listed.look()
    found = listed.find(before.id)
    assert found is not None
    assert found.files == (str(tmp_path / "a.json"),)


def test_a_list_has_an_end_and_says_so(tmp_path: Path, listed: TraceList, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_list, "MAX_LISTED", 2)
    for number, name in enumerate(("old.json", "new.json", "mid.json")):
        write(tmp_path / name, (1.0, 100.0, 50.0)[number])
    assert set(states(listed)) == {"new.json", "mid.json"}
    assert listed.notes() == ["The 2 traces that changed last are shown, 1 others are not."]
