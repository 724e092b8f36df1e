"""Decodes the planes of devices in XLA's profiles: what ran there, on which stream, and for which HLO operation.

Theory of operation
    Lines that are streams ("Stream #14(Compute,MemcpyH2D)") or hold operations ("XLA Ops") have what ran: copies and
    fills by their names, everything else is a kernel. An event says of itself what it knows: correlation, graph and
    launch shape on a GPU, "hlo_op" and "hlo_module", the path of the JAX operation and its line in the program.
    Lines of steps and modules have ranges around that (gpu_user_annotation). Other lines repeat the same rows in other
    words and are left out.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from kineto_trace.decode.xplane.hlo_arguments import HloArguments
from kineto_trace.decode.xplane.profile_times import ProfileTimes
from kineto_trace.decode.xplane.xspace import Event, Plane, ProfileLine, Value
from kineto_trace.model.activity_tables import NO_PRIORITY, STEP_NUMBER
from kineto_trace.model.trace import SCHEMAS, StringTable, Table, make_table

_DEVICE = re.compile(r"/device:[^\s/]*?:(\d{1,9})(?:\s|$)")
_STREAM = re.compile(r"Stream #(\d{1,9})")
_OPERATIONS = re.compile(r"(?:Async )?XLA Ops")
_STEPS, _MODULES = "Steps", "XLA Modules"
_MEMORY = re.compile(r"(Memcpy|Memset)(\w*)")
_NO_PATH = "XlaModule:"
_SIZE = re.compile(r"size:(\d{1,18})")
_COPY_KINDS = {"H2D": 1, "D2H": 2, "D2D": 8, "P2P": 10}
_LAUNCH = re.compile(
    r"regs:(\d{1,4}) static_shared:(\d{1,9}) dynamic_shared:(\d{1,9}) grid:(\d{1,9}),(\d{1,9}),(\d{1,9}) "
    r"block:(\d{1,9}),(\d{1,9}),(\d{1,9})"
)
_LAUNCH_COLUMNS = (
    "registers", "static_shared_memory", "dynamic_shared_memory", "grid_x", "grid_y", "grid_z", "block_x", "block_y",
    "block_z",
)  # fmt: skip
_KINDS = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
_U32, _U64 = (1 << 32) - 1, (1 << 64) - 1


class DevicePlanes:
    """Collects the rows of devices."""

    def __init__(self, strings: StringTable, arguments: HloArguments) -> None:
        self._strings = strings
        self._arguments = arguments
        self._rows: dict[str, list[dict[str, int]]] = {kind: [] for kind in _KINDS}

    def read(self, plane: Plane, times: ProfileTimes) -> None:
        """Reads a plane, if it is one of a device. Raises Damaged."""
        device = _DEVICE.match(plane.name)
        if device is None:
            return
        for place, line in enumerate(plane.lines):
            stream = _STREAM.match(line.name)
            where = {"device": int(device[1]), "stream": int(stream[1]) if stream else place}
            if stream or _OPERATIONS.fullmatch(line.name):
                for event in line.events:
                    self._add_work(event, {**where, **_when(line, event, times)})
            elif line.name in (_STEPS, _MODULES):
                for event in line.events:
                    self._add_range(event, line.name, {**where, **_when(line, event, times)})

    def tables(self) -> dict[str, Table]:
        """Returns the tables that have rows."""
        found = {}
        for kind, rows in self._rows.items():
            if rows:
                columns = {name: np.array([row.get(name, 0) for row in rows]) for name in _columns(kind, rows)}
                if kind == "kernel":
                    columns["priority"] = np.full(len(rows), NO_PRIORITY)
                found[kind] = make_table(kind, len(rows), columns)
        return found

    def _add_work(self, event: Event, row: dict[str, int]) -> None:
        stats = event.stats
        row |= {
            "name": self._strings.add(event.name),
            "correlation": _number(stats, "correlation_id", _U32),
            "graph_id": _number(stats, "cuda_graph_id", _U32),
            "graph_node_id": _number(stats, "cuda_graph_node_id", _U64),
        }
        memory = _MEMORY.match(event.name)
        if memory is None:
            self._rows["kernel"].append({**row, **_launch(stats), "hlo": self._hlo(stats)})
            return
        size = _SIZE.search(str(stats.get("memcpy_details", stats.get("memset_details", ""))))
        row["bytes"] = int(size[1]) if size else 0
        if memory[1] == "Memset":
            self._rows["gpu_memset"].append(row)
        else:
            self._rows["gpu_memcpy"].append({**row, "copy_kind": _COPY_KINDS.get(memory[2], 0)})

    def _add_range(self, event: Event, line: str, row: dict[str, int]) -> None:
        name = f"{STEP_NUMBER} {event.name}" if line == _STEPS and event.name.isdigit() else event.name
        self._rows["gpu_user_annotation"].append({**row, "name": self._strings.add(name)})

    def _hlo(self, stats: Mapping[str, Value]) -> int:
        path = stats.get("name", stats.get("tf_op", ""))
        path = "" if path == _NO_PATH else path
        return self._arguments.number(
            str(stats.get("hlo_op", "")), str(stats.get("hlo_module", "")), str(path), str(stats.get("source", ""))
        )


def _when(line: ProfileLine, event: Event, times: ProfileTimes) -> dict[str, int]:
    start, duration = times.of(line, event)
    return {"start": start, "duration": duration}


def _number(stats: Mapping[str, Value], name: str, most: int) -> int:
    value = stats.get(name)
    return value if isinstance(value, int) and 0 <= value <= most else 0


def _launch(stats: Mapping[str, Value]) -> dict[str, int]:
    found = _LAUNCH.match(str(stats.get("kernel_details", "")))
    return dict(zip(_LAUNCH_COLUMNS, map(int, found.groups()), strict=True)) if found else {}


def _columns(kind: str, rows: list[dict[str, Any]]) -> list[str]:
    """Returns the columns of the table that any of the rows has."""
    there = set().union(*rows)
    return [column.name for column in SCHEMAS[kind] if column.name in there]
