"""What kind of work an operator is, told by its name: matrix products, convolutions, views, and so on.

Theory of operation
    The first rule that fits decides. What is elementwise and what reduces are lists of PyTorch's operators, those with
    the tags `pointwise` and `reduction` (2.13). The other types are told by parts of names, since each has variants of
    several libraries. A node of the backward pass (AddmmBackward0) is of the type of the operator that it is for. What
    no rule knows, such as the operators of other libraries, is of the type "other".
"""

import re

import numpy as np
import numpy.typing as npt

from kineto_trace.kernel_traits.kernel_types import COMMUNICATION_OP, DATA_LOADING
from kineto_trace.model.context import Context

OTHER = "other"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


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
_BY_WORD = (
    ("elementwise", _ELEMENTWISE),
    ("reduction", _REDUCTIONS),
    ("view", _VIEWS),
    ("copy or allocation", _COPIES),
)
_PYTORCH = re.compile(r"aten::(?:_foreach_)?(\w+)$")
_NODE = re.compile(r"(\w+?)Backward\d*$")
OPERATOR_TYPES = (*(name for name, _ in (*_BY_NAME, *_BY_PART, *_BY_WORD)), OTHER)


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


def operator_types(context: Context) -> npt.NDArray[np.int64]:
    """Returns for each string of the trace the type of an operator of that name: number into OPERATOR_TYPES."""
    numbers = {kind: number for number, kind in enumerate(OPERATOR_TYPES)}
    strings = context.trace.strings
    return np.fromiter((numbers[operator_type(text)] for text in strings), np.int64, len(strings))


def _word(name: str) -> str:
    """Returns PyTorch's name of the operator; of a node of the backward pass, of what it is for; else nothing."""
    if found := _PYTORCH.match(name):
        return found[1]
    node = _NODE.fullmatch(name)
    return re.sub(r"(?<=[a-z\d])(?=[A-Z][a-z])|(?<=[a-z])(?=[A-Z])", "_", node[1]).lower() if node else ""
