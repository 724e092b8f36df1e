"""The kind of work of kernels and operators, by their names.

Names are judged once each: the functions give one value per string of the trace.

The type of an operator follows from its name: matrix products, convolutions, views, and so on.

Theory of operation
    The first rule that fits decides. Elementwise operators and reductions are lists of PyTorch's operators, those with
    the tags `pointwise` and `reduction` (2.13). The other types are recognised by parts of names, since each has
    variants of several libraries. A node of the backward pass (AddmmBackward0) has the type of its operator. All
    others, such as the operators of other libraries, have the type "other".
"""

import re
from collections.abc import Sequence

import numpy as np

from kineto_trace.base.array_types import Flags, Ints, UInts8
from kineto_trace.model.context import Context
from kineto_trace.model.trace import NAME_CHARS

COMMUNICATION_OP = re.compile(r"^(?:nccl|gloo|mpi|ucc|xccl|hccl|rccl):")  # ranges that torch.distributed records
_COMMUNICATION = (
    "nccl", "rccl", "multimem_", "one_shot_all_reduce", "two_shot_all_reduce", "cross_device_reduce",
    "allreduce_fusion", "mscclpp", "nvshmem", "rocshmem", "oneccl", "ishmem", "hccl", "hcom_", "deep_ep", "quickreduce",
    "quick_reduce", "mooncake", "pplx",
)  # fmt: skip
DATA_LOADING = re.compile(r"^enumerate\(DataLoader\)#.*\.__next__$|^enumerate\(DataPipe\)#", re.DOTALL)
HTA_TYPES = ("COMMUNICATION", "MEMORY", "COMPUTATION", "OTHER")  # in the order of HTA's tests; by number
HTA_COMMUNICATION, HTA_MEMORY, HTA_COMPUTATION, HTA_OTHER = range(4)
_HTA_PATTERNS = (  # all matched at the beginning of the name; the third excludes computation
    re.compile(r"nccl|hip|hccl|.*ncclKernel"),
    re.compile(r"(hip)?Memcpy|(hip)?Memset|dma"),
    re.compile(
        r"nccl|.*Memcpy|.*Memset|.*dma|.*Sync|Stream Wait Event|cuda.*LaunchKernel|runFunction|hip|job_exe|packet"
        r"|pe_exe|cpum_exe_subgraph|hccl|collective_subgraph_execution"
    ),
)
OTHER = "other"
_BY_NAME = (  # of the whole name
    ("communication", re.compile(rf"{COMMUNICATION_OP.pattern}|^_?c10d|^record_param_comms$|^symm_mem::")),
    ("data loading", DATA_LOADING),
    ("optimizer", re.compile(r"^Optimizer\.|^aten::_fused_(?:adam|sgd|adagrad)")),
    ("autograd", re.compile(r"^autograd::|^torch::autograd::")),
)
_BY_PART = (  # of PyTorch's name without its namespace
    ("attention", re.compile(r"attention|(?:^|_)mha(?:_|$)")),
    ("convolution", re.compile(r"conv(?:olution|_|\d|$)")),
    ("recurrent layer", re.compile(r"(?:^|_)(?:lstm|gru|rnn)(?:_|$)")),
    ("matrix product", re.compile(r"(?:^|_|add|b|badd|m)m[mv](?:_|$)|matmul|(?:^|_)linear(?:_|$)|einsum|multi_dot")),
    ("normalization", re.compile(r"(?:batch|layer|group|instance|rms)_norm")),
    ("pooling", re.compile(r"pool")),
    ("softmax or loss", re.compile(r"softmax|_loss|cross_entropy|kl_div|ctc")),
    ("indexing", re.compile(r"embedding|(?:^|_)index|gather|scatter|(?:^|_)take|masked_(?:select|scatter)|^nonzero")),
    ("sorting", re.compile(r"sort|topk|kthvalue|unique|bincount|histc|searchsorted")),
    ("random numbers", re.compile(r"dropout|rand|normal_$|^uniform|bernoulli|multinomial|exponential_$")),
)
_PYTORCH = re.compile(r"aten::(?:_foreach_)?(\w+)$")
_NODE = re.compile(r"(\w+?)Backward\d*$")


def matches(strings: Sequence[str], pattern: re.Pattern[str]) -> Flags:
    """Returns for each string whether the pattern is found in it (in the beginning of a long one)."""
    return np.fromiter((pattern.search(text, 0, NAME_CHARS) is not None for text in strings), np.bool_, len(strings))


def communication_names(context: Context) -> Flags:
    """Returns for each string of the trace whether a kernel of that name is a collective or a point-to-point transfer.

    All versions count: ncclKernel_…, ncclDevKernel_… (RCCL's, too), mscclKernel_…, rcclGenericKernel…, oneccl_…; and
        the kernels by which PyTorch's symmetric memory and the servers of language models reduce over ranks themselves.
    """
    strings = context.trace.strings
    folded = map(str.lower, strings)  # ten times as fast as a pattern on the long texts of arguments
    return np.fromiter((any(part in text for part in _COMMUNICATION) for text in folded), np.bool_, len(strings))


def hta_type(name: str) -> int:
    """Returns the kernel type that HTA gives to a GPU event of this name: number into HTA_TYPES."""
    communication, memory, no_computation = _HTA_PATTERNS
    if communication.match(name):
        return HTA_COMMUNICATION
    if memory.match(name):
        return HTA_MEMORY
    return HTA_OTHER if no_computation.match(name) else HTA_COMPUTATION


def hta_types(context: Context) -> UInts8:
    """For each string of the trace the type that HTA gives to GPU events of that name: number into HTA_TYPES."""
    strings = context.trace.strings
    return np.fromiter(map(hta_type, strings), np.uint8, len(strings))


def communication_op_names(context: Context) -> Flags:
    """Returns for each string of the trace whether an operator or annotation of that name is a collective or a
    transfer.
    """
    return matches(context.trace.strings, COMMUNICATION_OP)


def data_loading_names(context: Context) -> Flags:
    """Returns for each string of the trace whether an operator or annotation of that name waits for the next batch."""
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


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def operator_type(name: str) -> str:
    """Returns the type of the operator with this name, one of OPERATOR_TYPES."""
    for kind, pattern in _BY_NAME:
        if pattern.search(name):
            return kind
    word = _word(name)
    for kind, pattern in _BY_PART:
        if pattern.search(word):
            return kind
    if word.removesuffix("_backward") in _ELEMENTWISE:
        return "elementwise"
    forms = {word, word.strip("_"), f"_{word}"}
    return next((kind for kind, words in _BY_WORD if forms & words), OTHER)


def operator_types(context: Context) -> Ints:
    """Returns for each string of the trace the type of an operator of that name: number into OPERATOR_TYPES."""
    numbers = {kind: number for number, kind in enumerate(OPERATOR_TYPES)}
    strings = context.trace.strings
    return np.fromiter((numbers[operator_type(text)] for text in strings), np.int64, len(strings))


def _word(name: str) -> str:
    """Returns PyTorch's name of the operator (for a backward node, of its forward), or ""."""
    if found := _PYTORCH.match(name):
        return found[1]
    node = _NODE.fullmatch(name)
    return re.sub(r"(?<=[a-z\d])(?=[A-Z][a-z])|(?<=[a-z])(?=[A-Z])", "_", node[1]).lower() if node else ""


_ELEMENTWISE = _words(
    """abs acos acosh add addcdiv addcmul angle asin asinh atan atan2 atanh bitwise_and bitwise_left_shift
    bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min clip
    conj_physical copysign cos cosh deg2rad digamma div elu eq equal erf erfc erfinv exp exp2 expm1 float_power
    floor floor_divide fmax fmin fmod frac frexp gcd ge gelu glu gt hardshrink hardsigmoid hardswish hardtanh
    heaviside hypot i0 igamma igammac isfinite isinf isnan isneginf isposinf lcm ldexp le leaky_relu lerp lgamma
    log log10 log1p log2 log_sigmoid logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit
    lt masked_fill maximum minimum mish mul mvlgamma nan_to_num ne neg nextafter polygamma positive pow prelu
    rad2deg reciprocal relu relu6 remainder round rrelu rsqrt rsub selu sgn sigmoid sign signbit silu sin sinc
    sinh softplus softshrink sqrt square sub tan tanh threshold true_divide trunc where xlogy"""
)
_REDUCTIONS = _words(
    """all amax amin aminmax any argmax argmin count_nonzero cumprod cumsum linalg_vector_norm logcumsumexp
    logsumexp max mean median min nanmean nansum norm prod std std_mean sum var var_mean"""
)
_VIEWS = _words(
    """_reshape_alias _unsafe_view alias as_strided broadcast_to chunk conj detach diagonal expand expand_as
    flatten imag lift_fresh movedim narrow permute real reshape reshape_as select slice split split_with_sizes
    squeeze swapaxes t tensor_split transpose unbind unflatten unfold unsqueeze view view_as view_as_complex
    view_as_real"""
)
_COPIES = _words(
    """_copy_from _to_copy arange cat clone concat contiguous copy diagonal_backward empty empty_like empty_strided
    fill flip full full_like new_empty new_full new_zeros new_ones ones ones_like pad constant_pad_nd pin_memory
    repeat repeat_interleave resize roll scalar_tensor select_backward set slice_backward stack to tril triu
    unfold_backward zero zeros zeros_like item _local_scalar_dense"""
)
_BY_WORD = (
    ("elementwise", _ELEMENTWISE),
    ("reduction", _REDUCTIONS),
    ("view", _VIEWS),
    ("copy or allocation", _COPIES),
)
OPERATOR_TYPES = (*(name for name, _ in (*_BY_NAME, *_BY_PART, *_BY_WORD)), OTHER)
