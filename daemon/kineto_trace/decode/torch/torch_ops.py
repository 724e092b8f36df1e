"""Decodes operator records ("torch_ops/1") into the tables cpu_op, user_annotation and op_tensor.

Theory of operation
    Each thread of the target writes a record when an operator ends, so children come before their parents. The decoder
    sorts the records by their starts (parents first where starts are equal) and numbers them; the numbers are the ids
    by which launches, tensors and flows refer to ops.

    Names and inputs are hashes of entries in the string table. Entries that never arrived are counted; a name is then
    shown as its hash. An operator that was still running when the recording ended gets an end that encloses everything
    that its thread did, at least up to the window's end.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from kineto_agent.protocol.records import (
    KIND_OP,
    KIND_OP_COMMS,
    KIND_OP_TENSORS,
    OP_COMMS_FIELDS,
    OP_FIELDS,
    OP_TENSORS_FIELDS,
    OP_UNFINISHED,
    SCOPE_USER,
    SPACE_OP_COMMS,
    SPACE_OP_INPUTS,
    SPACE_OP_NAME,
    SPACE_TORCH_THREAD,
    TENSORS_PER_RECORD,
    TORCH_OPS_FORMAT,
)

from kineto_trace.arrays.codec import Interner
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.decode.decoded import EVERYTHING, Decoded, DecodeWindow
from kineto_trace.decode.fixed_records import fixed_records, record_dtype
from kineto_trace.decode.torch.torch_comms import comms_text
from kineto_trace.decode.torch.torch_inputs import UnreadableInputs, inputs_text
from kineto_trace.model.trace import NO_STRING, OP_TABLES, StringTable, Table, make_table
from kineto_trace.spool.raw_records import RawSource

FORMAT = TORCH_OPS_FORMAT
RECORD = record_dtype(OP_FIELDS)
_TENSORS, _COMMS = record_dtype(OP_TENSORS_FIELDS), record_dtype(OP_COMMS_FIELDS)

Ints = npt.NDArray[np.int64]
AnyArray = npt.NDArray[Any]


def decode(source: RawSource, strings: StringTable, window: DecodeWindow = EVERYTHING) -> Decoded:
    """Decodes all buffers of a source; names and inputs go into `strings`."""
    records, cut = fixed_records(source, RECORD)
    kind = records["kind"]
    is_op = kind == KIND_OP
    ops = records if is_op.all() else records[is_op]
    ops = ops[_by_start(ops["start"])]  # sorts whole records: one cache line each
    warnings: list[str] = []
    columns = _columns(ops, window.end_ns)
    columns["torch_thread"] = _torch_threads(columns["thread"], source.strings.get(SPACE_TORCH_THREAD, {}))
    columns["name"] = _names(ops["name"], source, strings, warnings)
    columns["inputs"] = _inputs(ops["inputs"], source, strings, warnings)
    index = _Index(ops)
    tensors, lost = _tensor_table(records[kind == KIND_OP_TENSORS].view(_TENSORS), index)
    lost += _describe_collectives(
        records[kind == KIND_OP_COMMS].view(_COMMS), index, columns["inputs"], source, strings, warnings
    )
    user = columns["scope"] == SCOPE_USER
    tables = {"cpu_op": _table("cpu_op", columns, ~user), "user_annotation": _table("user_annotation", columns, user)}
    if len(tensors):
        tables["op_tensor"] = tensors
    wanted = source.metadata.get("activity_types")
    if isinstance(wanted, list):
        for unwanted in set(OP_TABLES) - set(map(str, wanted)):
            del tables[unwanted]
    if source.dropped:  # an op is written when it ends, what describes it before: those ops are among the dropped
        lost = 0
    unknown = int(np.count_nonzero(kind > KIND_OP_COMMS))
    return Decoded(tables=tables, records=len(records), undecoded=cut + unknown + lost, warnings=tuple(warnings))


def _by_start(start: Ints) -> Ints:
    """Returns the order by start. Children's records precede their parents', so equal starts are reversed."""
    backwards = np.argsort(start[::-1], kind="stable")
    order: Ints = len(start) - 1 - backwards
    return order


def _columns(ops: AnyArray, window_end_ns: int) -> dict[str, AnyArray]:
    """Returns the columns that come from the records, and the ops' numbers."""
    names = ("start", "end", "sequence", "forward_thread", "thread", "scope", "flags")
    columns: dict[str, AnyArray] = {name: np.ascontiguousarray(ops[name]) for name in names}
    end, flags = columns.pop("end"), columns.pop("flags")
    running = (flags & OP_UNFINISHED != 0) | (end <= 0)
    if running.any():
        end = _ended(columns["thread"], columns["start"], end, running, window_end_ns)
    columns["duration"] = np.maximum(end - columns["start"], 0)
    columns["finished"] = ~running
    columns["id"] = np.arange(1, len(ops) + 1)
    return columns


def _ended(thread: AnyArray, start: Ints, end: Ints, running: npt.NDArray[np.bool_], window_end_ns: int) -> Ints:
    """Returns the ends; a running op gets the latest end on its thread, at least window_end_ns."""
    ended = np.where(running, np.maximum(start, window_end_ns), end)
    for number in unique_values(thread[running]).tolist():
        own = thread == number
        ended[own & running] = ended[own].max()
    return ended


def _torch_threads(thread: AnyArray, numbers: Mapping[int, bytes]) -> npt.NDArray[np.uint32]:
    """Returns torch's own number of each row's thread; 0 if it is unknown."""
    threads = Interner()
    places = threads.intern(thread.astype(np.uint64))
    known = [int.from_bytes(numbers.get(tid, b"")[:4], "little") for tid in threads.keys().tolist()]
    result: npt.NDArray[np.uint32] = np.array(known, np.uint32)[places]
    return result


def _names(hashes: AnyArray, source: RawSource, strings: StringTable, warnings: list[str]) -> npt.NDArray[np.int32]:
    """Returns the number of each row's name."""
    interner = Interner()
    numbers = interner.intern(hashes)
    known = source.strings.get(SPACE_OP_NAME, {})
    keys = interner.keys().tolist()
    texts = [
        known[key].decode("utf-8", "replace") if key in known else f"op with unknown name {key:#018x}" for key in keys
    ]
    missing = np.array([key not in known for key in keys], np.bool_)
    if missing.any():
        count = int(np.count_nonzero(missing[numbers]))
        warnings.append(f"{count} ops have no name: it could not be stored when they ran")
    return strings.add_all(texts)[numbers]


def _dtypes(source: RawSource) -> list[str]:
    """Returns the names of tensor types by torch's numbers."""
    names = source.metadata.get("dtypes")
    return [str(name) for name in names] if isinstance(names, list) else []


def _inputs(hashes: AnyArray, source: RawSource, strings: StringTable, warnings: list[str]) -> npt.NDArray[np.int32]:
    """Returns the number of each row's inputs as JSON arguments; NO_STRING if none were recorded."""
    known = source.strings.get(SPACE_OP_INPUTS, {})
    if not known and not hashes.any():
        return np.full(len(hashes), NO_STRING, np.int32)
    dtypes = _dtypes(source)
    interner = Interner()
    numbers = interner.intern(hashes)
    keys = interner.keys().tolist()
    texts: list[int] = []
    missing = np.zeros(len(keys), np.bool_)
    unreadable = 0
    for place, key in enumerate(keys):
        number = NO_STRING
        try:
            if key in known:
                text = inputs_text(known[key], dtypes)
                number = strings.add(text) if text else NO_STRING
            elif key:
                missing[place] = True
        except UnreadableInputs:
            unreadable += 1
        texts.append(number)
    if missing.any():
        count = int(np.count_nonzero(missing[numbers]))
        warnings.append(f"{count} ops have no inputs: they could not be stored when they ran")
    if unreadable:
        warnings.append(f"{unreadable} descriptions of inputs could not be read")
    return np.array(texts, np.int32)[numbers]


class _Index:
    """Finds the row of an op by its thread and its number within the thread."""

    def __init__(self, ops: AnyArray) -> None:
        self._key = _key(ops)
        self._order = np.argsort(self._key, kind="stable")

    def find(self, records: AnyArray) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Returns the row of each record's op, and whether that op exists."""
        wanted = _key(records)
        if not len(self._key):
            return np.zeros(len(wanted), np.int64), np.zeros(len(wanted), np.bool_)
        at = np.searchsorted(self._key, wanted, sorter=self._order)
        place: Ints = self._order[np.minimum(at, len(self._key) - 1)]
        return place, self._key[place] == wanted


def _tensor_table(tensors: AnyArray, index: _Index) -> tuple[Table, int]:
    """Returns a table with one row per tensor, and the number of records whose op does not exist."""
    if not len(tensors):
        return make_table("op_tensor", 0, {}), 0
    place, known = index.find(tensors)
    tensors, place = tensors[known], place[known]
    count = np.minimum(tensors["count"], TENSORS_PER_RECORD).astype(np.int64)
    record = np.repeat(np.arange(len(tensors)), count)
    within = np.arange(len(record)) - np.repeat(np.cumsum(count) - count, count)
    columns = {
        "op": place[record] + 1,
        "position": tensors["position"][record] + within,
        "impl": tensors["tensors"][record, 2 * within],
        "storage": tensors["tensors"][record, 2 * within + 1],
    }
    return make_table("op_tensor", len(record), columns), int(np.count_nonzero(~known))


def _describe_collectives(
    records: AnyArray, index: _Index, inputs: AnyArray, source: RawSource, strings: StringTable, warnings: list[str]
) -> int:
    """Adds each op's collective to its inputs. Returns the number of records whose op does not exist."""
    place, known = index.find(records)
    entries = source.strings.get(SPACE_OP_COMMS, {})
    dtypes = _dtypes(source)
    unreadable = 0
    for row, record in zip(place[known].tolist(), records[known], strict=True):
        try:
            text = comms_text(entries.get(int(record["text"]), b""), int(record["sequence"]), dtypes)
        except UnreadableInputs:
            unreadable += 1
            continue
        own = strings.strings[inputs[row]] + ", " if inputs[row] != NO_STRING else ""
        inputs[row] = strings.add(own + text)
    if unreadable:
        warnings.append(f"{unreadable} descriptions of collectives are missing or could not be read")
    return int(np.count_nonzero(~known))


def _key(records: AnyArray) -> npt.NDArray[np.uint64]:
    """Combines the thread and the op's number within it."""
    key: npt.NDArray[np.uint64] = records["thread"].astype(np.uint64) << np.uint64(32) | records["number"]
    return key


def _table(kind: str, columns: Mapping[str, AnyArray], chosen: npt.NDArray[np.bool_]) -> Table:
    taken = columns if chosen.all() else {name: column[chosen] for name, column in columns.items()}
    return make_table(kind, len(taken["start"]), taken)
