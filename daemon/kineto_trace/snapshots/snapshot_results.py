"""What memory snapshots show, as results with units: of reports and of pages."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kineto_trace.errors import ViewError
from kineto_trace.snapshots.snapshot_figures import (
    OOM,
    AllocatorCurve,
    by_state,
    curve_of,
    device_memory,
    place_of,
    stack_memory,
    stack_text,
)
from kineto_trace.snapshots.snapshot_reader import ACTIVE, AWAITING, INACTIVE, MemorySnapshot
from kineto_trace.structure.allocations import largest_triangles
from kineto_trace.view_api.result import Result, columns, make_result
from kineto_trace.view_api.result_columns import ResultColumn

MAX_POINTS = 1000  # of the curve of a device
NO_HISTORY = (
    "the snapshot has no history of allocations: `kinetoctl memory` records it, and so does "
    "torch.cuda.memory._record_memory_history() before the snapshot"
)
NO_STACKS = "the snapshot has no stacks: `kinetoctl memory --with-stack` records the Python stack of each allocation"
NO_TIMES = "this version of torch wrote no times of its actions, so there is no curve"


class NamedSnapshot(NamedTuple):
    """A snapshot and what its process is called."""

    process: str
    snapshot: MemorySnapshot


Rows = list[Mapping[str, Any]]
_OF = columns(
    ("process", "text", "", "name of the snapshot's file, without its suffix"),
    ("device", "text", "", "GPU0, GPU1, … as the process numbers them"),
)
_WHERE = columns(
    ("place", "text", "", "innermost frame in the program's own code, otherwise the innermost one; missing: no stack"),
    ("call_stack", "text", "", 'frames of the allocation, innermost first, separated by ";"'),
)
_DEVICES = columns(
    ("reserved_bytes", "int", "bytes", "what the allocator has from CUDA"),
    ("allocated_bytes", "int", "bytes", "blocks that tensors use"),
    ("active_bytes", "int", "bytes", "the same and blocks that were freed while another stream still uses them"),
    ("requested_bytes", "int", "bytes", "what the program asked for in the allocated blocks"),
    ("rounding_bytes", "int", "bytes", "allocated minus requested bytes: lost inside of blocks"),
    ("inactive_split_bytes", "int", "bytes", "free parts of segments that are in use: lost between blocks"),
    ("fragmentation_pct", "float", "%", "share of inactive_split_bytes in reserved_bytes"),
    ("cached_bytes", "int", "bytes", "segments without a block in use, which torch.cuda.empty_cache() gives back"),
    ("largest_free_bytes", "int", "bytes", "largest free block: more than this needs new memory from CUDA"),
    ("segments", "int", "", "number of segments"),
    ("blocks", "int", "", "number of active blocks"),
)
_STACKS = columns(
    ("active_bytes", "int", "bytes", "active blocks that were allocated with this stack"),
    ("share_pct", "float", "%", "share of the active bytes of the device"),
    ("requested_bytes", "int", "bytes", "what the program asked for in them"),
    ("blocks", "int", "", "number of these blocks"),
)
_SEGMENTS = columns(
    ("segment", "text", "", "address"),
    ("segment_type", "text", "", "small (blocks of up to 1 MiB), large, or expandable"),
    ("pool", "text", "", "private pool, as of a CUDA graph; missing: the one that all share"),
    ("stream", "int", "", "stream that it belongs to; 0: the default one"),
    ("reserved_bytes", "int", "bytes", "its size"),
    ("allocated_bytes", "int", "bytes", "blocks that tensors use"),
    ("awaiting_bytes", "int", "bytes", "blocks that were freed while another stream still uses them"),
    ("inactive_bytes", "int", "bytes", "free blocks"),
    ("largest_free_bytes", "int", "bytes", "largest free block"),
    ("blocks", "int", "", "number of blocks, free ones too"),
)
_BLOCKS = columns(
    ("segment", "text", "", "address of the segment"),
    ("block", "text", "", "address"),
    (
        "state",
        "text",
        "",
        f"{ACTIVE}: a tensor uses it; {AWAITING}: freed while another stream uses it; {INACTIVE}: free",
    ),
    ("block_bytes", "int", "bytes", "its size"),
    ("requested_bytes", "int", "bytes", "what the program asked for; missing if it is free"),
)
_CURVE = columns(
    ("time_us", "float", "us", "time since the first action in the history"),
    ("held_bytes", "int", "bytes", "what the program had asked for and not freed"),
    ("reserved_bytes", "int", "bytes", "what the allocator had from CUDA"),
)
_OOMS = columns(
    ("time_us", "float", "us", "time since the first action in the history; missing: torch told none"),
    ("wanted_bytes", "int", "bytes", "what could not be allocated"),
    ("device_free_bytes", "int", "bytes", "what CUDA said was free on the device"),
    ("held_bytes", "int", "bytes", "what the program held then"),
)


def address_text(address: int) -> str:
    """An address as it is shown and named in addresses of pages."""
    return f"{address:#x}"


def snapshot_devices(snapshot: MemorySnapshot) -> Rows:
    """The sums of each device."""
    return [
        {
            "device": f"GPU{each.device}",
            "reserved_bytes": each.reserved,
            "allocated_bytes": each.allocated,
            "active_bytes": each.active,
            "requested_bytes": each.requested,
            "rounding_bytes": each.rounding,
            "inactive_split_bytes": each.split,
            "fragmentation_pct": 100 * each.split / each.reserved if each.reserved else None,
            "cached_bytes": each.cached,
            "largest_free_bytes": each.largest_free,
            "segments": each.segments,
            "blocks": each.blocks,
        }
        for each in device_memory(snapshot.segments)
    ]


def snapshot_stacks(snapshot: MemorySnapshot) -> Rows:
    """The active blocks by the stack that allocated them, the largest sum first."""
    active = {each.device: each.active for each in device_memory(snapshot.segments)}
    return [
        {
            "device": f"GPU{each.device}",
            "active_bytes": each.size,
            "share_pct": 100 * each.size / active[each.device] if active[each.device] else None,
            "requested_bytes": each.requested,
            "blocks": each.blocks,
            **_where(snapshot, each.stack),
        }
        for each in stack_memory(snapshot.segments)
    ]


def snapshot_segments(snapshot: MemorySnapshot) -> Rows:
    """The segments, the largest first."""
    rows: Rows = []
    for segment in sorted(snapshot.segments, key=lambda segment: (-segment.size, segment.device, segment.address)):
        sizes = by_state(segment.blocks)
        rows.append(
            {
                "device": f"GPU{segment.device}",
                "segment": address_text(segment.address),
                "segment_type": segment.kind or None,
                "pool": segment.pool or None,
                "stream": segment.stream,
                "reserved_bytes": segment.size,
                "allocated_bytes": sizes[ACTIVE],
                "awaiting_bytes": sizes[AWAITING],
                "inactive_bytes": sizes[INACTIVE],
                "largest_free_bytes": max(
                    (block.size for block in segment.blocks if block.state == INACTIVE), default=0
                ),
                "blocks": len(segment.blocks),
            }
        )
    return rows


def snapshot_blocks(snapshot: MemorySnapshot) -> Rows:
    """Every block, in the order of addresses."""
    return [
        {
            "device": f"GPU{segment.device}",
            "segment": address_text(segment.address),
            "block": address_text(block.address),
            "state": block.state,
            "block_bytes": block.size,
            "requested_bytes": None if block.state == INACTIVE else block.requested,
            **_where(snapshot, block.stack),
        }
        for segment in sorted(snapshot.segments, key=lambda segment: (segment.device, segment.address))
        for block in segment.blocks
    ]


def snapshot_curve(snapshot: MemorySnapshot) -> Rows:
    """What was held over time: of each device MAX_POINTS moments that show the shape, and the highest one."""
    rows: Rows = []
    for device in sorted(snapshot.actions):
        curve = curve_of(snapshot, device)
        rows += [
            {
                "device": f"GPU{device}",
                "time_us": float(curve.times[at]),
                "held_bytes": curve.held[at],
                "reserved_bytes": curve.reserved[at],
            }
            for at in _shown(curve)
        ]
    return rows


def snapshot_ooms(snapshot: MemorySnapshot) -> Rows:
    """The allocations that failed for lack of memory, in the order of time."""
    rows: Rows = []
    for device, actions in sorted(snapshot.actions.items()):
        if any(action.action == OOM for action in actions):
            curve = curve_of(snapshot, device)
            rows += [
                {
                    "device": f"GPU{device}",
                    "time_us": float(curve.times[at]) if curve.times else None,
                    "wanted_bytes": actions[at].size,
                    "device_free_bytes": actions[at].free if actions[at].free >= 0 else None,
                    "held_bytes": curve.held[at],
                    **_where(snapshot, actions[at].stack),
                }
                for at in curve.ooms
            ]
    return rows


def snapshot_results(snapshots: Sequence[NamedSnapshot], views: Sequence[str]) -> list[Result]:
    """The results of these names. Of a single snapshot they have no column `process`. Raises ViewError."""
    unknown = [name for name in views if name not in SNAPSHOT_VIEWS]
    if unknown:
        raise ViewError(f"a memory snapshot has no view {unknown[0]}; its views are {', '.join(SNAPSHOT_VIEWS)}")
    return [_result(name, snapshots) for name in views]


def _result(name: str, snapshots: Sequence[NamedSnapshot]) -> Result:
    made, schema = SNAPSHOT_VIEWS[name]
    schema = schema if len(snapshots) > 1 else schema[1:]
    rows = [{"process": process, **row} for process, snapshot in snapshots for row in made(snapshot)]
    values = {column.name: [row[column.name] for row in rows] for column in schema}
    return make_result(name, schema, values, _notes(name, [each.snapshot for each in snapshots]))


def _notes(name: str, snapshots: Sequence[MemorySnapshot]) -> list[str]:
    notes = []
    if name == "snapshot_stacks" and not any(snapshot.stacks for snapshot in snapshots):
        notes.append(NO_STACKS)
    if name == "snapshot_curve":
        if not any(snapshot.actions for snapshot in snapshots):
            notes.append(NO_HISTORY)
        elif not all(curve_of(each, device).times for each in snapshots for device in each.actions):
            notes.append(NO_TIMES)
    if name == "snapshot_devices":
        notes += [f"PYTORCH_CUDA_ALLOC_CONF={each.settings}" for each in snapshots if each.settings][:1]
    return notes


def _where(snapshot: MemorySnapshot, stack: int) -> dict[str, str | None]:
    return {"place": place_of(snapshot, stack), "call_stack": stack_text(snapshot, stack)}


def _shown(curve: AllocatorCurve) -> list[int]:
    """The places of a curve that are shown."""
    if not curve.times:
        return []
    points = np.array([curve.times, curve.held, curve.reserved], np.float64).T
    chosen = set(largest_triangles(points, MAX_POINTS).tolist())
    return sorted(chosen | {int(np.argmax(points[:, 1])), *curve.ooms[:MAX_POINTS]})


SNAPSHOT_VIEWS: Mapping[str, tuple[Callable[[MemorySnapshot], Rows], tuple[ResultColumn, ...]]] = {
    "snapshot_devices": (snapshot_devices, (*_OF, *_DEVICES)),
    "snapshot_stacks": (snapshot_stacks, (*_OF, *_STACKS, *_WHERE)),
    "snapshot_ooms": (snapshot_ooms, (*_OF, *_OOMS, *_WHERE)),
    "snapshot_curve": (snapshot_curve, (*_OF, *_CURVE)),
    "snapshot_segments": (snapshot_segments, (*_OF, *_SEGMENTS)),
    "snapshot_blocks": (snapshot_blocks, (*_OF, *_BLOCKS, *_WHERE)),
}
FIRST_VIEWS = ("snapshot_devices", "snapshot_stacks", "snapshot_ooms")  # of a report
