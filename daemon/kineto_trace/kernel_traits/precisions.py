"""The precision of kernels and their use of tensor cores, by names and types.

Theory of operation
    A name can have several types: those of the operands, and wider ones in which products are added up or results are
    written. The narrowest one counts, as it decides how fast the GPU can be. Names of cuBLAS have it as a letter
    (nvjet_t: bf16; s1688: tf32), and so do those of rocBLAS and hipBLASLt after the indices of the product
    (Cijk_Alik_Bljk_HHS: fp16); templates have it in the type's name (c10::BFloat16), or in its mangled form (DF16b:
    bf16).

Names also show which kernels use tensor cores, and which operators could.
    Kernel names show how they multiply: by the shape of the instruction (s884, h1688, s16816), by its kind (hmma, imma,
    wgmma, tcgen05), by a library that only uses tensor cores (nvjet, CUTLASS 3 and cuBLAS for sm90 and sm100, flash
    attention), or that they use ordinary cores (simt, ffma, sgemm), which takes precedence: the same family xmma_gemm
    has kernels of both kinds. AMD's matrix instructions (mfma, xdl, gtcx) count as tensor cores, and so do Intel's
    (DPAS, XMX); but oneDNN calls its kernels gemm_kernel and gen_conv, whatever they use, so shares on Intel's GPUs are
    unknown. Products also launch helper kernels that multiply nothing, and products with a vector, which move memory:
    these gain nothing from tensor cores.

    An operator is eligible if its name is in a list: the operators that autocast runs in half precision, and their
    backward operators, by the names that old and new versions of PyTorch gave them.
"""

import re

import numpy as np

from kineto_trace.base.array_types import Flags
from kineto_trace.kernel_traits.gpu_vendors import GpuVendor
from kineto_trace.kernel_traits.kernel_types import matches
from kineto_trace.model.context import Context
from kineto_trace.model.trace import NAME_CHARS

BITS = {"fp4": 4, "fp8": 8, "int8": 8, "fp16": 16, "bf16": 16, "tf32": 32, "fp32": 32, "fp64": 64}  # as stored
PRECISIONS = tuple(BITS)  # by number
UNKNOWN = -1  # no number
_TENSILE = r"^Cijk_[A-Z][a-z]+_[A-Z][a-z]+_"  # prefix of rocBLAS's and hipBLASLt's names, before the types
_BY_NAME: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (precision, re.compile(pattern))
    for precision, pattern in (  # the narrowest first
        ("fp4", r"e2m1|nvf4|mxf4|fp4"),
        ("fp8", r"e4m3|e5m2|fp8|[Ff]loat8|nvjet_\w*q|" + _TENSILE + r"[FB]8"),
        ("int8", r"int8|i8i8|s8s8|imma(?![a-z])|(?<![a-z\d])i\d+gemm|" + _TENSILE + r"(?:4x)?[iI]8"),
        ("bf16", r"bf16|[Bb][Ff]loat16|DF16b|nvjet_\w*?t[a-z]{2}_|" + _TENSILE + r"B"),
        (
            "fp16",
            r"fp16|(?<![a-z\d])f16|[Hh]alf(?![a-z])|(?<![a-z\d])h\d{3,5}(?!\d)|hgemm|DF16_|_Float16"
            r"|nvjet_\w*?h[a-z]{2}_|" + _TENSILE + r"H",
        ),
        ("tf32", r"tf32|s1688(?!\d)|nvjet_\w*?s[a-z]{2}_"),
        (
            "fp32",
            r"(?<![a-z])float(?!\d)|(?<![a-z])f32|fp32|sgemm|scudnn|[fs]fma|gemm_float|" + _TENSILE + r"S",
        ),
        ("fp64", r"double|(?<![a-z])f64|fp64|dgemm|d884|nvjet_\w*?d[a-z]{2}_|" + _TENSILE + r"D"),
    )
)
_BY_TYPE = {
    "float8": "fp8",
    "signed char": "int8",
    "bfloat16": "bf16",
    "half": "fp16",
    "float": "fp32",
    "double": "fp64",
}  # the narrowest first
AUTOCAST_OPS = frozenset(  # by their names of 2021
    {
        "aten::_convolution", "aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::conv_tbc",
        "aten::conv_transpose1d", "aten::conv_transpose2d", "aten::conv_transpose3d", "aten::convolution",
        "aten::cudnn_convolution", "aten::cudnn_convolution_transpose", "aten::prelu", "aten::addmm", "aten::addmv",
        "aten::addr", "aten::matmul", "aten::mm", "aten::mv", "aten::linear", "aten::addbmm", "aten::baddbmm",
        "aten::bmm", "aten::chain_matmul", "aten::linalg_multi_dot", "aten::_thnn_fused_lstm_cell",
        "aten::_thnn_fused_gru_cell", "aten::lstm_cell", "aten::gru_cell", "aten::rnn_tanh_cell",
        "aten::rnn_relu_cell", "CudnnConvolutionBackward", "BmmBackward0",
        "aten::cudnn_convolution_transpose_backward", "CudnnConvolutionTransposeBackward", "MmBackward",
        "aten::cudnn_convolution_backward_weight", "aten::addmm_", "AddmvBackward", "MvBackward",
        "aten::cudnn_convolution_transpose_backward_weight", "aten::cudnn_convolution_transpose_backward_input",
        "AddmmBackward", "aten::cudnn_convolution_backward_input", "AddbmmBackward",
        "aten::cudnn_convolution_backward",
    }
)  # fmt: skip
ELIGIBLE = AUTOCAST_OPS | {
    "aten::addbmm_", "aten::baddbmm_", "aten::einsum", "aten::conv_depthwise3d", "aten::convolution_overrideable",
    "aten::_convolution_mode", "aten::convolution_backward", "aten::convolution_backward_overrideable",
    "aten::miopen_convolution", "aten::miopen_convolution_transpose", "aten::cudnn_convolution_relu",
    "aten::cudnn_convolution_add_relu", "aten::slow_conv_transpose2d", "aten::_addmm_activation",
    "aten::linear_backward", "aten::matmul_backward", "aten::mkldnn_linear", "aten::_prelu_kernel", "aten::_cudnn_rnn",
    "aten::_cudnn_rnn_backward", "aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu",
    "aten::scaled_dot_product_attention", "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_backward", "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_efficient_attention_backward", "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_cudnn_attention_backward", "aten::_scaled_dot_product_attention_math",
    "aten::_flash_attention_forward", "aten::_flash_attention_backward", "aten::_efficient_attention_forward",
    "aten::_efficient_attention_backward", "aten::_cudnn_attention_forward", "aten::_cudnn_attention_backward",
    "aten::_native_multi_head_attention", "aten::_scaled_mm", "aten::_scaled_grouped_mm", "aten::_grouped_mm",
    "aten::_int_mm", "aten::_weight_int4pack_mm", "aten::_weight_int8pack_mm", "aten::_mixed_dtypes_linear",
    "aten::_sparse_semi_structured_linear", "aten::_sparse_semi_structured_mm", "aten::_sparse_semi_structured_addmm",
    "aten::_cslt_sparse_mm",
    "MmBackward0", "AddmmBackward0", "AddmmBackward1", "AddmvBackward0", "MvBackward0", "BmmBackward1",
    "BaddbmmBackward0", "AddbmmBackward0", "ConvolutionBackward0", "CudnnConvolutionBackward0",
    "CudnnConvolutionTransposeBackward0", "MkldnnConvolutionBackward0", "LinearBackward0", "MatmulBackward0",
    "CudnnRnnBackward0", "CudnnRnnBackward1", "ScaledDotProductFlashAttentionBackward0",
    "ScaledDotProductEfficientAttentionBackward0", "ScaledDotProductCudnnAttentionBackward0",
}  # fmt: skip
_ORDINARY = re.compile(
    r"simt|Simt|(?<![a-z])[dhf]fma|sgemm|dgemm_"
    r"|fmha_cutlass[FB]_f32\w{0,200}_sm[567]\d|fmha_cutlass[FB]_\w{0,200}_sm5\d"
)
_HELPER = re.compile(  # helpers beside the products of the families below
    r"triton_(?:poi|per|red)_|execute_split_k_kernel|splitKreduce|ReduceSplitK|reduce_wgrad|SubTensorOp"
    r"|dot_do_o|convert_dq|convert_dkv|clear_dkvaccum|splitkv_combine|FwdCombine|BwdPreprocess|BwdPostprocess"
)
_VECTOR = re.compile(r"gemv|dot_kernel|gemmk1_")
_TENSOR = re.compile(
    r"[a-z](?:884|1688|8816|8832|16816|16832|16864|161616)(?!\d)"  # shapes of instructions: s1688gemm, i16832gemm
    r"|(?:^|[^a-zA-Z])(?:w?g|h|i|d|b|q|o|u|utc|utch|utcq|w)mma(?![a-z])|W?[Gg]mma(?![a-z])|GMMA|UMMA|tcgen05"
    r"|[Tt]ensor[Oo]p|tensor\d+x\d+x\d+|xmma_"
    r"|nvjet|cutlass3x|[sS][mM](?:90|1[0-9]\d)[a-z]?_(?:xmma|gemm|fp8|bf16|\d+x\d+)"
    r"|Mainloop[sS]m(?:90|1[0-9]\d)|deep_gemm::\w{0,200}gemm"
    r"|flash_(?:fwd|bwd)\w{0,200}kernel|flash_(?:fprop|bprop|dgrad|wgrad)|FlashAttn(?:Fwd|Bwd)|_sdpa_\w{0,200}flash"
    r"|fmha_(?!cutlass)|fmhaSm\d|fmha_cutlass[FB]_|Fmha[FB]wd|flashinfer::\w{0,200}Prefill|_unified_attention_[23]d"
    r"|dgrad_1x1_stride_2x2|first_layer_wgrad_kernel|conv1x1|conv2d_c1_k1|direct_group"
    r"|triton_tem_\w{0,500}(?:mm|attention|conv)|_matmul_ogs_|fused_moe_kernel|(?:^|\W)[Mm]arlin\w{0,200}<|^bmm_\w*_sm1\d\d"
    r"|Cijk_\w{0,1000}_MI\d+x\d+x\d+|mfma|_xdl|gtcx|^(?:attn|sage)_[fb]wd"  # AMD
    r"|DPAS|(?<![a-z])dpas|[xX][mM][xX]"  # Intel
)


def precision_of_name(name: str) -> str | None:
    """Returns the precision, a key of BITS; None if the name does not show it."""
    name = name[:NAME_CHARS]
    return next((precision for precision, pattern in _BY_NAME if pattern.search(name)), None)


def precision_number(precision: str | None) -> int:
    """Returns the place in PRECISIONS, or UNKNOWN."""
    return UNKNOWN if precision is None else PRECISIONS.index(precision)


def precision_name(number: int) -> str | None:
    """Returns the precision with this number; None for UNKNOWN."""
    return None if number == UNKNOWN else PRECISIONS[number]


def precision_of_types(types: object) -> str | None:
    """Returns the narrowest of an operator's input types, in Kineto's names ("c10::BFloat16"); None if none is
    known.
    """
    if not isinstance(types, list):
        return None
    texts = [text.lower() for text in types if isinstance(text, str)]
    return next((found for word, found in _BY_TYPE.items() if any(_is(word, text) for text in texts)), None)


def _is(word: str, text: str) -> bool:
    """Returns whether the type is of this kind: float8 has variants, "long int" and "float" are complete names."""
    name = text.removeprefix("c10::").removeprefix("at::")
    return name.startswith(word) if word == "float8" else name == word


def kernel_uses_tensor_cores(name: str) -> bool:
    """Returns whether a kernel of this name multiplies with tensor cores."""
    name = name[:NAME_CHARS]
    return _TENSOR.search(name) is not None and _ORDINARY.search(name) is None and _HELPER.search(name) is None


def uses_tensor_cores(context: Context) -> Flags:
    """Returns for each string of the trace whether a kernel of that name uses tensor cores."""
    texts = context.trace.strings
    found = matches(texts, _TENSOR)
    for number in np.flatnonzero(found).tolist():
        found[number] = kernel_uses_tensor_cores(texts[number])
    return found


def names_tell(vendor: GpuVendor) -> bool:
    """Returns whether names of kernels on a vendor's GPUs show if they use tensor cores."""
    return vendor not in (GpuVendor.INTEL, GpuVendor.OTHER)


def no_tensor_core_gain(context: Context) -> Flags:
    """Returns for each string of the trace whether a kernel of that name is a helper or multiplies with a vector."""
    texts = context.trace.strings
    return matches(texts, _HELPER) | matches(texts, _VECTOR)


def eligible_op_names(context: Context) -> Flags:
    """Returns for each string of the trace whether an operator of that name can use tensor cores."""
    texts = context.trace.strings
    return np.fromiter((_operator(text) in ELIGIBLE for text in texts), np.bool_, len(texts))


def _operator(name: str) -> str:
    """Returns the name without the autograd engine's prefix of backward operators."""
    return name.removeprefix("autograd::engine::evaluate_function: ")
