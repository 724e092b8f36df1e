"""The list of traces that keeps itself up to date."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kinetoctl.web.analyses import trace_list
from kinetoctl.web.analyses.trace_list import RunFinder, TraceList
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
    assert listed.notes() == ["The 2 most recently changed traces are shown; 1 others are not."]


def trace(path: Path, rank: int | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    told = {} if rank is None else {"distributedInfo": {"rank": rank}}
    path.write_text(json.dumps({**told, "traceEvents": []}))
    return path


def names(argument: Path | str, under: Path) -> list[str]:
    return [run.name.replace(str(under), "~") for run in RunFinder(str(argument)).find()]


def test_the_ranks_of_a_job_are_one_entry(tmp_path: Path) -> None:
    for rank in range(3):
        trace(tmp_path / "job" / f"t{rank}x.json", rank)
    (run,) = RunFinder(str(tmp_path)).find()
    assert (run.name, run.paths, len(run.files)) == (str(tmp_path / "job"), (str(tmp_path / "job"),), 3)
    assert names(tmp_path / "job", tmp_path) == ["~/job"]
    assert names(tmp_path / "job" / "*.json", tmp_path) == ["~/job/*.json"]


def test_the_ranks_of_a_job_may_have_folders_of_their_own(tmp_path: Path) -> None:
    for rank in range(3):
        trace(tmp_path / "job" / f"rank{rank}" / "trace.json")
    assert names(tmp_path, tmp_path) == ["~/job"]


def test_files_that_do_not_tell_their_ranks_apart_are_entries_of_their_own(tmp_path: Path) -> None:
    trace(tmp_path / "after.json", 0)
    trace(tmp_path / "before.json", 0)
    assert names(tmp_path, tmp_path) == ["~/after.json", "~/before.json"]


def test_each_run_of_a_tensorboard_log_folder_is_an_entry(tmp_path: Path) -> None:
    for run in ("run1", "deep/run2"):
        for worker in ("host_1", "host_2"):
            trace(tmp_path / run / f"{worker}.1700000000.pt.trace.json")
    assert names(tmp_path, tmp_path) == ["~/deep/run2", "~/run1"]


def test_each_span_of_a_run_is_an_entry_with_the_files_of_all_workers(tmp_path: Path) -> None:
    for worker in ("host_1", "host_2"):
        for at in (100, 200):
            trace(tmp_path / "run" / f"{worker}.{at}.pt.trace.json")
    first, second = RunFinder(str(tmp_path)).find()
    assert (first.name, second.name) == (f"{tmp_path}/run (span 0001)", f"{tmp_path}/run (span 0002)")
    assert [Path(path).name for path in second.paths] == ["host_1.200.pt.trace.json", "host_2.200.pt.trace.json"]


def test_what_is_no_trace_is_not_an_entry(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": 1}')
    (tmp_path / "notes.txt").write_text("{}")
    trace(tmp_path / ".hidden" / "t.json")
    assert names(tmp_path, tmp_path) == []


def test_a_file_that_is_named_is_an_entry_whatever_it_holds(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert names(tmp_path / "config.json", tmp_path) == ["~/config.json"]


def test_a_half_written_file_is_an_entry(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text('{"traceEvents": [{"ph": "X", "na')
    (tmp_path / "u.pt.trace.json.gz").write_bytes(b"\x1f\x8b")
    assert names(tmp_path, tmp_path) == ["~/t.json", "~/u.pt.trace.json.gz"]


def test_folders_that_link_to_each_other_are_walked_once(tmp_path: Path) -> None:
    trace(tmp_path / "a" / "t.json")
    (tmp_path / "a" / "again").symlink_to(tmp_path)
    assert names(tmp_path, tmp_path) == ["~/a/t.json"]


def test_only_so_many_files_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_list, "MAX_FILES", 5)
    for number in range(7):
        trace(tmp_path / f"t{number}x.json")
    finder = RunFinder(str(tmp_path))
    assert (len(finder.find()), finder.full) == (5, True)


def test_a_folder_is_read_again_only_when_its_files_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = trace(tmp_path / "a" / "t.json", 0)
    other = trace(tmp_path / "b" / "t.json", 0)
    finder = RunFinder(str(tmp_path))
    finder.find()
    read: list[Path] = []
    real = trace_list._runs

    def watched(home: Path, files: Any) -> Any:
        read.append(home)
        return real(home, files)

    monkeypatch.setattr(trace_list, "_runs", watched)
    finder.find()
    assert read == []
    path.write_text(path.read_text() + " ")
    assert len(finder.find()) == 2
    assert (read, other.exists()) == ([path.parent], True)


def test_a_stored_trace_is_one_entry(tmp_path: Path) -> None:
    folder = tmp_path / "run.kineto"
    folder.mkdir()
    (folder / "trace.json").write_text('{"format_version": 1}')
    (folder / "strings.parquet").write_bytes(b"")
    assert names(tmp_path, tmp_path) == ["~/run.kineto"]
    assert names(folder, tmp_path) == ["~/run.kineto"]
