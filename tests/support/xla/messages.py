"""XLA's messages, serialised: profiles (XSpace) and compiled modules (HloModuleProto), made by hand or recorded."""

from __future__ import annotations

import lzma
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kineto_agent.protocol.records import PART_HEAD
from kineto_trace.formats.perfetto_proto import data, number
from kineto_trace.spool.raw_records import Chunk, RawSource

DATA = Path(__file__).parents[2] / "data" / "h200"


def recorded(name: str) -> bytes:
    """One of the files of tests/data/h200, such as "jax-graphs-xspace"."""
    return lzma.decompress((DATA / f"{name}.xz").read_bytes())


def source(parts: Sequence[bytes], format: str, metadata: Mapping[str, Any] | None = None) -> RawSource:
    """Messages as a source hands them over: in buffers of any size, the first of which ends anywhere."""
    whole = b"".join(PART_HEAD.pack(len(part)) + part for part in parts)
    sizes = [min(11, len(whole)), max(len(whole) - 11, 0)]
    chunks = [Chunk(sequence=0, records=1, offset=0, size=sizes[0])]
    chunks.append(Chunk(sequence=1, records=1, offset=sizes[0], size=sizes[1]))
    return RawSource(
        source="jax", format=format, metadata=dict(metadata or {}), record_bytes={}, records=2, dropped=0,
        data=memoryview(whole), chunks=tuple(chunks), strings={}, torn=0,
    )  # fmt: skip


# ------------------------------------------------------------ profiles


@dataclass
class PlaneMaker:
    """A plane of a profile; `line` adds its lines, `bytes` is the whole."""

    name: str
    stats: Mapping[str, int | str] = field(default_factory=dict)
    _names: dict[str, int] = field(default_factory=dict)
    _stat_names: dict[str, int] = field(default_factory=dict)
    _lines: list[bytes] = field(default_factory=list)

    def line(self, name: str, events: Sequence[Any], timestamp_ns: int = 0, row: int = 1) -> None:
        """events: (name, begin in ns, duration in ns, statistics)."""
        made = b"".join(data(4, self._event(*event)) for event in events)
        self._lines.append(number(1, row) + data(2, name) + number(3, timestamp_ns) + made)

    def _event(self, name: str, begin_ns: int, duration_ns: int, stats: Mapping[str, int | str]) -> bytes:
        key = self._names.setdefault(name, len(self._names) + 1)
        times = number(2, begin_ns * 1000) + number(3, duration_ns * 1000)
        return number(1, key) + times + b"".join(data(4, self._stat(*stat)) for stat in stats.items())

    def _stat(self, name: str, value: int | str) -> bytes:
        key = number(1, self._key(name))
        return key + (number(7, self._key(value)) if isinstance(value, str) else number(4, value))

    def _key(self, text: str) -> int:
        return self._stat_names.setdefault(text, len(self._stat_names) + 1)

    def bytes(self) -> bytes:
        """The serialised XPlane."""
        stats = b"".join(data(6, self._stat(*stat)) for stat in self.stats.items())
        names = (data(4, number(1, key) + data(2, number(1, key) + data(2, name))) for name, key in self._names.items())
        stat_names = (
            data(5, number(1, key) + data(2, number(1, key) + data(2, name))) for name, key in self._stat_names.items()
        )
        lines = (data(3, line) for line in self._lines)
        return data(2, self.name) + b"".join((*lines, *names, *stat_names, stats))


def space(*planes: PlaneMaker) -> bytes:
    """A serialised XSpace."""
    return b"".join(data(1, plane.bytes()) for plane in planes)


def begun_at(time_ns: int) -> PlaneMaker:
    """The plane that says when the profile began."""
    return PlaneMaker("Task Environment", {"profile_start_time": time_ns})


# ------------------------------------------------------------ modules


@dataclass(frozen=True)
class Op:
    """One instruction of a module."""

    name: str
    opcode: str = "fusion"
    alike: str = ""
    called: tuple[int, ...] = ()
    op_name: str = ""
    source: str = ""
    line: int = 0


def module(name: str, computations: Mapping[int, Sequence[Op]], entry: int = 1) -> bytes:
    """A serialised HloModuleProto whose instructions are scheduled in this order, but lie in another one."""
    ids = {(key, place): key * 1000 + place for key, ops in computations.items() for place in range(len(ops))}
    parts, schedule = [], b""
    for key, ops in computations.items():
        made = [data(2, _op(op, ids[key, place])) for place, op in enumerate(ops)]
        parts.append(data(3, data(1, f"computation.{key}") + number(5, key) + b"".join(reversed(made))))
        order = b"".join(number(1, ids[key, place]) for place in range(len(ops)))
        schedule += data(1, number(1, key) + data(2, order))
    return data(1, name) + number(6, entry) + b"".join(parts) + data(7, schedule)


def _op(op: Op, key: int) -> bytes:
    metadata = data(2, op.op_name)
    if op.source:
        metadata += data(3, op.source) + number(4, op.line)
    if op.alike:
        metadata += data(12, op.alike)
    called = b"".join(number(38, each) for each in op.called)
    return data(1, op.name) + data(2, op.opcode) + data(7, metadata) + number(35, key) + called
