"""Reads the files of torch.cuda.memory._dump_snapshot: the memory of torch's CUDA allocator, and its past actions.

Theory of operation
    The reader uses segments with their blocks, the actions of each device (device_traces), and the setting
    PYTORCH_CUDA_ALLOC_CONF; other keys are ignored, so that new versions can be read. Versions of torch 2 differ: in
    old ones, blocks have no address (they are contiguous), actions no time, and segments no pool. A block that another
    stream still uses is "active_pending_free" or, in new ones, "active_awaiting_free". The sizes of actions are the
    requested ones. If torch recorded no stack, frames are missing or empty. Stacks are listed from the innermost frame
    outwards, those of C++ before those of Python.

    The file comes from the process that was traced, which may be hostile: it is read by plain_pickle, every value is
    checked, and shared values are visited once, or counted each time.
"""

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from kineto_trace.base.quantities import shortened
from kineto_trace.errors import FileError
from kineto_trace.open.trace_source import MAX_DEPTH, TRACE_SUFFIXES, natural_order
from kineto_trace.snapshots.plain_pickle import MAGIC, PROTOCOLS, NotPlainPickle, load_plain
from kineto_trace.store.output_formats import ATTACHMENT_SUFFIXES, ATTACHMENTS
from kineto_trace.structure.library_calls import CodePlace

MAX_BYTES = 512 << 20
MAX_BLOCKS, MAX_ACTIONS, MAX_FRAMES = 2_000_000, 5_000_000, 20_000_000
MAX_DEVICES = 1024
MAX_NAME = 1000  # characters of a file or function
MAX_LINE = 1 << 31
MAX_TOTAL = 1 << 62  # bytes of all segments, and of all actions
NO_STACK = -1
ACTIVE, AWAITING, INACTIVE = "active", "awaiting free", "inactive"
_STATES = {
    "active_allocated": ACTIVE,
    "active_awaiting_free": AWAITING,
    "active_pending_free": AWAITING,
    "inactive": INACTIVE,
}
_MOST = 1 << 63  # of any number but addresses
_MOST_ADDRESS = 1 << 64
_UNTOLD = -1
SNAPSHOT_FORMAT = ATTACHMENTS["memory_snapshot"]
SUFFIX = ATTACHMENT_SUFFIXES[SNAPSHOT_FORMAT]
COLUMNS_SUFFIX = ".kineto"  # of a folder of columns
STORED_NAME = SUFFIX.lstrip(".")  # in the folder of a target


class SnapshotBlock(NamedTuple):
    """A part of a segment. requested: bytes that the program requested; stack: number of its stack, or NO_STACK."""

    address: int
    size: int
    requested: int
    state: str
    stack: int


class SnapshotSegment(NamedTuple):
    """Memory that the allocator got from CUDA. pool: "" for the shared one; kind: small, large, expandable."""

    device: int
    address: int
    size: int
    stream: int
    pool: str
    kind: str
    blocks: tuple[SnapshotBlock, ...]


class AllocatorAction(NamedTuple):
    """An action of the allocator. time_us: Unix time, 0 if unknown; free: bytes that CUDA had left (for an oom)."""

    action: str
    size: int
    time_us: int
    free: int
    stack: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySnapshot:
    """The memory of torch's allocator at one moment. actions: by device; stacks: each from the innermost frame
    outwards.
    """

    segments: tuple[SnapshotSegment, ...]
    actions: Mapping[int, tuple[AllocatorAction, ...]]
    stacks: tuple[tuple[CodePlace, ...], ...]
    settings: str


class _WrongValue(ValueError):
    """A value is not as torch would write it; the text has the place."""


class _Reading:
    """One snapshot while it is read. Shared frames and lists of frames are read once."""

    def __init__(self) -> None:
        self._blocks = self._actions = self._frames = 0
        # id of a list of frames -> its number; the lists live as long as this object
        self._stack_of: dict[int, int] = {}
        self._stacks: dict[tuple[int, ...], int] = {}
        self._place_of: dict[int, int] = {}  # id of a frame's dict -> number of its place
        self._places: dict[CodePlace, int] = {}

    def snapshot(self, value: Any) -> MemorySnapshot:
        """Returns the snapshot. Raises _WrongValue."""
        if type(value) is not dict or "segments" not in value:
            raise _WrongValue('it is not a dict with "segments"')
        segments = tuple(self._segment(each, f"segments[{at}]") for at, each in _items(value, "segments", ""))
        traces = _items(value, "device_traces", "") if "device_traces" in value else ()
        actions = {}
        for device, _ in traces:
            if device >= MAX_DEVICES:
                raise _WrongValue(f"it has more than {MAX_DEVICES} devices")
            told = _items(value["device_traces"], device, "device_traces")
            where = f"device_traces[{device}]"
            actions[device] = tuple(self._action(each, f"{where}[{at}]") for at, each in told)
        sizes = [segment.size for segment in segments], *([each.size for each in found] for found in actions.values())
        if any(sum(each) > MAX_TOTAL for each in sizes):
            raise _WrongValue("its sizes add up to more than any memory holds")
        places = tuple(self._places)
        settings = value.get("allocator_settings")
        conf = settings.get("PYTORCH_CUDA_ALLOC_CONF", "") if type(settings) is dict else ""
        return MemorySnapshot(
            segments=segments,
            actions={device: found for device, found in actions.items() if found},
            stacks=tuple(tuple(places[number] for number in stack) for stack in self._stacks),
            settings=shortened(conf, MAX_NAME) if type(conf) is str else "",
        )

    def _segment(self, value: Any, where: str) -> SnapshotSegment:
        device, size = _number(value, "device", where, 0), _number(value, "total_size", where)
        address = _number(value, "address", where, 0)
        pool = value.get("segment_pool_id")
        kind = value.get("segment_type")
        kind = "expandable" if value.get("is_expandable") is True else kind if kind in ("small", "large") else ""
        if device >= MAX_DEVICES:
            raise _WrongValue(f"{where}.device: there is no device {device}")
        blocks, at = [], address
        self._count_block()  # an empty segment counts, too
        for number, each in _items(value, "blocks", where):
            block = self._block(each, at, f"{where}.blocks[{number}]")
            at = block.address + block.size
            blocks.append(block)
        if sum(block.size for block in blocks) > size:
            raise _WrongValue(f"{where}: its blocks are larger than the segment")
        own = type(pool) is tuple and len(pool) == 2 and all(type(part) is int for part in pool) and any(pool)
        return SnapshotSegment(
            device=device,
            address=address,
            size=size,
            stream=_number(value, "stream", where, 0),
            pool=f"{pool[0] % _MOST}.{pool[1] % _MOST}" if own else "",
            kind=kind,
            blocks=tuple(blocks),
        )

    def _block(self, value: Any, following: int, where: str) -> SnapshotBlock:
        self._count_block()
        size = _number(value, "size", where)
        state = value.get("state")
        if type(state) is not str or state not in _STATES:
            raise _WrongValue(f"{where}.state: expected one of {', '.join(_STATES)}")
        return SnapshotBlock(
            address=_number(value, "address", where, following),
            size=size,
            requested=min(_number(value, "requested_size", where, size), size),
            state=_STATES[state],
            stack=self._stack(value, where),
        )

    def _count_block(self) -> None:
        self._blocks += 1
        if self._blocks > MAX_BLOCKS:
            raise _WrongValue(f"it has more than {MAX_BLOCKS:,} blocks")

    def _action(self, value: Any, where: str) -> AllocatorAction:
        self._actions += 1
        if self._actions > MAX_ACTIONS:
            raise _WrongValue(f"it has more than {MAX_ACTIONS:,} actions of the allocator")
        size = _number(value, "size", where, 0)
        action = value.get("action")
        if type(action) is not str:
            raise _WrongValue(f"{where}.action: expected a string, not {type(action).__name__}")
        return AllocatorAction(
            action=action,
            size=size,
            time_us=_number(value, "time_us", where, 0),
            free=_number(value, "device_free", where, _UNTOLD),
            stack=self._stack(value, where),
        )

    def _stack(self, value: Mapping[Any, Any], where: str) -> int:
        """Returns the number of the frames of a block or action; NO_STACK if it has none."""
        frames = value.get("frames")
        if not frames:
            return NO_STACK
        if type(frames) is not list:
            raise _WrongValue(f"{where}.frames: expected a list, not {type(frames).__name__}")
        found = self._stack_of.get(id(frames))
        if found is None:
            self._frames += len(frames)
            if self._frames > MAX_FRAMES:
                raise _WrongValue(f"its stacks have more than {MAX_FRAMES:,} frames")
            stack = tuple(self._frame(each, f"{where}.frames[{at}]") for at, each in enumerate(frames))
            found = self._stack_of[id(frames)] = self._stacks.setdefault(stack, len(self._stacks))
        return found

    def _frame(self, value: Any, where: str) -> int:
        """Returns the number of a frame's place."""
        found = self._place_of.get(id(value))
        if found is None:
            if type(value) is not dict:
                raise _WrongValue(f"{where}: expected a dict, not {type(value).__name__}")
            file, function, line = value.get("filename"), value.get("name"), value.get("line")
            if type(file) is not str or type(function) is not str:
                raise _WrongValue(f"{where}: expected strings as filename and name")
            known = line if type(line) is int and 0 < line < MAX_LINE else 0
            place = CodePlace(shortened(file, MAX_NAME), shortened(function, MAX_NAME), known)
            found = self._place_of[id(value)] = self._places.setdefault(place, len(self._places))
        return found


def read_snapshot(path: str | PathLike[str]) -> MemorySnapshot:
    """Reads a snapshot. Raises FileError if it is unreadable, too large, truncated, or not a snapshot."""
    place = Path(path)
    try:
        with place.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as exc:
        raise FileError(f"cannot read {place}: {exc.strerror or exc}") from exc
    if not data:
        raise FileError(f"{place} is empty: the snapshot was not written completely")
    if len(data) > MAX_BYTES:
        raise FileError(
            f"{place} is larger than {MAX_BYTES >> 20} MiB, the limit of this viewer: take the snapshot with a smaller "
            "max_entries, or without stacks"
        )
    try:
        return _Reading().snapshot(load_plain(data))
    except NotPlainPickle as exc:
        raise FileError(f"{place} {exc}") from exc
    except _WrongValue as exc:
        raise FileError(f"{place} is not a memory snapshot written by torch.cuda.memory._dump_snapshot: {exc}") from exc


def _items(value: Any, key: str | int, where: str) -> "Sequence[tuple[int, Any]] | enumerate[Any]":
    """Returns the items of a list in a dict or list, with their places. Raises _WrongValue."""
    name = f"[{key}]" if type(key) is int else f"{'.' if where else ''}{key}"
    if type(value) is dict and key not in value:
        raise _WrongValue(f"{where}{name} is missing")
    found = value[key]
    if type(found) is not list:
        raise _WrongValue(f"{where}{name}: expected a list, not {type(found).__name__}")
    return enumerate(found)


def _number(value: Any, key: str, where: str, missing: int | None = None) -> int:
    """Returns a number below 2^63 (addresses: 2^64) of a dict; `missing` if there is none. Raises _WrongValue."""
    if type(value) is not dict:
        raise _WrongValue(f"{where}: expected a dict, not {type(value).__name__}")
    found = value.get(key, missing)
    if type(found) is not int:
        told = f"expected a number, not {type(found).__name__}" if key in value else "is missing"
        raise _WrongValue(f"{where}.{key}: {told}")
    if found != missing and not 0 <= found < (_MOST_ADDRESS if key.startswith("addr") else _MOST):
        raise _WrongValue(f"{where}.{key}: the number is out of range")
    return found


def is_snapshot_file(path: Path) -> bool:
    """Returns whether this file may be a snapshot, by its beginning."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            head = file.read(2)
    except OSError:
        return False
    return len(head) == 2 and head[0] == MAGIC and head[1] in PROTOCOLS


def snapshots_at(path: str | PathLike[str]) -> list[Path]:
    """Returns the snapshots at a path or pattern: the file itself, those in the folder, or the one beside the trace."""
    place = Path(path)
    if not place.exists() and glob.has_magic(str(path)):
        found = sorted((Path(match) for match in glob.glob(str(path), recursive=True)), key=natural_order)  # noqa: PTH207 - absolute patterns too
        return list(dict.fromkeys(each for match in found for each in _at(match)))
    return _at(place)


def process_name(path: Path) -> str:
    """Returns a name for the process of a snapshot: the file without its suffix, or its target's folder."""
    return path.parent.name if path.name == STORED_NAME else path.name.removesuffix(SUFFIX).removesuffix(".pickle")


def _at(place: Path) -> list[Path]:
    if is_snapshot_file(place):
        return [place]
    found = _below(place, MAX_DEPTH) if place.is_dir() else []
    suffix = next((suffix for suffix in (*TRACE_SUFFIXES, COLUMNS_SUFFIX) if place.name.endswith(suffix)), "")
    beside = place.with_name(place.name.removesuffix(suffix) + SUFFIX)
    return found or ([beside] if suffix and beside.is_file() else [])


def _below(folder: Path, depth: int) -> list[Path]:
    """Returns the snapshots in a folder and, down to this depth, in its subfolders."""
    try:
        entries = sorted(folder.iterdir(), key=natural_order)
    except OSError:
        return []
    found = [entry for entry in entries if entry.name.endswith(STORED_NAME) and entry.is_file()]
    if depth:
        for entry in entries:
            if entry.is_dir() and not entry.is_symlink() and not entry.name.startswith("."):
                found += _below(entry, depth - 1)
    return found
