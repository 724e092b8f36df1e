"""The figures of a memory snapshot, as results."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from kineto_trace.base.quantities import format_size, share, times
from kineto_trace.errors import ViewError
from kineto_trace.snapshots.snapshot_reader import (
    ACTIVE,
    AWAITING,
    INACTIVE,
    NO_STACK,
    AllocatorAction,
    MemorySnapshot,
    SnapshotBlock,
    SnapshotSegment,
)
from kineto_trace.structure.allocations import largest_triangles
from kineto_trace.structure.library_calls import CodePlace, is_users
from kineto_trace.view_api.result import Result, columns, make_result
from kineto_trace.view_api.result_columns import ResultColumn

MAX_POINTS = 1000  # of the curve of a device
NO_HISTORY = (
    "the snapshot has no history of allocations: record it with `kinetoctl memory`, or with "
    "torch.cuda.memory._record_memory_history() before the snapshot"
)
NO_STACKS = "the snapshot has no stacks: `kinetoctl memory --with-stack` records the Python stack of each allocation"
NO_TIMES = "this version of torch recorded no times for allocator actions, so there is no curve"
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
    ("reserved_bytes", "int", "bytes", "memory that the allocator got from CUDA"),
    ("allocated_bytes", "int", "bytes", "blocks in use by tensors"),
    (
        "active_bytes",
        "int",
        "bytes",
        "allocated blocks, and blocks that were freed while another stream still uses them",
    ),
    ("requested_bytes", "int", "bytes", "memory that the program requested in the allocated blocks"),
    ("rounding_bytes", "int", "bytes", "allocated minus requested bytes: lost inside blocks"),
    ("inactive_split_bytes", "int", "bytes", "free parts of segments that are in use: lost between blocks"),
    ("fragmentation_pct", "float", "%", "inactive_split_bytes as a share of reserved_bytes"),
    ("cached_bytes", "int", "bytes", "segments without a block in use, which torch.cuda.empty_cache() releases"),
    ("largest_free_bytes", "int", "bytes", "largest free block; a larger request needs new memory from CUDA"),
    ("segments", "int", "", "number of segments"),
    ("blocks", "int", "", "number of active blocks"),
)
_STACKS = columns(
    ("active_bytes", "int", "bytes", "active blocks that were allocated with this stack"),
    ("share_pct", "float", "%", "share of the active bytes of the device"),
    ("requested_bytes", "int", "bytes", "memory that the program requested in these blocks"),
    ("blocks", "int", "", "number of these blocks"),
)
_SEGMENTS = columns(
    ("segment", "text", "", "address"),
    ("segment_type", "text", "", "small (blocks of up to 1 MiB), large, or expandable"),
    ("pool", "text", "", "private pool, such as that of a CUDA graph; missing: the shared pool"),
    ("stream", "int", "", "stream that it belongs to; 0: the default stream"),
    ("reserved_bytes", "int", "bytes", "its size"),
    ("allocated_bytes", "int", "bytes", "blocks in use by tensors"),
    ("awaiting_bytes", "int", "bytes", "blocks that were freed while another stream still uses them"),
    ("inactive_bytes", "int", "bytes", "free blocks"),
    ("largest_free_bytes", "int", "bytes", "largest free block"),
    ("blocks", "int", "", "number of blocks, including free ones"),
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
    ("requested_bytes", "int", "bytes", "size that the program requested; missing if the block is free"),
)
_CURVE = columns(
    ("time_us", "float", "us", "time since the first action in the history"),
    ("held_bytes", "int", "bytes", "memory that the program had requested and not yet freed"),
    ("reserved_bytes", "int", "bytes", "memory that the allocator had from CUDA"),
)
_OOMS = columns(
    ("time_us", "float", "us", "time since the first action in the history; missing if torch recorded no times"),
    ("wanted_bytes", "int", "bytes", "size that could not be allocated"),
    ("device_free_bytes", "int", "bytes", "free memory on the device, as reported by CUDA"),
    ("held_bytes", "int", "bytes", "memory that the program held at that time"),
)
FIRST_VIEWS = ("snapshot_devices", "snapshot_stacks", "snapshot_ooms")  # for a report
OOM = "oom"
# Changes by each action: bytes that the program holds, and bytes that the allocator holds.
_CHANGES: Mapping[str, tuple[int, int]] = {
    "alloc": (1, 0),
    "free_requested": (-1, 0),
    "segment_alloc": (0, 1),
    "segment_map": (0, 1),
    "segment_free": (0, -1),
    "segment_unmap": (0, -1),
}
# Frames of torch that capture the stack, and those of its allocator: they are innermost in every stack with C++.
_ALLOCATOR = re.compile(r"^torch::(?:unwind|CapturedTraceback)|gather_with_cpp|CUDACachingAllocator")
MAX_FRAMES = 100  # of a stack as text
SEPARATOR = ";"


class NamedSnapshot(NamedTuple):
    """A snapshot and the name of its process."""

    process: str
    snapshot: MemorySnapshot


@dataclass(slots=True)
class DeviceMemory:
    """Sums of one device, in bytes. cached: of segments that are entirely free; split: free bytes in the others."""

    device: int
    segments: int = 0
    free_segments: int = 0
    blocks: int = 0
    reserved: int = 0
    allocated: int = 0
    requested: int = 0
    awaiting: int = 0
    cached: int = 0
    split: int = 0
    largest_free: int = 0

    @property
    def active(self) -> int:
        """Returns the bytes of blocks that are in use or that another stream still uses."""
        return self.allocated + self.awaiting

    @property
    def rounding(self) -> int:
        """Returns the bytes of allocated blocks beyond the requested ones."""
        return self.allocated - self.requested

    def add(self, segment: SnapshotSegment) -> None:
        """Counts a segment."""
        self.segments += 1
        self.reserved += segment.size
        used = any(block.state != INACTIVE for block in segment.blocks)
        self.free_segments += not used
        for block in segment.blocks:
            if block.state == ACTIVE:
                self.blocks += 1
                self.allocated += block.size
                self.requested += block.requested
            elif block.state == AWAITING:
                self.blocks += 1
                self.awaiting += block.size
            else:
                self.largest_free = max(self.largest_free, block.size)
                if used:
                    self.split += block.size
                else:
                    self.cached += block.size


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorCurve:
    """One device over time. One value per action.

    times: us since the first action; empty if torch recorded no times.
    held: bytes that the program had requested and not released.
    reserved: bytes that the allocator had.
    ooms: places of the actions that failed for lack of memory.
    """

    device: int
    times: Sequence[int]
    held: Sequence[int]
    reserved: Sequence[int]
    ooms: Sequence[int] = field(default=())


def address_text(address: int) -> str:
    """Formats an address for display and for addresses of pages."""
    return f"{address:#x}"


def snapshot_devices(snapshot: MemorySnapshot) -> Rows:
    """Returns the sums of each device."""
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
    """Returns the active blocks by the stack that allocated them, the largest sum first."""
    active = {each.device: each.active for each in device_memory(snapshot.segments)}
    found: dict[tuple[int, int], list[SnapshotBlock]] = defaultdict(list)
    for segment in snapshot.segments:
        for block in segment.blocks:
            if block.state != INACTIVE:
                found[segment.device, block.stack].append(block)
    sizes = {key: sum(block.size for block in blocks) for key, blocks in found.items()}
    return [
        {
            "device": f"GPU{device}",
            "active_bytes": sizes[device, stack],
            "share_pct": 100 * sizes[device, stack] / active[device] if active[device] else None,
            "requested_bytes": sum(block.requested for block in found[device, stack]),
            "blocks": len(found[device, stack]),
            **_where(snapshot, stack),
        }
        for device, stack in sorted(sizes, key=lambda key: -sizes[key])
    ]


def snapshot_segments(snapshot: MemorySnapshot) -> Rows:
    """Returns the segments, the largest first."""
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
    """Returns every block, in the order of addresses."""
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
    """Returns the held bytes over time: for each device the MAX_POINTS moments that show the shape best, and
    the peak.
    """
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
    """Returns the allocations that failed for lack of memory, in the order of time."""
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
    """Returns the results of these names, without the column `process` for a single snapshot. Raises ViewError."""
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
    """Returns the places of a curve that are shown."""
    if not curve.times:
        return []
    points = np.array([curve.times, curve.held, curve.reserved], np.float64).T
    chosen = set(largest_triangles(points, MAX_POINTS).tolist())
    return sorted(chosen | {int(np.argmax(points[:, 1])), *curve.ooms[:MAX_POINTS]})


def device_memory(segments: Iterable[SnapshotSegment]) -> list[DeviceMemory]:
    """Returns the sums of each device, by number."""
    found: dict[int, DeviceMemory] = {}
    for segment in segments:
        found.setdefault(segment.device, DeviceMemory(segment.device)).add(segment)
    return [found[device] for device in sorted(found)]


def curve_of(snapshot: MemorySnapshot, device: int) -> AllocatorCurve:
    """Returns the held bytes of a device at each of its actions, computed backwards from the snapshot."""
    actions = snapshot.actions.get(device, ())
    own = [segment for segment in snapshot.segments if segment.device == device]
    asked = sum(block.requested for segment in own for block in segment.blocks if block.state == ACTIVE)
    start = actions[0].time_us if actions else 0
    timed = all(action.time_us for action in actions)
    return AllocatorCurve(
        device=device,
        times=list(accumulate((action.time_us - start for action in actions), max)) if timed else (),
        held=_levels(actions, 0, asked),
        reserved=_levels(actions, 1, sum(segment.size for segment in own)),
        ooms=[at for at, action in enumerate(actions) if action.action == OOM],
    )


def _levels(actions: Sequence[AllocatorAction], which: int, end: int) -> list[int]:
    """Returns the level after each action if it is `end` after the last one; never below 0."""
    levels = list(accumulate(_CHANGES.get(action.action, (0, 0))[which] * action.size for action in actions))
    base = end - levels[-1] if levels else end
    base = max(base, -min(levels, default=0))
    return [base + level for level in levels]


def place_of(snapshot: MemorySnapshot, stack: int) -> str | None:
    """Returns the innermost frame of user code, otherwise of Python, otherwise of the allocating code; None without
    one.
    """
    if stack == NO_STACK:
        return None
    frames = snapshot.stacks[stack]
    python = [frame for frame in frames if _is_python(frame)]
    own = next((frame for frame in python if is_users(frame)), None)
    called = [frame for frame in frames if not _ALLOCATOR.search(frame.function)]
    return (own or (python or called or frames)[0]).short


def stack_text(snapshot: MemorySnapshot, stack: int) -> str | None:
    """Returns the frames of a stack, innermost first; None without any."""
    if stack == NO_STACK:
        return None
    frames = snapshot.stacks[stack]
    more = (f"{len(frames) - MAX_FRAMES} more frames",) if len(frames) > MAX_FRAMES else ()
    return SEPARATOR.join((*map(str, frames[:MAX_FRAMES]), *more))


def lead(devices: Sequence[DeviceMemory]) -> str:
    """Returns the figures of each device, in a sentence or two."""
    if not devices:
        return "The allocator holds no CUDA memory."
    return " ".join(_sentence(each) for each in devices)


def block_at(snapshot: MemorySnapshot, device: int, address: int) -> tuple[SnapshotSegment, SnapshotBlock] | None:
    """Returns the block of a device that begins at this address, and its segment; None if there is none."""
    for segment in snapshot.segments:
        if segment.device == device:
            for block in segment.blocks:
                if block.address == address:
                    return segment, block
    return None


def by_state(blocks: Iterable[SnapshotBlock]) -> dict[str, int]:
    """Returns the bytes of blocks by state."""
    found: dict[str, int] = defaultdict(int)
    for block in blocks:
        found[block.state] += block.size
    return found


def _is_python(frame: CodePlace) -> bool:
    return frame.file.endswith((".py", ".pyx")) or frame.file.startswith("<")


def _sentence(memory: DeviceMemory) -> str:
    text = (
        f"GPU{memory.device}: {format_size(memory.reserved)} reserved in {times(memory.segments, 'segment')}, "
        f"{format_size(memory.allocated)} of it allocated"
    )
    if memory.rounding:
        text += f" ({format_size(memory.requested)} requested, {format_size(memory.rounding)} rounding)"
    if memory.awaiting:
        text += f", {format_size(memory.awaiting)} freed but still used by other streams"
    if memory.split:
        text += f", {format_size(memory.split)} ({share(memory.split, memory.reserved)}) free between blocks in use"
    if memory.cached:
        many = times(memory.free_segments, "segment")
        text += (
            f", {format_size(memory.cached)} in {many} without blocks in use, which torch.cuda.empty_cache() releases"
        )
    return f"{text}."


SNAPSHOT_VIEWS: Mapping[str, tuple[Callable[[MemorySnapshot], Rows], tuple[ResultColumn, ...]]] = {
    "snapshot_devices": (snapshot_devices, (*_OF, *_DEVICES)),
    "snapshot_stacks": (snapshot_stacks, (*_OF, *_STACKS, *_WHERE)),
    "snapshot_ooms": (snapshot_ooms, (*_OF, *_OOMS, *_WHERE)),
    "snapshot_curve": (snapshot_curve, (*_OF, *_CURVE)),
    "snapshot_segments": (snapshot_segments, (*_OF, *_SEGMENTS)),
    "snapshot_blocks": (snapshot_blocks, (*_OF, *_BLOCKS, *_WHERE)),
}
