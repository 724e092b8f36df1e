"""Decodes rocprofiler-sdk's records and the HIP calls that our collector records, by a schema shared by both sides.

Theory of operation
    The declared schema finds the records, converts CLOCK_BOOTTIME with the samples that came along, and makes the
    columns. What remains:

    versions  Records contain their own sizes. A record whose size is not one of those known for its kind is not
              decoded, and a version whose records are unknown is refused, rather than read wrongly.
    kernels   rocprofiler reports the name of a kernel id when the kernel's code is loaded. Kernels that were loaded
              before any client listened have the id 0, and those that were only reported to another client have an id
              without a name. The call that launched such a kernel knows its name: both have the same correlation id.
              The name of an id holds for its other dispatches; the id 0 has no single name.
    streams   A dispatch knows its HSA queue, which several HIP streams share. The call with the same correlation id
              knows the stream. Streams are numbered in the order of their first use, the null stream is 0; queues of
              work without a known call are numbered from FIRST_QUEUE on.
    devices   rocprofiler's agents have ordinals among the GPUs, before HIP_VISIBLE_DEVICES, as Kineto uses them.
    blocks    HSA's grids count work-items.

The schema of "rocprofiler/1": rocprofiler-sdk's records and the calls that our collector records beside them.

The kinds of rocprofiler's records are its own numbers; those of calls, and the spaces of the string table, are those of
agent/native/rocprofiler/hip_calls.h and rocprofiler_vendor.h. What a schema cannot express (names of kernels, streams,
devices, blocks) is in rocprofiler_records.py, which fills the columns that are missing here.

HIP's calls are in Kineto's table "cuda_runtime" under this very name: Kineto uses it for them, too, in traces of AMD's
GPUs. HSA is the layer below, as the driver is CUDA's: its calls are "cuda_driver".
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from kineto_agent.protocol.records import ROCPROFILER_FORMAT
from kineto_agent.protocol.schema import (
    BOOTTIME,
    DEVICE_TRACK,
    HEADED,
    THREAD_TRACK,
    Activity,
    Col,
    Record,
    Schema,
    Texts,
)

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.base.array_types import Flags, Ints, Ints32, UInts32, UInts64
from kineto_trace.decode.activity_names import demangle
from kineto_trace.decode.declared_records import decode_records
from kineto_trace.decode.decoded import EVERYTHING, Decoded, DecodeWindow
from kineto_trace.decode.record_set import RecordSet, Rows
from kineto_trace.decode.rocprofiler_layouts import RECORDS, RELEASES
from kineto_trace.errors import UnknownRocprofilerError
from kineto_trace.model.trace import UNKNOWN_STREAM, StringTable
from kineto_trace.spool.raw_records import RawSource

FORMAT = ROCPROFILER_FORMAT
FIRST_QUEUE = 1000  # first number of queues, among the numbers of streams
OLD_KERNEL = "kernel loaded before the capture"
_COPY_NAMES = {
    1: "Memcpy HtoH (Host -> Host)", 2: "Memcpy HtoD (Host -> Device)", 3: "Memcpy DtoH (Device -> Host)",
    4: "Memcpy DtoD (Device -> Device)",
}  # fmt: skip
_COPY_KINDS = {1: 9, 2: 1, 3: 2, 4: 8}  # rocprofiler's operation -> CUPTI's number, which the table has
_PEER_COPY = 10
_DEVICE_MEMORY = 3
_SAME_STREAM = {1: 0}  # hipStreamLegacy is the null stream
_UNSIGNED = np.uint64
Words = UInts64
HSA_CORE, HSA_AMD_EXT, MEMORY_COPY, KERNEL_DISPATCH, SCRATCH_MEMORY, MEMORY_ALLOCATION = 1, 2, 10, 11, 12, 16
HIP_RUNTIME_CALL, HIP_COMPILER_CALL = 60, 61
CALL_KINDS = (HIP_RUNTIME_CALL, HIP_COMPILER_CALL, HSA_CORE, HSA_AMD_EXT)
SPACE_KERNEL, SPACE_FUNCTION, SPACE_OPERATION = 16, 17, 18
_CODES = {
    "size": "Q", "kind": "i", "operation": "i", "correlation_id.internal": "Q", "thread_id": "Q",
    "start_timestamp": "Q", "end_timestamp": "Q", "dst_agent_id": "Q", "src_agent_id": "Q", "bytes": "Q",
    "dispatch_info.agent_id": "Q", "dispatch_info.queue_id": "Q", "dispatch_info.kernel_id": "Q",
    "dispatch_info.private_segment_size": "I", "dispatch_info.group_segment_size": "I",
    "dispatch_info.workgroup_size.x": "I", "dispatch_info.workgroup_size.y": "I", "dispatch_info.workgroup_size.z": "I",
    "dispatch_info.grid_size.x": "I", "dispatch_info.grid_size.y": "I", "dispatch_info.grid_size.z": "I",
    "agent_id": "Q", "queue_id": "Q", "flags": "I", "allocation_size": "Q", "address": "Q",
}  # fmt: skip
_SHORT = {
    "correlation_id.internal": "correlation", "thread_id": "thread", "start_timestamp": "start", "end_timestamp": "end",
    "dst_agent_id": "destination", "src_agent_id": "source", "agent_id": "agent", "queue_id": "queue",
    "workgroup_size.x": "block_x", "workgroup_size.y": "block_y", "workgroup_size.z": "block_z",
    "grid_size.x": "items_x", "grid_size.y": "items_y", "grid_size.z": "items_z",
    "private_segment_size": "private_bytes", "group_segment_size": "group_bytes", "allocation_size": "bytes",
}  # fmt: skip
_HIP_CALL = Record(
    "cuda_runtime",
    48,
    {
        "start": ("Q", 0), "end": ("Q", 8), "correlation": ("Q", 16), "stream": ("Q", 24), "function": ("Q", 32),
        "thread": ("I", 40), "operation": ("I", 44),
    },
    texts=Texts(otherwise="?"),
    correlation="correlation",
    thread="thread",
)  # fmt: skip
_ALLOCATIONS = {1: "Allocate", 2: "Allocate virtual memory", 3: "Free", 4: "Free virtual memory"}
_SCRATCH = {1: "Scratch allocated", 2: "Scratch freed", 3: "Scratch reclaimed"}


class _Calls(NamedTuple):
    """HIP's calls in the order of their correlation ids."""

    correlation: Words
    stream: Words
    function: Words

    def find(self, correlation: Words) -> tuple[Ints, Flags]:
        """Returns the place of the call with each of these ids, and which of them exist."""
        if not len(self.correlation):
            return np.zeros(len(correlation), np.int64), np.zeros(len(correlation), np.bool_)
        at = np.minimum(np.searchsorted(self.correlation, correlation), len(self.correlation) - 1)
        return at, (self.correlation[at] == correlation) & (correlation != 0)


class _Amendment:
    """Fills what a schema cannot express, for the records of one source."""

    def __init__(self, source: RawSource) -> None:
        self._source = source
        self._ordinals = _ordinals_of(source.metadata.get("agents"))

    def apply(self, found: RecordSet) -> None:
        """Changes the columns of all kinds of records."""
        for kind, layout in RECORDS.items():
            _leave_out_unknown_sizes(found, found.rows[kind], layout.sizes)
        for kind in CALL_KINDS:
            self._name_calls(found, found.rows[kind])
        calls = _calls_of(found.rows[HIP_RUNTIME_CALL])
        dispatches, copies = found.rows[KERNEL_DISPATCH], found.rows[MEMORY_COPY]
        _add_agents(self._ordinals, dispatches.field("agent"))
        self._fill_kernels(found, dispatches, calls)
        self._fill_copies(found, copies)
        _fill_streams((dispatches, copies, found.rows[SCRATCH_MEMORY]), calls)
        for kind in (SCRATCH_MEMORY, MEMORY_ALLOCATION):
            rows = found.rows[kind]
            rows.columns["device"] = self._device(rows.field("agent"))
        for rows in found.typed():
            rows.columns["correlation"] = rows.columns["correlation"].astype(np.uint32)  # the low half: they ascend

    def _device(self, agent: Words) -> UInts32:
        """Returns the ordinal of each agent among the GPUs; UNKNOWN_STREAM (all bits set) for others."""
        return _translate(agent, lambda value: self._ordinals.get(value, UNKNOWN_STREAM)).astype(np.uint32)

    def _name_calls(self, found: RecordSet, rows: Rows) -> None:
        texts = self._source.strings.get(SPACE_OPERATION, {})
        what = "HSA call" if rows.kind in (HSA_CORE, HSA_AMD_EXT) else "HIP call"

        def number(operation: int) -> int:
            text = texts.get(rows.kind << 32 | operation)
            return found.strings.add(f"{what} {operation}" if text is None else text.decode("utf-8", "replace"))

        operations = rows.field("operation").astype(np.uint32).astype(_UNSIGNED)
        rows.columns["name"] = _translate(operations, number).astype(np.int32)

    def _fill_kernels(self, found: RecordSet, rows: Rows, calls: _Calls) -> None:
        for axis in "xyz":
            block, items = rows.field(f"block_{axis}"), rows.field(f"items_{axis}")
            rows.columns[f"block_{axis}"] = block.astype(np.int32)
            rows.columns[f"grid_{axis}"] = (-(-items.astype(np.int64) // np.maximum(block, 1))).astype(np.int32)
        rows.columns["dynamic_shared_memory"] = rows.field("group_bytes").astype(np.int32)  # static and dynamic
        rows.columns["device"] = self._device(rows.field("agent"))
        rows.columns["name"] = self._kernel_names(found, rows, calls)

    def _kernel_names(self, found: RecordSet, rows: Rows, calls: _Calls) -> Ints32:
        by_id = self._source.strings.get(SPACE_KERNEL, {})
        by_function = self._source.strings.get(SPACE_FUNCTION, {})
        identity = rows.field("kernel_id")
        at, has_call = calls.find(rows.field("correlation"))
        function = np.where(has_call, calls.function[at] if len(calls.function) else 0, 0).astype(_UNSIGNED)
        learned = _learn(identity, function)

        def named_by_id(value: int) -> int:
            text = by_id.get(value) if value else None
            text = by_function.get(learned.get(value, 0)) if text is None else text
            return -1 if text is None else found.strings.add(kernel_name(text))

        def named_by_function(value: int) -> int:
            text = by_function.get(value)
            return -1 if text is None else found.strings.add(kernel_name(text))

        names = _translate(identity, named_by_id)
        unnamed = names < 0
        names[unnamed] = _translate(function[unnamed], named_by_function)
        unnamed = names < 0
        names[unnamed] = _translate(
            identity[unnamed], lambda value: found.strings.add(f"kernel #{value}" if value else OLD_KERNEL)
        )
        return names.astype(np.int32)

    def _fill_copies(self, found: RecordSet, rows: Rows) -> None:
        operation = rows.field("operation").astype(np.uint32).astype(_UNSIGNED)
        source, destination = self._device(rows.field("source")), self._device(rows.field("destination"))
        on_source, on_destination = source != UNKNOWN_STREAM, destination != UNKNOWN_STREAM
        peer = on_source & on_destination & (source != destination)
        kind = _translate(operation, lambda value: _COPY_KINDS.get(value, 0))
        columns = rows.columns
        columns["device"] = np.where(on_destination, destination, np.where(on_source, source, 0)).astype(np.uint32)
        columns["copy_kind"] = np.where(peer, _PEER_COPY, kind)
        columns["src_kind"] = np.where(on_source, _DEVICE_MEMORY, 0)
        columns["dst_kind"] = np.where(on_destination, _DEVICE_MEMORY, 0)
        columns["peer"] = peer.astype(np.uint8)
        columns["src_device"] = np.where(peer, source, 0)
        columns["dst_device"] = np.where(peer, destination, 0)
        columns["name"] = _translate(
            operation, lambda value: found.strings.add(_COPY_NAMES.get(value, f"Memcpy, operation {value}"))
        ).astype(np.int32)


def decode(source: RawSource, strings: StringTable, window: DecodeWindow = EVERYTHING) -> Decoded:
    """Decodes all buffers of a source. Raises UnknownRocprofilerError."""
    version_of(source)
    found = decode_records(source, SCHEMA, strings, window, _Amendment(source).apply)
    wanted = source.metadata.get("activity_types")
    if isinstance(wanted, list) and "cuda_runtime" not in wanted:  # recorded for names and streams only
        tables = {name: table for name, table in found.tables.items() if name != "cuda_runtime"}
        return replace(found, tables=tables)
    return found


def version_of(source: RawSource) -> int:
    """Returns 10000 * major + 100 * minor + patch. Raises UnknownRocprofilerError if its records are unknown."""
    version = source.metadata.get("rocprofiler_version")
    if not isinstance(version, int) or (version // 10000, version // 100 % 100) not in RELEASES:
        known = ", ".join(f"{major}.{minor}" for major, minor in RELEASES)
        raise UnknownRocprofilerError(
            f"the target's rocprofiler-sdk has version {version!r}, which this kinetod does not support (it supports "
            f"{known}): update kinetod, or use a ROCm release with one of these versions in the target"
        )
    return version


def kernel_name(text: bytes) -> str:
    """Returns the name of a kernel as people write it: without the ".kd" of its descriptor, and demangled."""
    return demangle(text.removesuffix(b".kd"))


def _translate(values: Words, translate: Callable[[int], int]) -> Ints:
    """Returns the translation of each value; each distinct one is translated once."""
    known, codes = np.unique(values, return_inverse=True)
    return np.array([translate(value) for value in known.tolist()], np.int64).take(codes)


def _ordinals_of(agents: Any) -> dict[int, int]:
    """Returns the ordinals of the GPUs by their agent ids, from the agents that the target reported."""
    found: dict[int, int] = {}
    for agent in agents if isinstance(agents, list) else ():
        if isinstance(agent, dict) and agent.get("gpu"):
            identity, ordinal = agent.get("id"), agent.get("ordinal")
            if type(identity) is int and type(ordinal) is int and 0 <= ordinal < UNKNOWN_STREAM:
                found[identity] = ordinal
    return found


def _add_agents(ordinals: dict[int, int], agents: Words) -> None:
    """Gives the next ordinals to agents that run kernels, and hence are GPUs, but were not reported by the target."""
    for agent in unique_values(agents).tolist():
        ordinals.setdefault(agent, max(ordinals.values(), default=-1) + 1)


def _leave_out_unknown_sizes(found: RecordSet, rows: Rows, sizes: tuple[int, ...]) -> None:
    size = rows.field("size")
    known = np.isin(size, sizes)
    if not known.all():
        strange = int(size[~known][0])
        found.lose(
            int(np.count_nonzero(~known)),
            f"of kind {rows.kind} that state a size of {strange} bytes instead of {' or '.join(map(str, sizes))}",
        )
        rows.keep(known)


def _calls_of(rows: Rows) -> _Calls:
    correlation = rows.field("correlation")
    order = np.argsort(correlation, kind="stable")
    return _Calls(correlation[order], rows.field("stream")[order], rows.field("function")[order])


def _learn(identity: Words, function: Words) -> dict[int, int]:
    """Returns the function that launched each kernel id, if all its launches agree."""
    told = (identity != 0) & (function != 0)
    pairs = np.unique(np.stack([identity[told], function[told]], axis=1), axis=0)
    ids, counts = np.unique(pairs[:, 0], return_counts=True)
    certain = set(ids[counts == 1].tolist())
    return {int(key): int(value) for key, value in pairs.tolist() if key in certain}


def _fill_streams(all_rows: tuple[Rows, ...], calls: _Calls) -> None:
    """Adds the column stream: of the call that caused the work, else of its queue."""
    streams: dict[int, int] = {0: 0, **_SAME_STREAM}
    queues: dict[int, int] = {}
    for rows in all_rows:
        at, has_call = calls.find(rows.field("correlation"))
        handle = np.where(has_call, calls.stream[at] if len(calls.stream) else 0, 0).astype(_UNSIGNED)
        queue = rows.field("queue") if "queue" in rows.record.fields else np.zeros(len(rows), _UNSIGNED)
        _number(streams, handle[has_call], rows.columns["start"][has_call], len(streams) - len(_SAME_STREAM))
        _number(queues, queue[~has_call], rows.columns["start"][~has_call], FIRST_QUEUE + len(queues))
        number = np.empty(len(rows), np.int64)
        number[has_call] = _translate(handle[has_call], streams.__getitem__)
        number[~has_call] = _translate(queue[~has_call], queues.__getitem__)
        rows.columns["stream"] = number.astype(np.uint32)


def _number(known: dict[int, int], values: Words, starts: Ints, following: int) -> None:
    """Numbers the unknown values in the order of their first start."""
    order = np.argsort(starts, kind="stable")
    distinct, first = np.unique(values[order], return_index=True)
    for value in distinct[np.argsort(first)].tolist():
        if value not in known:
            known[value] = following
            following += 1


def _fields(kind: int) -> dict[str, tuple[str, int]]:
    """Returns the fields of one of rocprofiler's records that we read, by shorter names."""
    found = {}
    for name, offset in RECORDS[kind].offsets.items():
        if name in _CODES:
            short = name.removeprefix("dispatch_info.")
            found[_SHORT.get(short, short)] = (_CODES[name], offset)
    return found


def _record(kind: int, activity: str, *, thread: bool = False, otherwise: str = "?") -> Record:
    return Record(
        activity,
        min(RECORDS[kind].sizes),
        _fields(kind),
        texts=Texts(otherwise=otherwise),
        correlation="correlation",
        thread="thread" if thread else "",
    )


SCHEMA = Schema(
    name="rocm",
    framing=HEADED,
    clock=BOOTTIME,
    types={
        "kernel": Activity(),
        "gpu_memcpy": Activity(columns=(Col("bytes"),)),
        "cuda_runtime": Activity(columns=(Col("cbid", field="operation"),)),
        "cuda_driver": Activity(columns=(Col("cbid", field="operation"),)),
        "rocm_memory": Activity(
            track=THREAD_TRACK,
            meaning="Device and host memory that HSA allocates and frees.",
            columns=(
                Col("bytes", "u64", "bytes allocated; 0 when memory is freed"),
                Col("address", "u64", "start address of the memory"),
                Col("device", "u32", "GPU that the memory is on; 4294967295: the host, or unknown"),
            ),
        ),
        "rocm_scratch": Activity(
            track=DEVICE_TRACK,
            meaning="Scratch memory of a queue, into which kernels spill registers.",
            columns=(
                Col("bytes", "u64", "bytes allocated"),
                Col("flags", "u32", "rocprofiler_scratch_alloc_flag_t: 1 for one dispatch only, 2 alternating"),
            ),
        ),
    },
    records={
        HSA_CORE: _record(HSA_CORE, "cuda_driver", thread=True),
        HSA_AMD_EXT: _record(HSA_AMD_EXT, "cuda_driver", thread=True),
        MEMORY_COPY: _record(MEMORY_COPY, "gpu_memcpy"),
        KERNEL_DISPATCH: _record(KERNEL_DISPATCH, "kernel"),
        SCRATCH_MEMORY: _record(SCRATCH_MEMORY, "rocm_scratch")._replace(
            name="operation", texts=Texts(values=_SCRATCH, otherwise="Scratch memory, operation {}")
        ),
        MEMORY_ALLOCATION: _record(MEMORY_ALLOCATION, "rocm_memory", thread=True)._replace(
            name="operation", texts=Texts(values=_ALLOCATIONS, otherwise="Memory, operation {}")
        ),
        HIP_RUNTIME_CALL: _HIP_CALL,
        HIP_COMPILER_CALL: _HIP_CALL,
    },
)
