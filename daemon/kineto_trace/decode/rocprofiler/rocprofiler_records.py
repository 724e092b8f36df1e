"""Decodes raw records of rocprofiler-sdk and of HIP's calls ("rocprofiler/1") into columns.

Theory of operation
    The declared schema (rocm_schema.py) does what it can: it finds the records, converts CLOCK_BOOTTIME with the
    samples that came along, and makes the columns. What remains:

    versions  Records bear their own sizes. A record whose size is not one of those known for its kind is not decoded,
              and a version whose records are unknown is refused, rather than read wrongly.
    kernels   rocprofiler tells the name of a kernel id when the kernel's code is loaded. Kernels that were loaded
              before anybody listened have the id 0, and those that only another client was told of have an id without a
              name. The call that launched such a kernel knows its name: both have the same correlation id. What is
              learned of an id holds for its other dispatches; of the id 0 nothing can be learned.
    streams   A dispatch knows its HSA queue, which several HIP streams share. The call with the same correlation id
              knows the stream. Streams are numbered in the order of their first use, the null stream is 0; queues of
              work whose call is not known are numbered from FIRST_QUEUE on.
    devices   rocprofiler's agents have ordinals among the GPUs, before HIP_VISIBLE_DEVICES, as Kineto uses them.
    blocks    HSA's grids count work-items.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from kineto_agent.protocol.records import ROCPROFILER_FORMAT

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.decode.activity_names import demangle
from kineto_trace.decode.declared.declared_records import decode_records
from kineto_trace.decode.declared.record_set import RecordSet, Rows
from kineto_trace.decode.decoded import EVERYTHING, Decoded, DecodeWindow
from kineto_trace.decode.rocprofiler import rocm_schema as kinds
from kineto_trace.decode.rocprofiler.rocprofiler_layouts import RECORDS, RELEASES
from kineto_trace.errors import UnknownRocprofilerError
from kineto_trace.model.trace import UNKNOWN_STREAM, StringTable
from kineto_trace.spool.raw_records import RawSource

FORMAT = ROCPROFILER_FORMAT
FIRST_QUEUE = 1000  # of the numbers of queues among those of streams
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

Words = npt.NDArray[np.uint64]


def decode(source: RawSource, strings: StringTable, window: DecodeWindow = EVERYTHING) -> Decoded:
    """Decodes all buffers of a source. Raises UnknownRocprofilerError."""
    version_of(source)
    found = decode_records(source, kinds.SCHEMA, strings, window, _Amendment(source).apply)
    wanted = source.metadata.get("activity_types")
    if isinstance(wanted, list) and "cuda_runtime" not in wanted:  # recorded for names and streams only
        tables = {name: table for name, table in found.tables.items() if name != "cuda_runtime"}
        return Decoded(
            tables=tables,
            records=found.records,
            undecoded=found.undecoded,
            warnings=found.warnings,
            metadata=found.metadata,
        )
    return found


def version_of(source: RawSource) -> int:
    """Returns 10000 * major + 100 * minor + patch. Raises UnknownRocprofilerError if its records are unknown."""
    version = source.metadata.get("rocprofiler_version")
    if not isinstance(version, int) or (version // 10000, version // 100 % 100) not in RELEASES:
        known = ", ".join(f"{major}.{minor}" for major, minor in RELEASES)
        raise UnknownRocprofilerError(
            f"the target's rocprofiler-sdk has version {version!r}, whose records are unknown; "
            f"known are those of {known}: update kinetod, or use such a ROCm in the target"
        )
    return version


class _Calls(NamedTuple):
    """HIP's calls in the order of their correlation ids."""

    correlation: Words
    stream: Words
    function: Words

    def find(self, correlation: Words) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Returns the place of the call with each of these ids, and for which there is one."""
        if not len(self.correlation):
            return np.zeros(len(correlation), np.int64), np.zeros(len(correlation), np.bool_)
        at = np.minimum(np.searchsorted(self.correlation, correlation), len(self.correlation) - 1)
        return at, (self.correlation[at] == correlation) & (correlation != 0)


class _Amendment:
    """Fills what no schema can say, for the records of one source."""

    def __init__(self, source: RawSource) -> None:
        self._source = source
        self._ordinals = _ordinals_of(source.metadata.get("agents"))

    def apply(self, found: RecordSet) -> None:
        """Changes the columns of all kinds of records."""
        for kind, layout in RECORDS.items():
            _leave_out_unknown_sizes(found, found.rows[kind], layout.sizes)
        for kind in kinds.CALL_KINDS:
            self._name_calls(found, found.rows[kind])
        calls = _calls_of(found.rows[kinds.HIP_RUNTIME_CALL])
        dispatches, copies = found.rows[kinds.KERNEL_DISPATCH], found.rows[kinds.MEMORY_COPY]
        _add_agents(self._ordinals, dispatches.field("agent"))
        self._fill_kernels(found, dispatches, calls)
        self._fill_copies(found, copies)
        _fill_streams((dispatches, copies, found.rows[kinds.SCRATCH_MEMORY]), calls)
        for kind in (kinds.SCRATCH_MEMORY, kinds.MEMORY_ALLOCATION):
            rows = found.rows[kind]
            rows.columns["device"] = self._device(rows.field("agent"))
        for rows in found.typed():
            rows.columns["correlation"] = rows.columns["correlation"].astype(np.uint32)  # the low half: they ascend

    def _device(self, agent: Words) -> npt.NDArray[np.uint32]:
        """Returns the ordinal of each agent among the GPUs; UNKNOWN_STREAM (all bits set) for others."""
        return _translate(agent, lambda value: self._ordinals.get(value, UNKNOWN_STREAM)).astype(np.uint32)

    def _name_calls(self, found: RecordSet, rows: Rows) -> None:
        texts = self._source.strings.get(kinds.SPACE_OPERATION, {})
        what = "HSA call" if rows.kind in (kinds.HSA_CORE, kinds.HSA_AMD_EXT) else "HIP call"

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

    def _kernel_names(self, found: RecordSet, rows: Rows, calls: _Calls) -> npt.NDArray[np.int32]:
        by_id = self._source.strings.get(kinds.SPACE_KERNEL, {})
        by_function = self._source.strings.get(kinds.SPACE_FUNCTION, {})
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


def kernel_name(text: bytes) -> str:
    """Returns the name of a kernel as people write it: without the ".kd" of its descriptor, and demangled."""
    return demangle(text.removesuffix(b".kd"))


def _translate(values: Words, translate: Callable[[int], int]) -> npt.NDArray[np.int64]:
    """Returns the translation of each value; each distinct one is translated once."""
    known, codes = np.unique(values, return_inverse=True)
    return np.array([translate(value) for value in known.tolist()], np.int64).take(codes)


def _ordinals_of(agents: Any) -> dict[int, int]:
    """Returns the ordinals of the GPUs by their agent ids, of what the target says about its agents."""
    found: dict[int, int] = {}
    for agent in agents if isinstance(agents, list) else ():
        if isinstance(agent, dict) and agent.get("gpu"):
            identity, ordinal = agent.get("id"), agent.get("ordinal")
            if type(identity) is int and type(ordinal) is int and 0 <= ordinal < UNKNOWN_STREAM:
                found[identity] = ordinal
    return found


def _add_agents(ordinals: dict[int, int], agents: Words) -> None:
    """Gives the next ordinals to agents that run kernels, and hence are GPUs, but of which the target said nothing."""
    for agent in unique_values(agents).tolist():
        ordinals.setdefault(agent, max(ordinals.values(), default=-1) + 1)


def _leave_out_unknown_sizes(found: RecordSet, rows: Rows, sizes: tuple[int, ...]) -> None:
    size = rows.field("size")
    known = np.isin(size, sizes)
    if not known.all():
        strange = int(size[~known][0])
        found.lose(
            int(np.count_nonzero(~known)),
            f"of kind {rows.kind} with {strange} bytes by themselves; known are {' and '.join(map(str, sizes))}",
        )
        rows.keep(known)


def _calls_of(rows: Rows) -> _Calls:
    correlation = rows.field("correlation")
    order = np.argsort(correlation, kind="stable")
    return _Calls(correlation[order], rows.field("stream")[order], rows.field("function")[order])


def _learn(identity: Words, function: Words) -> dict[int, int]:
    """Returns the function that each kernel id was launched by, where all its launches agree."""
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


def _number(known: dict[int, int], values: Words, starts: npt.NDArray[np.int64], following: int) -> None:
    """Numbers the values that are not known yet, in the order of their first start."""
    order = np.argsort(starts, kind="stable")
    distinct, first = np.unique(values[order], return_index=True)
    for value in distinct[np.argsort(first)].tolist():
        if value not in known:
            known[value] = following
            following += 1
