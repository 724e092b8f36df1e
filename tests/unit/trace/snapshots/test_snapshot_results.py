"""The figures of a snapshot: sums of devices, blocks by stack, what was held over time."""

from pathlib import Path
from typing import Any

import pytest
from kineto_trace.errors import ViewError
from kineto_trace.snapshots.snapshot_reader import MemorySnapshot, read_snapshot
from kineto_trace.snapshots.snapshot_results import (
    MAX_POINTS,
    NO_HISTORY,
    NO_STACKS,
    NO_TIMES,
    SNAPSHOT_VIEWS,
    NamedSnapshot,
    block_at,
    device_memory,
    lead,
    snapshot_results,
)
from kineto_trace.view_api.result import Result
from support.targets.memory_snapshots import ASKED, BASE, MIB, action, block, segment, snapshot, write_snapshot


@pytest.fixture
def made(tmp_path: Path) -> MemorySnapshot:
    return read(tmp_path)


def read(tmp_path: Path, value: Any = None) -> MemorySnapshot:
    return read_snapshot(write_snapshot(tmp_path / "x.pickle", value))


def result(name: str, *snapshots: MemorySnapshot) -> Result:
    return snapshot_results([NamedSnapshot(f"p{at}", each) for at, each in enumerate(snapshots)], [name])[0]


def test_the_sums_of_a_device(made: MemorySnapshot) -> None:
    found = result("snapshot_devices", made)
    assert found.rows() == [
        {
            "device": "GPU0",
            "reserved_bytes": 22 * MIB,
            "allocated_bytes": 8 * MIB,
            "active_bytes": 10 * MIB,
            "requested_bytes": 2 * ASKED,
            "rounding_bytes": 200,
            "inactive_split_bytes": 10 * MIB,
            "fragmentation_pct": pytest.approx(100 * 10 / 22),
            "cached_bytes": 2 * MIB,
            "largest_free_bytes": 10 * MIB,
            "segments": 2,
            "blocks": 3,
        }
    ]
    assert found.notes == ("PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64",)


def test_all_reserved_bytes_are_in_one_of_the_sums(made: MemorySnapshot) -> None:
    (row,) = result("snapshot_devices", made).rows()
    parts = ("active_bytes", "inactive_split_bytes", "cached_bytes")
    assert sum(row[part] for part in parts) == row["reserved_bytes"]


def test_a_sentence_tells_the_figures(made: MemorySnapshot) -> None:
    assert lead(device_memory(made.segments)) == (
        "GPU0: 22 MiB reserved in 2 segments, 8 MiB of it allocated (8 MiB requested, 200 bytes rounding), 2 MiB freed "
        "but still used by other streams, 10 MiB (45.5 %) free between blocks in use, 2 MiB in 1 segment without "
        "blocks in use, which torch.cuda.empty_cache() releases."
    )
    assert lead([]) == "The allocator holds no CUDA memory."


def test_blocks_are_summed_by_stack_with_the_users_innermost_frame(made: MemorySnapshot) -> None:
    largest, other = result("snapshot_stacks", made).rows()
    assert (largest["active_bytes"], largest["blocks"], largest["share_pct"]) == (8 * MIB, 2, pytest.approx(80))
    assert largest["place"] == "step (train.py:12)"
    assert largest["call_stack"].split(";")[0] == "c10::cuda::malloc (??)"
    assert (other["active_bytes"], other["place"]) == (2 * MIB, "load (load.py:3)")


def test_the_curve_is_reckoned_back_from_the_snapshot(made: MemorySnapshot) -> None:
    rows = result("snapshot_curve", made).rows()
    held = [2 * ASKED - ASKED + 2 * MIB, 2 * ASKED + 2 * MIB, 2 * ASKED + 2 * MIB, 2 * ASKED, 2 * ASKED]
    assert [(row["time_us"], row["held_bytes"]) for row in rows] == list(zip((0, 10, 20, 30, 40), held, strict=True))
    assert {row["reserved_bytes"] for row in rows} == {22 * MIB}


def test_failures_for_lack_of_memory_are_listed(made: MemorySnapshot) -> None:
    (row,) = result("snapshot_ooms", made).rows()
    assert (row["time_us"], row["wanted_bytes"], row["device_free_bytes"]) == (20, 900 * MIB, 5 * MIB)
    assert row["place"] == "step (train.py:12)"


def test_a_long_curve_keeps_its_peak_and_its_failures(tmp_path: Path) -> None:
    value = snapshot()
    actions = [action("alloc" if at % 2 else "free_requested", BASE, 512, 1000 + at) for at in range(20_000)]
    actions[7000] = action("alloc", BASE, 5000 * MIB, 8000)
    actions[7001] = action("free_requested", BASE, 5000 * MIB, 8001)
    actions[9001] = action("oom", 1, 1, 10_001)
    rows = result("snapshot_curve", read(tmp_path, value | {"device_traces": [actions]})).rows()
    assert len(rows) <= MAX_POINTS + 2
    assert max(row["held_bytes"] for row in rows) >= 5000 * MIB
    assert 9001 in [row["time_us"] for row in rows]


def test_levels_are_never_below_nothing(tmp_path: Path) -> None:
    value = {"segments": [], "device_traces": [[action("alloc", 1, 5, 1), action("free_requested", 1, 9, 2)]]}
    assert [row["held_bytes"] for row in result("snapshot_curve", read(tmp_path, value)).rows()] == [9, 0]


def test_segments_are_listed_the_largest_first_and_blocks_by_address(made: MemorySnapshot) -> None:
    first, second = result("snapshot_segments", made).rows()
    assert (first["segment"], first["awaiting_bytes"], first["largest_free_bytes"]) == (hex(BASE), 2 * MIB, 10 * MIB)
    assert (second["pool"], second["segment_type"]) == ("0.3", "small")
    blocks = result("snapshot_blocks", made).rows()
    assert [row["state"] for row in blocks] == ["active", "awaiting free", "active", "inactive", "inactive"]
    assert blocks[3]["requested_bytes"] is None


def test_a_block_is_found_by_device_and_address(made: MemorySnapshot) -> None:
    found = block_at(made, 0, BASE + 6 * MIB)
    assert found is not None
    assert (found[0].address, found[1].size) == (BASE, 4 * MIB)
    assert block_at(made, 1, BASE) is block_at(made, 0, BASE + 1) is None


def test_several_processes_are_told_apart(made: MemorySnapshot) -> None:
    assert [row["process"] for row in result("snapshot_devices", made, made).rows()] == ["p0", "p1"]


def test_what_was_not_recorded_is_said(tmp_path: Path) -> None:
    bare = read(tmp_path, {"segments": [segment(BASE, [block(BASE, MIB, "active_allocated", [], MIB)])]})
    assert result("snapshot_curve", bare).notes == (NO_HISTORY,)
    assert result("snapshot_stacks", bare).notes == (NO_STACKS,)
    assert result("snapshot_stacks", bare).rows()[0]["place"] is None
    timeless = read(tmp_path, {"segments": [], "device_traces": [[{"action": "alloc", "size": 1}]]})
    assert result("snapshot_curve", timeless).notes == (NO_TIMES,)
    assert result("snapshot_curve", timeless).rows() == []


@pytest.mark.parametrize("name", SNAPSHOT_VIEWS)
def test_an_empty_snapshot_has_every_result(tmp_path: Path, name: str) -> None:
    assert result(name, read(tmp_path, {"segments": []})).rows() == []


def test_an_unknown_view_is_said_with_those_there_are(made: MemorySnapshot) -> None:
    with pytest.raises(ViewError, match="no view snapshot_x; its views are snapshot_devices"):
        result("snapshot_x", made)


def test_the_place_of_a_stack_without_python_is_what_called_the_allocator(tmp_path: Path) -> None:
    names = (
        "torch::unwind::unwind()",
        "torch::CapturedTraceback::gather(bool, bool, bool)",
        "torch::cuda::(anonymous namespace)::gather_with_cpp()",
        "c10::cuda::CUDACachingAllocator::Native::DeviceCachingAllocator::malloc(unsigned long, CUstream_st*)",
        "at::cuda::setWorkspaceForHandle(cublasContext*, c10::cuda::CUDAStream)",
        "at::native::structured_mm_out_cuda::impl(at::Tensor const&, at::Tensor const&, at::Tensor const&)",
    )
    frames = [{"name": name, "filename": "??", "line": 0} for name in names]
    held = segment(BASE, [block(BASE, MIB, "active_allocated", frames, MIB)])
    (row,) = result("snapshot_stacks", read(tmp_path, {**snapshot(), "segments": [held], "device_traces": []})).rows()
    assert row["place"].startswith("at::cuda::setWorkspaceForHandle")
