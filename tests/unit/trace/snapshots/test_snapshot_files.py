"""Where snapshots are found: named, in folders, in the store, beside traces."""

from pathlib import Path

from kineto_trace.snapshots.snapshot_files import is_snapshot_file, process_name, snapshots_at
from support.targets.memory_snapshots import write_snapshot

NAME = "kineto-gpu7-42-c0ffee"


def test_a_pickle_is_one_whatever_its_name(tmp_path: Path) -> None:
    path = write_snapshot(tmp_path / "dump_snapshot.pickle")
    assert snapshots_at(path) == [path]
    assert process_name(path) == "dump_snapshot"


def test_other_files_are_none(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    assert not is_snapshot_file(tmp_path / "x.json")
    assert not is_snapshot_file(tmp_path)
    assert snapshots_at(tmp_path / "x.json") == snapshots_at(tmp_path / "none") == []


def test_the_one_beside_a_trace_belongs_to_it(tmp_path: Path) -> None:
    snapshot = write_snapshot(tmp_path / f"{NAME}.memory_snapshot.pickle")
    trace = tmp_path / f"{NAME}.json.gz"
    trace.write_bytes(b"")
    assert snapshots_at(trace) == [snapshot]
    assert process_name(snapshot) == NAME


def test_those_in_folders_and_of_patterns_are_found_in_natural_order(tmp_path: Path) -> None:
    paths = [write_snapshot(tmp_path / f"rank{rank}.memory_snapshot.pickle") for rank in (2, 10)]
    stored = tmp_path / "targets" / "42"
    stored.mkdir(parents=True)
    inside = write_snapshot(stored / "memory_snapshot.pickle")
    assert snapshots_at(tmp_path) == [*paths, inside]
    assert snapshots_at(f"{tmp_path}/rank*.pickle") == paths
    assert process_name(inside) == "42"
