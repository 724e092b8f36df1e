"""Collectives of NCCL, RCCL and oneCCL: the operation and group of each communication kernel, and its match on other
ranks.

Theory of operation
    PyTorch describes a collective in arguments of its kernel (in older versions of the operator around the launch):
    "Collective name", "In msg nelems", "Out msg nelems", "dtype", "Group size", "Process Group Name",
    "Process Group Ranks", "Seq". Without these, the kernel's name still has the operation and type:
    ncclDevKernel_AllReduce_Sum_f32_RING_LL. The name shows neither algorithm nor protocol: NCCL compiles one kernel per
    operation and type, calls it ..._RING_LL, and runs every algorithm and protocol in it. RCCL runs all in one kernel,
    ncclDevKernel_Generic, and oneCCL's kernels (oneccl_reduce_base) name no collective: theirs is only known from the
    arguments.

    Kernels of several ranks belong to one collective if they have the same process group (name and ranks) and
    sequence number; transfers between two ranks are numbered separately. Without sequence numbers the n-th collective
    of a process group, of that name, on one rank belongs to the n-th one on the others.

    Several kernels of one rank with one number are one collective: from the first start to the last end.

    Sizes and factors are those of nccl-tests: the size is that of the larger buffer (all ranks' parts together, in
    an all_gather, reduce_scatter or all_to_all), the algorithm bandwidth is size / time, and the bus bandwidth is
    that times 2(n-1)/n for an all_reduce, (n-1)/n for an all_gather, reduce_scatter, all_to_all, gather or scatter,
    and 1 for a broadcast, a reduce, a send or a recv, with n ranks.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.base.array_types import NOTHING, Flags, Ints, Ints32
from kineto_trace.model.context import Context
from kineto_trace.model.trace import NO_STRING, Trace
from kineto_trace.structure.activity_links import gpu
from kineto_trace.structure.event_arguments import parse

NO_SEQUENCE = -1
_NAMES: Mapping[str, str] = {  # name in PyTorch or in a kernel, without blanks and underscores -> our name
    "allreduce": "all_reduce",
    "allreducecoalesced": "all_reduce",
    "allreducesparse": "all_reduce",
    "allgather": "all_gather",
    "allgatherbase": "all_gather",
    "allgathercoalesced": "all_gather",
    "allgatherintotensorcoalesced": "all_gather",
    "reducescatter": "reduce_scatter",
    "reducescatterbase": "reduce_scatter",
    "reducescattertensorcoalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoallv": "all_to_all",
    "alltoallbase": "all_to_all",
    "alltoallvbase": "all_to_all",
    "broadcast": "broadcast",
    "broadcastoop": "broadcast",
    "reduce": "reduce",
    "reduceoop": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv",
    "sendrecv": "sendrecv",
    "barrier": "barrier",
}
TRANSFERS = frozenset({"send", "recv", "sendrecv"})  # between two ranks
_SCATTERED = frozenset({"all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"})
MAX_NUMBER = 1 << 53  # of elements, members, bytes; above, a file is damaged, and columns of 64 bits have no room
_BYTES = {
    **dict.fromkeys(("byte", "char", "bool", "uint8", "int8", "u8", "i8", "f8e4m3", "f8e5m2"), 1),
    **dict.fromkeys(("half", "bfloat16", "short", "int16", "uint16", "float16", "f16", "bf16"), 2),
    **dict.fromkeys(("float", "int", "int32", "uint32", "float32", "f32", "i32", "u32"), 4),
    **dict.fromkeys(("double", "long", "int64", "uint64", "float64", "complexfloat", "f64", "i64", "u64"), 8),
    "complexdouble": 16,
}
_SEQUENCE = re.compile(r'"Seq"\s*:\s*"?(\d{1,18})(?!\d)"?')
_KERNEL = re.compile(r"(?:nccl|rccl|mscclpp|msccl)\w*?Kernel_(?!Generic(?![A-Za-z]))([A-Za-z]+)")
_TYPE = re.compile(
    r"_(f8e4m3|f8e5m2|bf16|f16|f32|f64|u8|i8|u32|i32|u64|i64|float|half|double|u?int\d+)(?:_t)?(?=[_(]|$)"
)
COLUMN = "collective"


@dataclass(frozen=True, slots=True)
class CollectiveDescription:
    """What many collectives share. None: not recorded. Bytes: of one rank's buffers. size: its group's."""

    collective: str
    group: str | None
    group_description: str | None
    ranks: tuple[int, ...]
    size: int | None
    dtype: str | None
    in_bytes: int | None
    out_bytes: int | None

    @property
    def bytes(self) -> int | None:
        """Returns the size by the rules of nccl-tests."""
        known = [value for value in (self.in_bytes, self.out_bytes) if value is not None]
        return max(known, default=None)

    @property
    def transfer(self) -> bool:
        """Whether it is a transfer between two ranks."""
        return self.collective in TRANSFERS


@dataclass(frozen=True, slots=True)
class Collectives:
    """The communication kernels of a trace in the order of their starts (Unix ns).

    place: in Gpu.
    description: number into `descriptions`.
    sequence: NO_SEQUENCE if not recorded.
    """

    place: Ints
    start: Ints
    end: Ints
    description: Ints
    sequence: Ints
    descriptions: tuple[CollectiveDescription, ...]

    def __len__(self) -> int:
        return len(self.place)


def bus_factor(collective: str, size: int) -> float:
    """Returns bus bandwidth / algorithm bandwidth by nccl-tests, for a group of this size."""
    if size < 1:
        return float("nan")
    if collective == "all_reduce":
        return 2 * (size - 1) / size
    if collective in _SCATTERED:
        return (size - 1) / size
    return 1.0


def collective_name(text: str) -> str:
    """Returns the normalized name: all_reduce for allreduce, ALLREDUCE and nccl:all_reduce_coalesced."""
    word = text.split(":")[-1].strip().split(" ")[0]  # "send 0->1"
    plain = word.replace("_", "").lower()
    return _NAMES.get(plain, word.lower())


def arguments_of_ops(context: Context) -> tuple[Ints, Ints32]:
    """Communication kernels (rows of the table) whose operator describes a collective, and the number of that text."""
    work = context.get(gpu)
    place = np.flatnonzero(work.communication)
    texts = _texts_of_ops(context, work.op[place])
    described = texts != NO_STRING
    return work.row[place[described]], texts[described]


def collectives(context: Context) -> Collectives:
    """Returns all communication kernels. Each distinct text of arguments is parsed once."""
    work, trace = context.get(gpu), context.trace
    place = np.flatnonzero(work.communication)
    kernels = trace.table("kernel")
    rows = work.row[place]
    texts = kernels.origin["args"][rows] if "args" in kernels.origin else np.full(len(rows), NO_STRING, np.int32)
    texts = np.where(_described(context, texts), texts, _texts_of_ops(context, work.op[place]))
    keys = texts.astype(np.int64) << 32 | work.name[place].astype(np.int64)
    distinct, number = np.unique(keys, return_inverse=True)
    described: dict[CollectiveDescription, int] = {}
    seen: dict[tuple[int, str], int] = {}  # texts that differ only in their numbers are read once
    description, sequence = np.empty(len(distinct), np.int64), np.empty(len(distinct), np.int64)
    for at, key in enumerate(distinct.tolist()):
        text = trace.strings[key >> 32] if key >> 32 != NO_STRING else ""
        numbered = _SEQUENCE.search(text)
        sequence[at] = int(numbered[1]) if numbered else NO_SEQUENCE
        rest = text if numbered is None else text[: numbered.start()] + '"Seq":0' + text[numbered.end() :]
        kernel = key & 0xFFFFFFFF
        if (kernel, rest) not in seen:
            entry = describe(parse(rest), trace.strings[kernel])
            seen[kernel, rest] = described.setdefault(entry, len(described))
        description[at] = seen[kernel, rest]
    return Collectives(
        place,
        work.start[place],
        work.end[place],
        description[number] if len(distinct) else np.empty(0, np.int64),
        sequence[number] if len(distinct) else np.empty(0, np.int64),
        tuple(described),
    )


def _described(context: Context, texts: Ints32) -> Flags:
    """For each number of a text: whether it describes a collective."""
    flags = np.zeros(len(context.trace.strings) + 1, np.bool_)  # the last one is for NO_STRING
    for number in unique_values(texts).tolist():
        flags[number] = number != NO_STRING and '"Collective name"' in context.trace.strings[number]
    found: Flags = flags[texts]
    return found


def _texts_of_ops(context: Context, op: Ints) -> Ints32:
    """The text of the innermost operator around the launch, if it describes a collective."""
    table = context.trace.table("cpu_op")
    texts = np.full(len(op), NO_STRING, np.int32)
    known = np.flatnonzero(op != NOTHING)
    texts[known] = table["inputs"][op[known]]
    texts[~_described(context, texts)] = NO_STRING
    return texts


def _number(value: Any, missing: int) -> int:
    """Parses a number that may be written as text; one that no column has room for is missing."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):  # of an infinity
        return missing
    return number if abs(number) < MAX_NUMBER else missing


def describe(arguments: Mapping[str, Any], kernel: str) -> CollectiveDescription:
    """Returns what the arguments and the name of a kernel state; the arguments take precedence."""
    named = _KERNEL.search(kernel)
    of_kernel = _TYPE.search(kernel)
    dtype = arguments.get("dtype") or (of_kernel[1] if of_kernel else None)
    width = _BYTES.get(str(dtype).lower()) if dtype else None
    ranks = _ranks(arguments.get("Process Group Ranks"))
    size = _number(arguments.get("Group size"), len(ranks))
    group = arguments.get("Process Group Name")
    about = arguments.get("Process Group Description")
    name = arguments.get("Collective name") or (named[1] if named else None)
    return CollectiveDescription(
        collective=collective_name(str(name)) if name else "unknown",
        group=None if group is None else str(group),
        group_description=None if about is None else str(about),
        ranks=ranks,
        size=size or None,
        dtype=None if dtype is None else str(dtype),
        in_bytes=_size(arguments, "In", width),
        out_bytes=_size(arguments, "Out", width),
    )


def _size(arguments: Mapping[str, Any], side: str, width: int | None) -> int | None:
    count = _number(arguments.get(f"{side} msg nelems"), -1)
    return None if width is None or count < 0 else count * width


def _ranks(value: Any) -> tuple[int, ...]:
    """Parses a list, or its text, which may be truncated: [0, 1, ..., 7]."""
    if isinstance(value, str):
        if "..." in value:
            return ()
        value = [int(number) if len(number) < 10 else MAX_NUMBER for number in re.findall(r"\d+", value)]
    if isinstance(value, list) and all(isinstance(number, int) and abs(number) < MAX_NUMBER for number in value):
        return tuple(value)
    return ()


def collective_columns(trace: Trace) -> dict[str, Ints32]:
    """The column COLUMN of the kernels: numbers of ready arguments, NO_STRING where there are none. None at all: {}."""
    inputs = trace.table("cpu_op")["inputs"]
    texts = {number for number in unique_values(inputs).tolist() if number != NO_STRING}
    if not any('"Collective name"' in trace.strings[number] for number in texts):
        return {}
    rows, numbers = arguments_of_ops(Context(trace))
    column = np.full(len(trace.table("kernel")), NO_STRING, np.int32)
    column[rows] = numbers
    return {COLUMN: column}
