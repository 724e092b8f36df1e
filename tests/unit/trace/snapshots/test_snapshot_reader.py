"""Snapshots of torch are read whatever its version; what is none is refused with what is wrong in it."""

import pickle
from pathlib import Path
from typing import Any

import pytest
from kineto_trace.errors import FileError
from kineto_trace.snapshots import snapshot_reader
from kineto_trace.snapshots.snapshot_reader import (
    ACTIVE,
    AWAITING,
    INACTIVE,
    NO_STACK,
    MemorySnapshot,
    is_snapshot_file,
    process_name,
    read_snapshot,
    snapshots_at,
)
from support.targets.fake_torch import FakeTorch
from support.targets.memory_snapshots import ASKED, BASE, MIB, snapshot, write_snapshot

NAME = "kineto-gpu7-42-c0ffee"


def read(tmp_path: Path, value: Any) -> MemorySnapshot:
    return read_snapshot(write_snapshot(tmp_path / "x.memory_snapshot.pickle", value))


def test_segments_blocks_actions_and_stacks_are_read(tmp_path: Path) -> None:
    found = read(tmp_path, snapshot())
    used, free = found.segments
    assert (used.size, used.kind, used.pool, free.kind, free.pool) == (20 * MIB, "large", "", "small", "0.3")
    assert [block.state for block in used.blocks] == [ACTIVE, AWAITING, ACTIVE, INACTIVE]
    assert used.blocks[0][:3] == (BASE, 4 * MIB, ASKED)
    assert used.blocks[0].stack == used.blocks[2].stack != used.blocks[1].stack
    assert used.blocks[3].stack == NO_STACK
    assert list(found.actions) == [0]
    assert [(each.action, each.free) for each in found.actions[0]][1:3] == [("alloc", -1), ("oom", 5 * MIB)]
    assert [str(frame) for frame in found.stacks[used.blocks[0].stack]][2] == "step (/home/ada/train.py:12)"
    assert found.settings == "max_split_size_mb:64"


def test_what_old_versions_leave_out_may_be_missing(tmp_path: Path) -> None:
    value = snapshot()
    for segment in value["segments"]:
        for name in ("segment_pool_id", "is_expandable", "requested_size", "frames"):
            del segment[name]
        for block in segment["blocks"]:
            del block["address"], block["frames"]
    value["segments"][0]["blocks"][1]["state"] = "active_pending_free"
    value["device_traces"] = [[{"action": "alloc", "addr": BASE, "size": 1, "stream": 0}]]
    del value["allocator_settings"]
    found = read(tmp_path, value)
    assert [block.address - BASE for block in found.segments[0].blocks] == [0, 4 * MIB, 6 * MIB, 10 * MIB]
    assert found.segments[0].blocks[1].state == AWAITING
    assert (found.actions[0][0].time_us, found.stacks, found.settings) == (0, (), "")


def test_what_new_versions_add_is_ignored(tmp_path: Path) -> None:
    value = snapshot()
    value["new"] = value["segments"][0]["new"] = value["device_traces"][0][0]["user_metadata"] = {"x": [1, b"2"]}
    value["segments"][0]["is_expandable"] = True
    assert read(tmp_path, value).segments[0].kind == "expandable"


def test_what_the_agent_pickles_is_read(tmp_path: Path) -> None:
    torch = FakeTorch()
    torch._record("all", "all", "python", 100)
    torch.allocate(512, 1000)
    found = read(tmp_path, torch._snapshot())
    assert (found.segments[0].blocks[0].requested, found.actions[0][0].size) == (1000, 1000)


@pytest.mark.parametrize(
    ("path", "wrong", "said"),
    [
        ((), [], 'it is not a dict with "segments"'),
        ((), {"x": 1}, 'it is not a dict with "segments"'),
        (("segments",), {}, "segments: expected a list, not dict"),
        (("segments", 0), 5, "segments[0]: expected a dict, not int"),
        (("segments", 0, "total_size"), "7", "segments[0].total_size: expected a number, not str"),
        (("segments", 0, "total_size"), True, "segments[0].total_size: expected a number, not bool"),
        (("segments", 0, "total_size"), 2**63, "segments[0].total_size: the number is out of range"),
        (("segments", 0, "total_size"), 1, "segments[0]: its blocks are larger than the segment"),
        (("segments", 0, "device"), -1, "segments[0].device: the number is out of range"),
        (("segments", 0, "device"), 5000, "segments[0].device: there is no device 5000"),
        (("segments", 0, "blocks"), None, "segments[0].blocks: expected a list, not NoneType"),
        (("segments", 0, "blocks", 1, "size"), -5, "segments[0].blocks[1].size: the number is out of range"),
        (("segments", 0, "blocks", 1, "state"), "evil", "segments[0].blocks[1].state: expected one of"),
        (("segments", 0, "blocks", 1, "state"), [], "segments[0].blocks[1].state: expected one of"),
        (("segments", 0, "blocks", 1, "frames"), "abc", "segments[0].blocks[1].frames: expected a list, not str"),
        (("segments", 0, "blocks", 1, "frames"), [7], "segments[0].blocks[1].frames[0]: expected a dict, not int"),
        (("segments", 0, "blocks", 1, "frames"), [{"name": "f"}], "expected strings as filename and name"),
        (("device_traces",), 1, "device_traces: expected a list, not int"),
        (("device_traces", 0), "x", "device_traces[0]: expected a list, not str"),
        (("device_traces", 0, 1), [], "device_traces[0][1]: expected a dict, not list"),
        (("device_traces", 0, 1, "action"), 1, "device_traces[0][1].action: expected a string, not int"),
        (("device_traces",), [[]] * 2000, "more than 1024 devices"),
        (("device_traces", 0), [{"action": "alloc", "size": 2**62}] * 3, "sizes add up to more than any memory holds"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, path: tuple[Any, ...], wrong: Any, said: str) -> None:
    value: Any = snapshot()
    if not path:
        value = wrong
    else:
        part = value
        for key in path[:-1]:
            part = part[key]
        part[path[-1]] = wrong
    with pytest.raises(FileError, match="is not a memory snapshot written by torch") as raised:
        read(tmp_path, value)
    assert said in str(raised.value)
    assert "x.memory_snapshot.pickle" in str(raised.value)


def test_missing_sizes_are_said(tmp_path: Path) -> None:
    value = snapshot()
    del value["segments"][1]["total_size"]
    with pytest.raises(FileError, match=r"segments\[1\].total_size: is missing"):
        read(tmp_path, value)


@pytest.mark.parametrize("shared", ["blocks", "segments", "actions"])
def test_shared_lists_are_counted_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: str) -> None:
    monkeypatch.setattr(snapshot_reader, "MAX_BLOCKS", 1000)
    monkeypatch.setattr(snapshot_reader, "MAX_ACTIONS", 1000)
    block = {"address": 1, "size": 0, "requested_size": 0, "state": "inactive"}
    laughs: dict[str, Any] = {
        "blocks": {"segments": [{"total_size": 0, "blocks": [block] * 100}] * 100},
        "segments": {"segments": [{"total_size": 0, "blocks": []}] * 10_000},
        "actions": {"segments": [], "device_traces": [[{"action": "alloc"}] * 100] * 100},
    }
    with pytest.raises(FileError, match="more than 1,000"):
        read(tmp_path, laughs[shared])


def test_shared_stacks_are_read_once(tmp_path: Path) -> None:
    frames = [{"filename": "a.py", "line": 1, "name": "f"}] * 10_000
    block = {"address": 1, "size": 0, "requested_size": 0, "state": "active_allocated", "frames": frames}
    found = read(tmp_path, {"segments": [{"total_size": 0, "blocks": [block] * 20_000}]})
    assert len(found.stacks) == 1


def test_stacks_have_so_many_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_reader, "MAX_FRAMES", 4)
    with pytest.raises(FileError, match="more than 4 frames"):
        read(tmp_path, snapshot())


def test_long_names_are_shortened_and_odd_lines_are_none(tmp_path: Path) -> None:
    value = snapshot()
    value["segments"][0]["blocks"][0]["frames"] = [{"filename": "a" * 10**6, "line": -3, "name": "\ud800b"}]
    value["device_traces"] = []
    ((frame,), _) = sorted(read_snapshot(write_snapshot(tmp_path / "x", value)).stacks, key=len)[:2]
    assert (len(frame.file) <= 1001, frame.line) == (True, 0)


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "is empty"), (b"{}", "is not a pickle"), (pickle.dumps({1, 2}), "is not plain data")],
)
def test_files_that_are_no_pickles_of_plain_data_are_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "x.pickle"
    path.write_bytes(content)
    with pytest.raises(FileError, match=said):
        read_snapshot(path)


def test_a_truncated_file_and_a_missing_one_are_said(tmp_path: Path) -> None:
    path = write_snapshot(tmp_path / "x.pickle")
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(FileError, match=r"x\.pickle is truncated"):
        read_snapshot(path)
    with pytest.raises(FileError, match=r"cannot read .*No such file"):
        read_snapshot(tmp_path / "none")


def test_a_large_file_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_reader, "MAX_BYTES", 100)
    with pytest.raises(FileError, match="max_entries"):
        read_snapshot(write_snapshot(tmp_path / "x.pickle"))


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
