"""Decodes XLA's profiles ("xplane/1") into the tables cpu_op, user_annotation, kernel, gpu_memcpy, … of a trace.

Theory of operation
    A source holds one profile for each piece of the recording, each an XSpace behind its length. Of a profile's planes:

    /host:CPU     A line per thread. An event with an "hlo_op" is an HLO operation that ran on the CPU (cpu_op). One
                  with "step_num" is a StepTraceAnnotation of the program (user_annotation, which keeps the number as an
                  argument). One with a "correlation_id" is a call of the runtime or driver (cuda_runtime, cuda_driver).
                  "$file.py:3 f" is a call of a Python function; those by which the profiler itself was started or
                  stopped are left out. Everything else is a range marked with a TraceMe: XLA's and JAX's own (C++
                  names, and those of _RUNTIME) are operations of the runtime (cpu_op), the rest is taken to be the
                  program's (user_annotation). XLA does not distinguish them.
    /device:…     Work on a device, with its stream and HLO operation: see below.
    Task Environment   When the profile began (Unix ns). Times of lines are after that, or Unix, too.

Threads
    XLA numbers threads by a hash of its own, and names a line after the thread: "python", or "tf_XLAEigen/…" for those
    that XLA made. If exactly one Python thread of the process has that name, the line is that thread. All others get
    numbers from FIRST_THREAD on, above every real thread's, by line.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from kineto_agent.protocol.records import SCOPE_USER, XPLANE_FORMAT

from kineto_trace.base.array_types import AnyArray
from kineto_trace.base.quantities import times
from kineto_trace.decode.decoded import EVERYTHING, Decoded, DecodeWindow
from kineto_trace.decode.hlo_modules import HloArguments, parts
from kineto_trace.decode.xspace import Damaged, Event, Plane, ProfileLine, Value, planes
from kineto_trace.model.activity_tables import NO_PRIORITY, STEP_NUMBER
from kineto_trace.model.trace import (
    API_TABLES,
    NO_MODULE,
    NO_ROW,
    NO_SEQUENCE,
    NO_STRING,
    OP_TABLES,
    SCHEMAS,
    StringTable,
    Table,
    make_table,
)
from kineto_trace.spool.raw_records import RawSource

FORMAT = XPLANE_FORMAT
FIRST_THREAD = 1 << 30  # Linux's are below 1 << 22
_MOST_THREADS = 1 << 16
_HOST, _TASK = "/host:CPU", "Task Environment"
_UNWANTED = ("ThreadpoolListener::", "end: ", "<UNKNOWN>", "BUFFER_FLUSH", "MemoryAllocation", "MemoryDeallocation")
_RUNTIME = re.compile(
    r"::|^(?:PJRT_|Pj(?:it|Rt|RT)|ParseArguments$|Handle |Wait for |AllocateOutput|ComputeSemaphore|BufferFromHost|"
    r"XlaCompile|backend_compile|cu[A-Z]|Memcpy|Memset|\[\d+\] )"
)
_FRAME = re.compile(r"\$(\S+?):(\d+) (.+)", re.DOTALL)
_PROFILING = re.compile(r"profiler\.py\(\d+\): (?:start_|stop_|_stop_)\w+$")
_CALL = re.compile(r"(?:cuda|hip|cu)[A-Z]")
_MOST_STEP = 2**53  # as in iterations.py
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
_NO_SAMPLES = {"lines": NO_STRING, "callees": NO_STRING, "module": NO_MODULE}
_KINDS = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
_U32, _U64 = (1 << 32) - 1, (1 << 64) - 1
_UNIX_NS = 1 << 58  # from 1979 on: smaller times are after the beginning of the profile
_MOST_NS = 1 << 62
_PS = 1000


class ProfileTimes:
    """start_ns: when the profile began, in Unix ns, as it states; other values mean unknown."""

    def __init__(self, start_ns: object) -> None:
        self.known = isinstance(start_ns, int) and _UNIX_NS <= start_ns < _MOST_NS
        self._start_ns = start_ns if isinstance(start_ns, int) and self.known else 0

    def of(self, line: ProfileLine, event: Event) -> tuple[int, int]:
        """Returns start and duration in ns. Both borders are rounded down, so that rows nest as they did."""
        begin = line.timestamp_ns if line.timestamp_ns >= _UNIX_NS else self._start_ns + line.timestamp_ns
        start = min(max(begin + event.begin_ps // _PS, 0), _MOST_NS)
        end = min(max(begin + (event.begin_ps + event.duration_ps) // _PS, start), _MOST_NS)
        return start, end - start


def decode(source: RawSource, strings: StringTable, _window: DecodeWindow = EVERYTHING) -> Decoded:
    """Decodes all profiles of a source; names and arguments go into `strings`."""
    data = b"".join(source.buffers())
    reader = Profiles(strings, source.metadata)
    damaged = 0
    for part in parts(data):
        try:
            reader.read(part)
        except Damaged:
            damaged += 1
    return reader.decoded(damaged)


class Profiles:
    """Collects the rows of profiles.

    metadata: of the source; `threads` has ids of Python threads by name.
    process_id: of the process, as the profile states; 0 if it does not.
    """

    def __init__(self, strings: StringTable, metadata: Mapping[str, Any]) -> None:
        self._strings = strings
        self._metadata = metadata
        self._arguments = HloArguments(strings)
        self._ops = _Ops()
        self._calls = _Calls()
        self._frames: dict[int, list[tuple[int, int, str]]] = {}  # start, end and name by thread
        self._devices = DevicePlanes(strings, self._arguments)
        self._threads: dict[str, int] = {}  # by the name of the line
        self._names: dict[int, str] = {}
        self._undated = 0
        self.process_id = 0
        self._known = _known_threads(metadata.get("threads"))

    def read(self, data: bytes) -> None:
        """Reads one serialised XSpace; the rows before a damaged place are kept. Raises Damaged."""
        times = ProfileTimes(self._metadata.get("started_ns"))
        with suppress(Damaged):  # it comes last
            for plane in planes(data, lambda _plane, _name: False):
                if plane.name == _TASK:
                    times = ProfileTimes(plane.stats.get("profile_start_time"))
        self._undated += not times.known
        for plane in planes(data, _wanted):
            if plane.name == _HOST:
                number = plane.stats.get("process_id")
                self.process_id = number if isinstance(number, int) and 0 < number < FIRST_THREAD else 0
                self._read_host(plane, times)
            else:
                self._devices.read(plane, times)

    def decoded(self, damaged: int) -> Decoded:
        """Returns all rows. damaged: how many profiles broke off."""
        tables = {
            **self._ops.tables(self._strings),
            **self._calls.tables(self._strings),
            **self._devices.tables(),
            **_python(self._frames, self._strings),
        }
        wanted = self._metadata.get("activity_types")
        if isinstance(wanted, list):
            unwanted = {*OP_TABLES, *API_TABLES, "kernel", "python_function"} - set(map(str, wanted))
            tables = {kind: table for kind, table in tables.items() if kind not in unwanted}
        warnings = []
        if damaged:
            warnings.append(f"{times(damaged, 'XLA profile is', 'XLA profiles are')} truncated or damaged")
        if self._undated:
            undated = times(self._undated, "XLA profile has", "XLA profiles have")
            warnings.append(f"{undated} no known start time, so times are relative to the start")
        if self._arguments.full:
            warnings.append("some HLO operations have no arguments: there are too many different arguments")
        return Decoded(
            tables=tables,
            records=sum(map(len, tables.values())),
            undecoded=damaged,
            warnings=tuple(warnings),
            threads=self._names,
        )

    # ------------------------------------------------------------ the host

    def _read_host(self, plane: Plane, times: ProfileTimes) -> None:
        for line in plane.lines:
            thread = self._thread(line)
            for event in line.events:
                self._add(event, thread, *times.of(line, event))

    def _add(self, event: Event, thread: int, start: int, duration: int) -> None:
        stats = event.stats
        operation = stats.get("hlo_op")
        step = stats.get("step_num")
        if operation is not None:
            inputs = self._arguments.number(str(operation), str(stats.get("hlo_module", "")))
            self._ops.add(False, event.name, thread, start, duration, inputs)
        elif _CALL.match(event.name) and (correlation := _number(stats, "correlation_id", _U32)):
            self._calls.add(event.name, thread, start, duration, correlation)
        elif frame := _FRAME.fullmatch(event.name):
            name = f"{frame[1]}({frame[2]}): {frame[3]}"
            self._frames.setdefault(thread, []).append((start, start + duration, name))
        elif isinstance(step, int) and 0 <= step < _MOST_STEP:
            self._ops.add(True, event.name, thread, start, duration, self._strings.add(f'"{STEP_NUMBER}":{step}'))
        else:
            self._ops.add(not _RUNTIME.search(event.name), event.name, thread, start, duration, NO_STRING)

    def _thread(self, line: ProfileLine) -> int:
        known = self._known.get(line.name)
        if known is not None:
            return known
        key = f"{line.name}\0{line.number}"
        if key not in self._threads:
            self._threads[key] = FIRST_THREAD + min(len(self._threads), _MOST_THREADS)
            self._names[self._threads[key]] = line.name.partition("/")[0]
        return self._threads[key]


def _wanted(_plane: str, name: str) -> bool:
    return bool(name) and not name.startswith(_UNWANTED)


def _known_threads(found: Any) -> dict[str, int]:
    """Returns the id of each thread whose name is unique."""
    if not isinstance(found, dict):
        return {}
    return {
        str(name): ids[0]
        for name, ids in found.items()
        if isinstance(ids, list) and len(ids) == 1 and isinstance(ids[0], int) and 0 < ids[0] < FIRST_THREAD
    }


class _Ops:
    """The columns of both tables of ops."""

    def __init__(self) -> None:
        self._user: list[bool] = []
        self._name: list[str] = []
        self._thread: list[int] = []
        self._start: list[int] = []
        self._duration: list[int] = []
        self._inputs: list[int] = []

    def add(self, user: bool, name: str, thread: int, start: int, duration: int, inputs: int) -> None:
        self._user.append(user)
        self._name.append(name)
        self._thread.append(thread)
        self._start.append(start)
        self._duration.append(duration)
        self._inputs.append(inputs)

    def tables(self, strings: StringTable) -> dict[str, Table]:
        """Returns both tables; ops are numbered in the order of their starts, outer ones first."""
        count = len(self._name)
        columns = {
            **_on_thread(strings, self._name, self._thread, self._start, self._duration),
            "inputs": np.array(self._inputs, np.int32),
            "sequence": np.full(count, NO_SEQUENCE, np.int64),
            "finished": np.ones(count, np.uint8),
        }
        order = np.lexsort((-columns["duration"], columns["start"]))
        columns = {name: column[order] for name, column in columns.items()}
        columns["id"] = np.arange(1, count + 1)
        user = np.array(self._user, np.bool_)[order]
        columns["scope"] = np.where(user, SCOPE_USER, 0)
        return {
            kind: make_table(
                kind, int(np.count_nonzero(chosen)), {name: each[chosen] for name, each in columns.items()}
            )
            for kind, chosen in (("cpu_op", ~user), ("user_annotation", user))
        }


def _on_thread(
    strings: StringTable, name: Sequence[str], thread: Sequence[int], start: Sequence[int], duration: Sequence[int]
) -> dict[str, AnyArray]:
    """Returns the columns that all rows of the host have."""
    return {
        "start": np.array(start, np.int64),
        "duration": np.array(duration, np.int64),
        "name": strings.add_all(list(name)),
        "thread": np.array(thread, np.uint32),
    }


class _Calls:
    """The columns of both tables of calls."""

    def __init__(self) -> None:
        self._rows: dict[str, list[tuple[str, int, int, int, int]]] = {}

    def add(self, name: str, thread: int, start: int, duration: int, correlation: int) -> None:
        kind = "cuda_driver" if name.startswith("cu") and not name.startswith("cuda") else "cuda_runtime"
        self._rows.setdefault(kind, []).append((name, thread, start, duration, correlation))

    def tables(self, strings: StringTable) -> dict[str, Table]:
        """Returns the tables that have rows, in the order of their starts."""
        found = {}
        for kind, rows in self._rows.items():
            name, thread, start, duration, correlation = zip(*sorted(rows, key=lambda row: row[2]), strict=True)
            columns = {
                **_on_thread(strings, name, thread, start, duration),
                "correlation": np.array(correlation, np.uint32),
            }
            found[kind] = make_table(kind, len(rows), columns)
        return found


def _python(frames: Mapping[int, list[tuple[int, int, str]]], strings: StringTable) -> dict[str, Table]:
    """Returns the calls of Python functions by thread, callers first, without those of the profiler itself."""
    rows: list[tuple[str, int, int, int, int, int]] = []  # name, thread, start, duration, parent, depth
    for number, calls in sorted(frames.items()):
        open_calls: list[tuple[int, int]] = []  # row and end
        profiled = 0  # until then, the profiler itself runs
        for begin, end, text in sorted(calls, key=lambda call: (call[0], -call[1])):
            if _PROFILING.search(text):
                profiled = max(profiled, end)
            if begin < profiled:
                continue
            while open_calls and open_calls[-1][1] <= begin:
                open_calls.pop()
            parent = open_calls[-1][0] if open_calls else NO_ROW
            rows.append((text, number, begin, end - begin, parent, len(open_calls)))
            open_calls.append((len(rows) - 1, end))
    if not rows:
        return {}
    name, thread, start, duration, above, depth = zip(*rows, strict=True)
    columns = {
        **_on_thread(strings, name, thread, start, duration),
        "parent": np.array(above, np.int32),
        "depth": np.array(depth, np.int32),
        **{column: np.full(len(rows), missing, np.int32) for column, missing in _NO_SAMPLES.items()},
    }
    return {"python_function": make_table("python_function", len(rows), columns)}


# Decodes the planes of devices in XLA's profiles: the work there, with its stream and HLO operation.
# Lines that are streams ("Stream #14(Compute,MemcpyH2D)") or hold operations ("XLA Ops") contain work: copies and fills
# by their names, everything else is a kernel. An event has its own data: correlation, graph and launch shape on a GPU,
# "hlo_op" and "hlo_module", the path of the JAX operation and its line in the program. Lines of steps and modules have
# ranges around that (gpu_user_annotation). Other lines repeat the same rows in other words and are dropped.
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
