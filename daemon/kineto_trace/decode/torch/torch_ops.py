"""Decodes the operators that the agent records in torch, and their inputs.

Theory of operation
    Each thread of the target writes a record when an operator ends, so children come before their parents. The decoder
    sorts the records by their starts (parents first where starts are equal) and numbers them; the numbers are the ids
    by which launches, tensors and flows refer to ops.

    Names and inputs are hashes of entries in the string table. Entries that never arrived are counted; a name is then
    shown as its hash. An operator that was still running when the recording ended gets an end that encloses everything
    that its thread did, at least up to the window's end.

Converts an operator's inputs from the agent's binary form to Kineto's JSON arguments.
    An entry describes the inputs of one call: their types, sizes, strides and values, in the form that
    kineto_agent/protocol/records.py defines. Equal calls share one entry, so a training run has a few thousand of them,
    whatever the number of its ops: they are read one by one.

    The text is that of PyTorch's profiler for the same call: C++ names of types, numbers as torch prints them, and
    nothing where the profiler shows nothing (None, strings, devices, long lists). Entries come from the target: those
    of another form are refused, never guessed.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from kineto_agent.protocol.records import (
    COMMS_NUMBERS,
    INPUT_BOOL,
    INPUT_DOUBLE,
    INPUT_INT,
    INPUT_NONE,
    INPUT_OTHER,
    INPUT_SCALAR_LIST,
    INPUT_TENSOR,
    INPUT_TENSOR_LIST,
    INPUTS_CUT,
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
    TENSOR_NO_SIZES,
    TENSOR_NO_STRIDES,
    TENSORS_PER_RECORD,
    TORCH_OPS_FORMAT,
)

from kineto_trace.arrays.codec import Interner
from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.base.array_types import AnyArray, Flags, Ints, Ints32, UInts32, UInts64
from kineto_trace.base.quantities import times
from kineto_trace.decode.decoded import EVERYTHING, Decoded, DecodeWindow, fixed_records, record_dtype
from kineto_trace.model.trace import NO_STRING, OP_TABLES, StringTable, Table, make_table
from kineto_trace.spool.raw_records import RawSource

FORMAT = TORCH_OPS_FORMAT
RECORD = record_dtype(OP_FIELDS)
_TENSORS, _COMMS = record_dtype(OP_TENSORS_FIELDS), record_dtype(OP_COMMS_FIELDS)
_TYPES = {  # C++ names -> at::ScalarType's names
    "unsigned char": "Byte",
    "signed char": "Char",
    "short int": "Short",
    "int": "Int",
    "long int": "Long",
    "float": "Float",
    "double": "Double",
    "bool": "Bool",
    "short unsigned int": "UInt16",
    "unsigned int": "UInt32",
    "long unsigned int": "UInt64",
    "c10::complex<c10::Half>": "ComplexHalf",
    "c10::complex<float>": "ComplexFloat",
    "c10::complex<double>": "ComplexDouble",
}
LIST_SHOWN = 30  # items of a list, as in PyTorch's profiler: of tensors, longer ones are shown as empty


class _Index:
    """Finds the row of an op by its thread and its number within the thread."""

    def __init__(self, ops: AnyArray) -> None:
        self._key = _key(ops)
        self._order = np.argsort(self._key, kind="stable")

    def find(self, records: AnyArray) -> tuple[Ints, Flags]:
        """Returns the row of each record's op, and whether that op exists."""
        wanted = _key(records)
        if not len(self._key):
            return np.zeros(len(wanted), np.int64), np.zeros(len(wanted), np.bool_)
        at = np.searchsorted(self._key, wanted, sorter=self._order)
        place: Ints = self._order[np.minimum(at, len(self._key) - 1)]
        return place, self._key[place] == wanted


class UnreadableInputs(ValueError):
    """The entry does not have the form that the agent writes."""


class Input(NamedTuple):
    """One input as the profiler shows it."""

    dims: list[Any]
    strides: list[Any]
    type: str
    concrete: str


NOTHING = Input([], [], "", "")


class _Reader:
    """Reads one entry from its beginning."""

    def __init__(self, entry: bytes) -> None:
        self._entry = entry
        self._at = 0

    def take(self, layout: str) -> tuple[Any, ...]:
        """Returns the next values. Raises UnreadableInputs."""
        try:
            values = struct.unpack_from(layout, self._entry, self._at)
        except struct.error as exc:
            raise UnreadableInputs(f"cut at byte {self._at}") from exc
        self._at += struct.calcsize(layout)
        return values

    def end(self) -> None:
        """Raises UnreadableInputs unless the entry ends here."""
        if self._at != len(self._entry):
            raise UnreadableInputs(f"{len(self._entry) - self._at} bytes too many")

    def text(self) -> str:
        (size,) = self.take("<B")
        found: bytes = self.take(f"<{size}s")[0]
        return found.decode("utf-8", "replace")

    def list(self) -> str:
        (count,) = self.take("<I")
        kept = min(count, LIST_SHOWN)
        values = [str(number) for number in self.take(f"<{kept}q")]
        if kept < count:
            values.insert(-1, "...")
        return f"[{', '.join(values)}]"


class _InputReader(_Reader):
    """Reads the inputs of one call."""

    def __init__(self, entry: bytes, dtypes: Sequence[str]) -> None:
        super().__init__(entry)
        self._dtypes = dtypes

    def inputs(self) -> list[Input]:
        """Returns all inputs; the entry must end with the last one."""
        count, _ = self.take("<BB")
        found = [self._input() for _ in range(count)]
        self.end()
        return found

    def _input(self) -> Input:
        (kind,) = self.take("<B")
        if kind in (INPUT_OTHER, INPUT_NONE):
            return NOTHING
        if kind == INPUT_TENSOR:
            return self._tensor()
        if kind == INPUT_TENSOR_LIST:
            return self._tensor_list()
        if kind == INPUT_SCALAR_LIST:
            return self._scalar_list()
        return Input([], [], "Scalar", self._scalar(kind))

    def _tensor(self) -> Input:
        dtype, dims, flags = self.take("<BBB")
        sizes = list(self.take(f"<{dims}q"))
        strides = [] if flags & (TENSOR_NO_STRIDES | TENSOR_NO_SIZES) else list(self.take(f"<{dims}q"))
        return Input(sizes, strides, self._dtypes[dtype] if dtype < len(self._dtypes) else "", "")

    def _tensor_list(self) -> Input:
        count, flags = self.take("<BB")
        tensors = [self._tensor() for _ in range(count)]
        if flags & INPUTS_CUT or count > LIST_SHOWN:
            return Input([], [], "TensorList", "")
        return Input([each.dims for each in tensors], [each.strides for each in tensors], "TensorList", "")

    def _scalar_list(self) -> Input:
        count, flags = self.take("<BB")
        values = [self._scalar(self.take("<B")[0]) for _ in range(count)]
        return NOTHING if flags & INPUTS_CUT else Input([], [], "ScalarList", f"[{', '.join(values)}]")

    def _scalar(self, kind: int) -> str:
        if kind == INPUT_INT:
            return str(self.take("<q")[0])
        if kind == INPUT_DOUBLE:
            return _printed(self.take("<d")[0])
        if kind == INPUT_BOOL:
            return "True" if self.take("<B")[0] else "False"
        raise UnreadableInputs(f"an input of kind {kind}")


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
    if source.dropped:  # an op is written when it ends, its description before: those ops are among the dropped
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


def _ended(thread: AnyArray, start: Ints, end: Ints, running: Flags, window_end_ns: int) -> Ints:
    """Returns the ends; a running op gets the latest end on its thread, at least window_end_ns."""
    ended = np.where(running, np.maximum(start, window_end_ns), end)
    for number in unique_values(thread[running]).tolist():
        own = thread == number
        ended[own & running] = ended[own].max()
    return ended


def _torch_threads(thread: AnyArray, numbers: Mapping[int, bytes]) -> UInts32:
    """Returns torch's own number of each row's thread; 0 if it is unknown."""
    threads = Interner()
    places = threads.intern(thread.astype(np.uint64))
    known = [int.from_bytes(numbers.get(tid, b"")[:4], "little") for tid in threads.keys().tolist()]
    result: UInts32 = np.array(known, np.uint32)[places]
    return result


def _names(hashes: AnyArray, source: RawSource, strings: StringTable, warnings: list[str]) -> Ints32:
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
        warnings.append(f"{times(count, 'op has', 'ops have')} no name, because it could not be stored")
    return strings.add_all(texts)[numbers]


def _dtypes(source: RawSource) -> list[str]:
    """Returns the names of tensor types by torch's numbers."""
    names = source.metadata.get("dtypes")
    return [str(name) for name in names] if isinstance(names, list) else []


def _inputs(hashes: AnyArray, source: RawSource, strings: StringTable, warnings: list[str]) -> Ints32:
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
        warnings.append(f"{times(count, 'op has', 'ops have')} no inputs, because they could not be stored")
    if unreadable:
        warnings.append(f"{times(unreadable, 'description', 'descriptions')} of inputs could not be read")
    return np.array(texts, np.int32)[numbers]


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
        missing = times(unreadable, "description of a collective is", "descriptions of collectives are")
        warnings.append(f"{missing} missing or could not be read")
    return int(np.count_nonzero(~known))


def _key(records: AnyArray) -> UInts64:
    """Combines the thread and the op's number within it."""
    key: UInts64 = records["thread"].astype(np.uint64) << np.uint64(32) | records["number"]
    return key


def _table(kind: str, columns: Mapping[str, AnyArray], chosen: Flags) -> Table:
    taken = columns if chosen.all() else {name: column[chosen] for name, column in columns.items()}
    return make_table(kind, len(taken["start"]), taken)


# Converts an operator's description of its collective from the agent's binary form to Kineto's JSON arguments.
# kineto_agent/protocol/records.py defines the form of an entry; the names are those of PyTorch's saveNcclMeta.
def comms_text(entry: bytes, sequence: int, dtypes: Sequence[str]) -> str:
    """Returns the arguments "Collective name", "dtype", "In msg nelems" and so on, as JSON members.

    sequence: the number in the process group; negative if unknown.
    dtypes: names of types by torch's numbers.

    Raises UnreadableInputs.
    """
    reader = _Reader(entry)
    rank, size, first, stride, elements_in, elements_out, dtype = reader.take(COMMS_NUMBERS.format)
    name, group, description = reader.text(), reader.text(), reader.text()
    arguments: dict[str, Any] = {
        "Collective name": name,
        "In msg nelems": elements_in,
        "Out msg nelems": elements_out,
        "Group size": size,
        "dtype": _type(dtypes[dtype]) if 0 <= dtype < len(dtypes) else "",
        "In split size": reader.list(),
        "Out split size": reader.list(),
        "Process Group Name": group,
        "Process Group Description": description,
        "Process Group Ranks": reader.list(),
        "Rank": rank,
    }
    reader.end()
    for key, number, least in (
        ("Global rank start", first, 0),
        ("Global rank stride", stride, 1),
        ("Seq", sequence, 0),
    ):
        if number >= least:
            arguments[key] = number
    return json.dumps({key: value for key, value in arguments.items() if value != ""})[1:-1]


def _type(name: str) -> str:
    return _TYPES.get(name, name.removeprefix("c10::"))


def inputs_text(entry: bytes, dtypes: Sequence[str]) -> str:
    """Returns the arguments "Input Dims", "Input Strides", "Input type" and "Concrete Inputs". Raises UnreadableInputs.

    dtypes: names of the tensors' types by torch's numbers. An op without inputs has no arguments: "".
    """
    inputs = _InputReader(entry, dtypes).inputs()
    if not inputs:
        return ""
    arguments = {
        "Concrete Inputs": [each.concrete for each in inputs],
        "Input type": [each.type for each in inputs],
        "Input Strides": [each.strides for each in inputs],
        "Input Dims": [each.dims for each in inputs],
    }
    return json.dumps(arguments)[1:-1]


def _printed(value: float) -> str:
    """Returns a double as torch prints it: whole numbers with a point and no digits after it."""
    if abs(value) < 2**63 and value.is_integer():
        return f"{int(value)}."
    return f"{value:.17g}"
