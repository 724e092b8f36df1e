"""What a memory snapshot says: sums of each device, blocks by stack, and what was allocated over time. Pure."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from kineto_trace.base.quantities import share, size_text, times
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
from kineto_trace.structure.python.code_places import CodePlace
from kineto_trace.structure.python.library_calls import is_users

OOM = "oom"
# What each action changes: bytes that the program holds, and bytes that the allocator holds.
_CHANGES: Mapping[str, tuple[int, int]] = {
    "alloc": (1, 0),
    "free_requested": (-1, 0),
    "segment_alloc": (0, 1),
    "segment_map": (0, 1),
    "segment_free": (0, -1),
    "segment_unmap": (0, -1),
}
# Frames of torch that take the stack, and those of its allocator: they are innermost in every stack with C++.
_ALLOCATOR = re.compile(r"^torch::(?:unwind|CapturedTraceback)|gather_with_cpp|CUDACachingAllocator")
MAX_FRAMES = 100  # of a stack as text
SEPARATOR = ";"


@dataclass(slots=True)
class DeviceMemory:
    """Sums of one device, in bytes. cached: of segments that are wholly free; split: what is free in the others."""

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
        """Bytes of blocks that are in use or that another stream still uses."""
        return self.allocated + self.awaiting

    @property
    def rounding(self) -> int:
        """Bytes of allocated blocks beyond what the program asked for."""
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


@dataclass(slots=True)
class StackMemory:
    """The blocks in use of one device that were allocated with one stack: bytes, and how many."""

    device: int
    stack: int
    size: int = 0
    requested: int = 0
    blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorCurve:
    """One device over time. times: us since the first action; none if torch told no times.

    held: bytes that the program had asked for and not given back; reserved: bytes that the allocator had; ooms: places
    of the actions that failed for lack of memory. All have a value for each action.
    """

    device: int
    times: Sequence[int]
    held: Sequence[int]
    reserved: Sequence[int]
    ooms: Sequence[int] = field(default=())


def device_memory(segments: Iterable[SnapshotSegment]) -> list[DeviceMemory]:
    """The sums of each device, by number."""
    found: dict[int, DeviceMemory] = {}
    for segment in segments:
        found.setdefault(segment.device, DeviceMemory(segment.device)).add(segment)
    return [found[device] for device in sorted(found)]


def stack_memory(segments: Iterable[SnapshotSegment]) -> list[StackMemory]:
    """The blocks in use by device and stack, the largest sum first."""
    found: dict[tuple[int, int], StackMemory] = {}
    for segment in segments:
        for block in segment.blocks:
            if block.state != INACTIVE:
                key = segment.device, block.stack
                stack = found.setdefault(key, StackMemory(*key))
                stack.size += block.size
                stack.requested += block.requested
                stack.blocks += 1
    return sorted(found.values(), key=lambda stack: -stack.size)


def curve_of(snapshot: MemorySnapshot, device: int) -> AllocatorCurve:
    """What was held on a device at each of its actions, reckoned back from the snapshot."""
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
    """The level after each action if it is `end` after the last one; never below 0."""
    levels = list(accumulate(_CHANGES.get(action.action, (0, 0))[which] * action.size for action in actions))
    base = end - levels[-1] if levels else end
    base = max(base, -min(levels, default=0))
    return [base + level for level in levels]


def place_of(snapshot: MemorySnapshot, stack: int) -> str | None:
    """The innermost frame of the user's own code, otherwise of Python, otherwise of what allocated; None without."""
    if stack == NO_STACK:
        return None
    frames = snapshot.stacks[stack]
    python = [frame for frame in frames if _is_python(frame)]
    own = next((frame for frame in python if is_users(frame)), None)
    called = [frame for frame in frames if not _ALLOCATOR.search(frame.function)]
    return (own or (python or called or frames)[0]).short


def stack_text(snapshot: MemorySnapshot, stack: int) -> str | None:
    """The frames of a stack, innermost first; None without."""
    if stack == NO_STACK:
        return None
    frames = snapshot.stacks[stack]
    more = (f"{len(frames) - MAX_FRAMES} more frames",) if len(frames) > MAX_FRAMES else ()
    return SEPARATOR.join((*map(str, frames[:MAX_FRAMES]), *more))


def lead(devices: Sequence[DeviceMemory]) -> str:
    """The figures of each device, in a sentence or two."""
    if not devices:
        return "The allocator holds no memory of CUDA."
    return " ".join(_sentence(each) for each in devices)


def block_at(snapshot: MemorySnapshot, device: int, address: int) -> tuple[SnapshotSegment, SnapshotBlock] | None:
    """The block of a device that begins at this address, and its segment; None if there is none."""
    for segment in snapshot.segments:
        if segment.device == device:
            for block in segment.blocks:
                if block.address == address:
                    return segment, block
    return None


def by_state(blocks: Iterable[SnapshotBlock]) -> dict[str, int]:
    """Bytes of blocks by state."""
    found: dict[str, int] = defaultdict(int)
    for block in blocks:
        found[block.state] += block.size
    return found


def _is_python(frame: CodePlace) -> bool:
    return frame.file.endswith((".py", ".pyx")) or frame.file.startswith("<")


def _sentence(memory: DeviceMemory) -> str:
    text = (
        f"GPU{memory.device}: {size_text(memory.reserved)} reserved in {times(memory.segments, 'segment')}, "
        f"{size_text(memory.allocated)} of it allocated"
    )
    if memory.rounding:
        text += f" ({size_text(memory.requested)} asked for, {size_text(memory.rounding)} rounding)"
    if memory.awaiting:
        text += f", {size_text(memory.awaiting)} waiting for other streams"
    if memory.split:
        text += f", {size_text(memory.split)} ({share(memory.split, memory.reserved)}) free between blocks in use"
    if memory.cached:
        many = times(memory.free_segments, "segment")
        text += f", {size_text(memory.cached)} in {many} without any, which torch.cuda.empty_cache() gives back"
    return f"{text}."
