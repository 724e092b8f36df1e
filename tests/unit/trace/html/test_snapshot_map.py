"""The map of a snapshot: a bar for each segment, of bounded size."""

import re
from pathlib import Path
from typing import Any

from kineto_trace.html.snapshot_map import MAX_PIECES, MAX_SEGMENTS, MapLinks, segment_map
from kineto_trace.snapshots.snapshot_reader import read_snapshot
from support.targets.memory_snapshots import BASE, MIB, block, segment, snapshot, write_snapshot

LINKS = MapLinks(
    segment=lambda segment: f"?s={segment.address:x}",
    block=lambda _segment, block: f"?b={block.address:x}",
    chosen=(0, BASE),
)
PIECE = re.compile(r'x="([\d.]+)" y="0" width="([\d.]+)" height="1" class="block-(\w+)( chosen)?"><title>([^<]*)')


def drawn(tmp_path: Path, value: Any) -> str:
    found = read_snapshot(write_snapshot(tmp_path / "x.pickle", value))
    return str(segment_map(found, found.segments, LINKS))


def test_blocks_are_as_wide_as_they_are_and_say_what_they_are(tmp_path: Path) -> None:
    found = drawn(tmp_path, snapshot())
    assert PIECE.findall(found) == [
        ("0", "20", "active", " chosen", "4 MiB in use: step (train.py:12)"),
        ("20", "10", "awaiting", "", "2 MiB freed, but another stream still uses it: load (load.py:3)"),
        ("30", "20", "active", "", "4 MiB in use: step (train.py:12)"),
        ("50", "50", "inactive", "", "10 MiB free"),
        ("0", "10", "inactive", "", "2 MiB free"),
    ]
    assert f'href="?b={BASE + 6 * MIB:x}"' in found
    assert "pool 0.3" in found


def test_small_neighbours_are_one_piece(tmp_path: Path) -> None:
    blocks = [block(BASE + at * 512, 512, "active_allocated" if at % 2 else "inactive", []) for at in range(200)]
    blocks.append(block(BASE + 200 * 512, 100 * MIB, "inactive", []))
    found = PIECE.findall(drawn(tmp_path, {"segments": [segment(BASE, blocks)]}))
    assert found[0][4] == "200 blocks, 100 KiB in total; the largest is free"
    assert len(found) == 2


def test_the_largest_segments_are_drawn_and_the_rest_is_said(tmp_path: Path) -> None:
    value = [segment(BASE + at * MIB, [block(BASE + at * MIB, (at + 1) * 512, "inactive", [])]) for at in range(100)]
    found = drawn(tmp_path, {"segments": value})
    assert found.count("<svg") == MAX_SEGMENTS
    assert "40 smaller segments are not drawn (410 KiB in total)." in found


def test_pieces_are_bounded(tmp_path: Path) -> None:
    blocks = [block(at, 1000 + at % 3, "active_allocated" if at % 2 else "inactive", []) for at in range(2000)]
    found = drawn(tmp_path, {"segments": [segment(BASE + at, blocks) for at in range(20)]})
    assert len(PIECE.findall(found)) <= MAX_PIECES


def test_names_are_text(tmp_path: Path) -> None:
    value = snapshot()
    value["segments"][0]["blocks"][0]["frames"] = [{"filename": "/x/<script>.py", "line": 1, "name": "\"'><img src=x>"}]
    found = drawn(tmp_path, value)
    assert "<script" not in found
    assert "<img" not in found


def test_nothing_is_drawn_of_nothing(tmp_path: Path) -> None:
    assert drawn(tmp_path, {"segments": []}) == ""
