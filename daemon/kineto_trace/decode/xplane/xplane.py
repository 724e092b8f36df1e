"""Decodes XLA's profiles ("xplane/1") into the tables cpu_op, user_annotation, kernel, gpu_memcpy, … of a trace.

Theory of operation
    A source holds one profile for each piece of the recording, each an XSpace behind its length. Of a profile's planes:

    /host:CPU     A line per thread. An event with an "hlo_op" is an HLO operation that ran on the CPU (cpu_op). One
                  with "step_num" is a StepTraceAnnotation of the program (user_annotation, which keeps the number as
                  an argument). Everything else is a range that somebody marked with a TraceMe: XLA's and JAX's own
                  (C++ names, and those of _RUNTIME) are operations of the runtime (cpu_op), the rest is taken to be
                  the program's (user_annotation). XLA does not say which is which.
    /device:…     device_planes.py.
    Task Environment   When the profile began (Unix ns). Times of lines are after that, or Unix, too.

Threads
    XLA numbers threads by a hash of its own, and names a line after the thread: "python", or "tf_XLAEigen/…" for those
    that XLA made. If exactly one Python thread of the process has that name, the line is that thread. All others get
    numbers from FIRST_THREAD on, above every real thread's, by line.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
from kineto_agent.protocol.records import SCOPE_USER, XPLANE_FORMAT

from kineto_trace.decode.decoded import EVERYTHING, Decoded, DecodeWindow
from kineto_trace.decode.xplane.device_planes import DevicePlanes
from kineto_trace.decode.xplane.hlo_arguments import HloArguments
from kineto_trace.decode.xplane.parts import parts
from kineto_trace.decode.xplane.profile_times import ProfileTimes
from kineto_trace.decode.xplane.protobuf import Damaged
from kineto_trace.decode.xplane.xspace import Event, Plane, ProfileLine, planes
from kineto_trace.model.activity_tables import STEP_NUMBER
from kineto_trace.model.trace import NO_SEQUENCE, NO_STRING, OP_TABLES, StringTable, Table, make_table
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
_MOST_STEP = 2**53  # as in iterations.py


def decode(source: RawSource, strings: StringTable, _window: DecodeWindow = EVERYTHING) -> Decoded:
    """Decodes all profiles of a source; names and arguments go into `strings`."""
    data = b"".join(bytes(source.data[chunk.offset : chunk.offset + chunk.size]) for chunk in source.chunks)
    reader = Profiles(strings, source.metadata)
    damaged = 0
    for part in parts(data):
        try:
            reader.read(part)
        except Damaged:
            damaged += 1
    return reader.decoded(damaged)


class Profiles:
    """Collects the rows of profiles. metadata: of the source; `threads` has ids of Python threads by name.

    process_id: of the process, as the profile says; 0: it does not.
    """

    def __init__(self, strings: StringTable, metadata: Mapping[str, Any]) -> None:
        self._strings = strings
        self._metadata = metadata
        self._arguments = HloArguments(strings)
        self._ops = _Ops()
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
            for plane in planes(data, _nothing_wanted):
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
        """Returns everything that was read. damaged: how many profiles broke off."""
        tables = {**self._ops.tables(self._strings), **self._devices.tables()}
        wanted = self._metadata.get("activity_types")
        if isinstance(wanted, list):
            unwanted = (set(OP_TABLES) | {"kernel"}) - set(map(str, wanted))
            tables = {kind: table for kind, table in tables.items() if kind not in unwanted}
        warnings = []
        if damaged:
            warnings.append(f"{damaged} of XLA's profiles are truncated or damaged")
        if self._undated:
            warnings.append(f"when {self._undated} of XLA's profiles began is not known: their times count from there")
        if self._arguments.full:
            warnings.append("some HLO operations have no arguments: there are too many different ones")
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


def _nothing_wanted(_plane: str, _name: str) -> bool:
    return False


def _wanted(_plane: str, name: str) -> bool:
    return bool(name) and not name.startswith(_UNWANTED)


def _known_threads(found: Any) -> dict[str, int]:
    """Returns the id of each thread whose name no other one has."""
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
        """Returns both tables; ops are numbered in the order of their starts, those around others first."""
        count = len(self._name)
        columns: dict[str, npt.NDArray[Any]] = {
            "start": np.array(self._start, np.int64),
            "duration": np.array(self._duration, np.int64),
            "name": strings.add_all(self._name),
            "thread": np.array(self._thread, np.uint32),
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
