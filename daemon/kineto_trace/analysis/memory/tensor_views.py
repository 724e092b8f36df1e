"""The tensors of a trace."""

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.memory.tensor_uses import NOTHING, UNKNOWN_SIZE, tensor_uses
from kineto_trace.model.context import Context
from kineto_trace.structure.allocations import memory_records
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

Ints = npt.NDArray[np.int64]


@view(
    "tensors",
    columns(
        ("tensor", "int", "", "number of the tensor, counted from 0"),
        ("size_bytes", "int", "bytes", "size of its block of memory, otherwise of its shape at the first use"),
        ("size_is_exact", "bool", "", "whether the size is that of the block"),
        (
            "device",
            "text",
            "",
            "CPU, GPU0, …; missing if its block was neither allocated nor released in the recording",
        ),
        ("made_by", "text", "", "operator that allocated its block"),
        ("uses", "int", "", "number of times that it was an input of an operator"),
        ("first_used_by", "text", "", "first operator that it was an input of"),
        ("last_used_by", "text", "", "last operator that it was an input of"),
        ("allocation_us", "float", "us", "time since the window began"),
        ("first_use_us", "float", "us", "start of the first operator that used it, since the window began"),
        ("last_use_us", "float", "us", "latest end of any operator that used it, since the window began"),
        ("release_us", "float", "us", "time of its release since the window began"),
        ("unused_us", "float", "us", "time from the last use to the release"),
        ("address", "int", "", "address of its storage"),
    ),
)
def tensors(context: Context) -> Answer:
    """The distinct tensors of a trace: where they came from, which operators used them, and how long they were held.

    Tensors that share storage (views) count as one. If the trace has allocations, a storage is one tensor from its
    allocation to its release; otherwise inputs with the same address whose uses overlap in time are one tensor. Tensors
    are numbered by first appearance.

    Traces read from files do not contain the addresses of inputs. Their rows are the blocks of memory that operators
    allocated, and the operators that used them are unknown.
    """
    found, records = context.get(tensor_uses), context.get(memory_records)
    notes = []
    if not len(found):
        notes.append("the trace has no tensors: record with record_shapes=True or profile_memory=True")
    elif not found.from_inputs:
        notes.append(
            "the trace lacks the addresses of inputs: the rows are blocks of memory, and their uses are unknown"
        )
    strings = np.array([*context.trace.strings, None], object)
    names = np.append(found.names, NOTHING)
    start = context.trace.window_start_ns

    def since(time: Ints) -> npt.NDArray[np.float64]:
        return np.where(time >= 0, (time - start) / 1000, np.nan)

    unused = (found.released >= 0) & (found.last_use >= 0)
    return Answer(
        {
            "tensor": np.arange(len(found)),
            "size_bytes": np.where(found.size == UNKNOWN_SIZE, np.nan, found.size),
            "size_is_exact": found.exact,
            "device": np.array([*records.devices, None], object)[found.device],
            "made_by": strings[names[found.maker]],
            "uses": found.uses.astype(object) if found.from_inputs else [None] * len(found),
            "first_used_by": strings[names[found.first_op]],
            "last_used_by": strings[names[found.last_op]],
            "allocation_us": since(found.allocated),
            "first_use_us": since(found.first_use),
            "last_use_us": since(found.last_use),
            "release_us": since(found.released),
            "unused_us": np.where(unused, (found.released - found.last_use) / 1000, np.nan),
            "address": found.address.view(np.int64),
        },
        notes,
    )
