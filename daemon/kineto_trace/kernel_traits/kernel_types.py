"""What kind of work a GPU activity is, told by its name: communication, computation, tensor cores.

Names are judged once each: the functions give one value per string of the trace.
"""

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kineto_trace.model.context import Context

Flags = npt.NDArray[np.bool_]

COMMUNICATION_OP = re.compile(r"^(?:nccl|gloo|mpi|ucc|xccl|hccl|rccl):")  # ranges that torch.distributed records
_COMMUNICATION = (
    "nccl", "rccl", "multimem_", "one_shot_all_reduce", "two_shot_all_reduce", "cross_device_reduce",
    "allreduce_fusion", "mscclpp", "nvshmem", "rocshmem", "oneccl", "ishmem",
)  # fmt: skip
DATA_LOADING = re.compile(r"^enumerate\(DataLoader\)#.*\.__next__$|^enumerate\(DataPipe\)#", re.DOTALL)

HTA_TYPES = ("COMMUNICATION", "MEMORY", "COMPUTATION", "OTHER")  # in the order in which HTA asks; by number
HTA_COMMUNICATION, HTA_MEMORY, HTA_COMPUTATION, HTA_OTHER = range(4)
_HTA_PATTERNS = (  # all matched at the beginning of the name; the third is what computation is not
    re.compile(r"nccl|hip|hccl|.*ncclKernel"),
    re.compile(r"(hip)?Memcpy|(hip)?Memset|dma"),
    re.compile(
        r"nccl|.*Memcpy|.*Memset|.*dma|.*Sync|Stream Wait Event|cuda.*LaunchKernel|runFunction|hip|job_exe|packet"
        r"|pe_exe|cpum_exe_subgraph|hccl|collective_subgraph_execution"
    ),
)


def matches(strings: Sequence[str], pattern: re.Pattern[str]) -> Flags:
    """Tells for each string whether the pattern is found in it."""
    return np.fromiter((pattern.search(text) is not None for text in strings), np.bool_, len(strings))


def communication_names(context: Context) -> Flags:
    """Tells for each string of the trace whether a kernel of that name is a collective or a point-to-point transfer.

    All versions count: ncclKernel_…, ncclDevKernel_… (RCCL's, too), mscclKernel_…, rcclGenericKernel…, oneccl_…; and
    the kernels by which PyTorch's symmetric memory and the servers of language models reduce over ranks themselves.
    """
    strings = context.trace.strings
    folded = map(str.lower, strings)  # ten times as fast as a pattern on the long texts of arguments
    return np.fromiter((any(part in text for part in _COMMUNICATION) for text in folded), np.bool_, len(strings))


def hta_type(name: str) -> int:
    """The kernel type that HTA gives to a GPU event of this name: number into HTA_TYPES."""
    communication, memory, no_computation = _HTA_PATTERNS
    if communication.match(name):
        return HTA_COMMUNICATION
    if memory.match(name):
        return HTA_MEMORY
    return HTA_OTHER if no_computation.match(name) else HTA_COMPUTATION


def hta_types(context: Context) -> npt.NDArray[np.uint8]:
    """For each string of the trace the type that HTA gives to GPU events of that name: number into HTA_TYPES."""
    strings = context.trace.strings
    return np.fromiter(map(hta_type, strings), np.uint8, len(strings))


def communication_op_names(context: Context) -> Flags:
    """For each string of the trace: whether an operator or annotation of that name is a collective or a transfer."""
    return matches(context.trace.strings, COMMUNICATION_OP)


def data_loading_names(context: Context) -> Flags:
    """For each string of the trace: whether an operator or annotation of that name waits for the next batch."""
    return matches(context.trace.strings, DATA_LOADING)


def short_name(name: str) -> str:
    """Returns HTA's short form: without templates, arguments and everything before the last blank."""
    if re.match(r"(^(hip)?Memcpy)|(^(hip)?Memset)|(^dma)", name) or ("<" not in name and "(" not in name):
        return name
    stack: list[str] = []
    opening = {">": "<", ")": "("}
    for letter in name.replace("->", ""):
        if letter not in opening:
            stack.append(letter)
            continue
        while stack and stack.pop() != opening[letter]:
            pass
    return "".join(stack).split(" ")[-1]
