"""What the page of a memory snapshot shows: its figures, the map of segments, curves, and a block with its stack."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from kineto_trace.html.result_documents import page_parts
from kineto_trace.html.snapshot_map import MapLinks, segment_map
from kineto_trace.html.time_charts import ChartLine, Marks, curves
from kineto_trace.snapshots.snapshot_figures import block_at, device_memory, lead
from kineto_trace.snapshots.snapshot_files import process_name
from kineto_trace.snapshots.snapshot_reader import (
    INACTIVE,
    NO_STACK,
    MemorySnapshot,
    SnapshotBlock,
    SnapshotSegment,
    read_snapshot,
)
from kineto_trace.snapshots.snapshot_results import (
    NamedSnapshot,
    address_text,
    snapshot_curve,
    snapshot_ooms,
    snapshot_results,
)
from markupsafe import Markup

from kinetoctl.errors import NotFound, UsageProblem
from kinetoctl.output.cell_values import human
from kinetoctl.output.result_tables import documents
from kinetoctl.web.analyses.file_identity import identity

VIEWS = ("snapshot_devices", "snapshot_stacks", "snapshot_ooms", "snapshot_curve", "snapshot_segments")
BLOCKS = "snapshot_blocks"  # of the chosen segment
MAX_FRAMES = 200  # of a block
MAX_MARKS = 100  # in a curve
_PLACE = re.compile(r"([0-9]{1,4})-0x([0-9a-f]{1,16})")  # device and address


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotChoice:
    """What of snapshots is shown. process: one of several; segment, block: as `place_text`; page: its address."""

    process: str = ""
    segment: str = ""
    block: str = ""
    page: str = ""
    limit: int = 100


class SnapshotJob:
    """Computes pages of snapshots, and keeps the last snapshot that it has read."""

    def __init__(self) -> None:
        self._kept: tuple[str, MemorySnapshot] | None = None

    def forget(self) -> None:
        """Frees the snapshot."""
        self._kept = None

    def values(self, paths: Sequence[str], **fields: Any) -> dict[str, Any]:
        """What the page shows. fields: those of SnapshotChoice. Raises TraceError, CliError."""
        choice = SnapshotChoice(**fields)
        names = list(dict.fromkeys(process_name(Path(path)) for path in paths))
        process = choice.process or names[0]
        if process not in names:
            raise NotFound(f"there is no snapshot of {process}; there are: {', '.join(names)}")
        snapshot = self._read(next(Path(path) for path in paths if process_name(Path(path)) == process))
        segment, block = _chosen(snapshot, choice)
        shown = replace(snapshot, segments=(segment,)) if segment else snapshot
        links = _links(choice, block)
        return {
            "processes": names,
            "process": process,
            "lead": lead(device_memory(snapshot.segments)),
            "documents": [
                *_documents(process, snapshot, VIEWS, choice.limit),
                *(_documents(process, shown, [BLOCKS], choice.limit) if segment else []),
            ],
            "map": str(segment_map(snapshot, shown.segments, links)),
            "curves": str(_curves(snapshot)),
            "block": _told(snapshot, *block, links) if block else None,
            "blocks": [links.block(segment, each) for each in segment.blocks[: choice.limit]] if segment else [],
        }

    def _read(self, path: Path) -> MemorySnapshot:
        """The snapshot, read now or before. Raises TraceError, NotFound."""
        try:
            path.stat()
        except OSError as exc:
            raise NotFound(f"cannot read {path}: {exc.strerror or exc}") from exc
        key = identity([path])
        if self._kept is None or self._kept[0] != key:
            self._kept = None
            self._kept = key, read_snapshot(path)
        return self._kept[1]


def place_text(device: int, address: int) -> str:
    """A segment or block in the address of a page."""
    return f"{device}-{address_text(address)}"


def _place(text: str, what: str) -> tuple[int, int]:
    """Raises UsageProblem."""
    match = _PLACE.fullmatch(text)
    if match is None:
        raise UsageProblem(f"{what} is a device and an address such as 0-0x7f0000000000, not {text[:40]!r}")
    return int(match[1]), int(match[2], 16)


def _chosen(
    snapshot: MemorySnapshot, choice: SnapshotChoice
) -> tuple[SnapshotSegment | None, tuple[SnapshotSegment, SnapshotBlock] | None]:
    """The segment and the block that are chosen. Raises NotFound, UsageProblem."""
    segment, block = None, None
    if choice.segment:
        device, address = _place(choice.segment, "segment")
        own = (each for each in snapshot.segments if (each.device, each.address) == (device, address))
        segment = next(own, None)
        if segment is None:
            raise NotFound(f"GPU{device} has no segment at {address_text(address)} in this snapshot")
    if choice.block:
        device, address = _place(choice.block, "block")
        block = block_at(snapshot, device, address)
        if block is None:
            raise NotFound(f"GPU{device} has no block at {address_text(address)} in this snapshot")
    return segment, block


def _links(choice: SnapshotChoice, block: tuple[SnapshotSegment, SnapshotBlock] | None) -> MapLinks:
    kept = {"process": choice.process} if choice.process else {}

    def of_segment(segment: SnapshotSegment) -> str:
        place = place_text(segment.device, segment.address)
        return f"{choice.page}?{urlencode({**kept, 'segment': place})}#map"

    def of_block(segment: SnapshotSegment, one: SnapshotBlock) -> str:
        fields = {**kept, "segment": choice.segment} if choice.segment else kept
        return f"{choice.page}?{urlencode({**fields, 'block': place_text(segment.device, one.address)})}#block"

    chosen = (block[0].device, block[1].address) if block else None
    return MapLinks(segment=of_segment, block=of_block, chosen=chosen)


def _documents(process: str, snapshot: MemorySnapshot, views: Sequence[str], limit: int) -> list[dict[str, Any]]:
    results = snapshot_results([NamedSnapshot(process, snapshot)], views)
    return [{**documents({each.view: each}, limit)[each.view], **page_parts(each, Markup(""))} for each in results]


def _curves(snapshot: MemorySnapshot) -> Markup:
    """For each device what was held and reserved over time, with the failures for lack of memory, or the peak."""
    charts = Markup("")
    rows, ooms = snapshot_curve(snapshot), snapshot_ooms(snapshot)
    for device in dict.fromkeys(row["device"] for row in rows):
        own = [row for row in rows if row["device"] == device]
        top = max(own, key=lambda row: row["held_bytes"])
        moments = [(top["time_us"], f"peak {human(top['held_bytes'], 'bytes')}")]
        failed = [row for row in ooms if row["device"] == device][:MAX_MARKS]
        if failed:
            first = f"out of memory: {human(failed[0]['wanted_bytes'], 'bytes')} wanted"
            moments = [(row["time_us"], "" if at else first) for at, row in enumerate(failed)]
        times = [row["time_us"] for row in own]
        series = [
            ChartLine("held", times, [row["held_bytes"] for row in own]),
            ChartLine("reserved", times, [row["reserved_bytes"] for row in own]),
        ]
        drawn = curves(series, "bytes", Marks(moments=moments))
        if drawn:
            charts += Markup("<figure><figcaption>{}</figcaption>{}</figure>").format(device, drawn)
    return charts


def _told(snapshot: MemorySnapshot, segment: SnapshotSegment, block: SnapshotBlock, links: MapLinks) -> dict[str, Any]:
    """A block for the page."""
    frames = () if block.stack == NO_STACK else snapshot.stacks[block.stack]
    facts = [
        ("size", human(block.size, "bytes")),
        ("state", block.state),
        ("asked for", "" if block.state == INACTIVE else human(block.requested, "bytes")),
        ("stream", str(segment.stream)),
        ("pool", segment.pool),
    ]
    return {
        "name": f"GPU{segment.device} {address_text(block.address)}",
        "facts": [(label, text) for label, text in facts if text],
        "segment": address_text(segment.address),
        "segment_link": links.segment(segment),
        "frames": [str(frame) for frame in frames[:MAX_FRAMES]],
        "more": max(0, len(frames) - MAX_FRAMES),
    }
