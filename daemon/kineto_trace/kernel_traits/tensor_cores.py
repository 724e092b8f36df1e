"""Which kernels use tensor cores and which operators could: told by their names.

Theory of operation
    Kernel names say how they multiply: by the shape of the instruction (s884, h1688, s16816), by its kind (hmma,
    imma, wgmma, tcgen05), by the library that has nothing else (nvjet, CUTLASS 3 and cuBLAS for sm90 and sm100,
    flash attention), or that they do it on ordinary cores (simt, ffma, sgemm), which is decisive: the same family
    xmma_gemm has kernels of both sorts. AMD's matrix instructions (mfma, xdl, gtcx) count as tensor cores, and so do
    Intel's (DPAS, XMX); but oneDNN calls its kernels gemm_kernel and gen_conv, whatever they use, so that shares on
    Intel's GPUs are not known. Beside the
    kernels of a product run helpers that multiply nothing, and products with a vector, which move memory: tensor cores
    have nothing to give to these.

    An operator is eligible if its name is in a list: the operators that autocast runs in half precision, and their
    backward operators, by the names that old and new versions of PyTorch gave them.
"""

import re

import numpy as np
import numpy.typing as npt

from kineto_trace.kernel_traits.gpu_vendors import GpuVendor
from kineto_trace.kernel_traits.kernel_types import matches
from kineto_trace.model.context import Context

Flags = npt.NDArray[np.bool_]

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
    r"|fmha_cutlass[FB]_f32\w*_sm[567]\d|fmha_cutlass[FB]_\w*_sm5\d"
)
_HELPER = re.compile(  # beside the products of the families below
    r"triton_(?:poi|per|red)_|execute_split_k_kernel|splitKreduce|ReduceSplitK|reduce_wgrad|SubTensorOp"
    r"|dot_do_o|convert_dq|convert_dkv|clear_dkvaccum|splitkv_combine|FwdCombine|BwdPreprocess|BwdPostprocess"
)
_VECTOR = re.compile(r"gemv|dot_kernel|gemmk1_")
_TENSOR = re.compile(
    r"[a-z](?:884|1688|8816|8832|16816|16832|16864|161616)(?!\d)"  # shapes of instructions: s1688gemm, i16832gemm
    r"|(?:^|[^a-zA-Z])(?:w?g|h|i|d|b|q|o|u|utc|utch|utcq|w)mma(?![a-z])|W?[Gg]mma(?![a-z])|GMMA|UMMA|tcgen05"
    r"|[Tt]ensor[Oo]p|tensor\d+x\d+x\d+|xmma_"
    r"|nvjet|cutlass3x|[sS][mM](?:90|1[0-9]\d)[a-z]?_(?:xmma|gemm|fp8|bf16|\d+x\d+)"
    r"|Mainloop[sS]m(?:90|1[0-9]\d)|deep_gemm::\w*gemm"
    r"|flash_(?:fwd|bwd)\w*kernel|flash_(?:fprop|bprop|dgrad|wgrad)|FlashAttn(?:Fwd|Bwd)|_sdpa_\w*flash"
    r"|fmha_(?!cutlass)|fmhaSm\d|fmha_cutlass[FB]_|Fmha[FB]wd|flashinfer::\w*Prefill|_unified_attention_[23]d"
    r"|dgrad_1x1_stride_2x2|first_layer_wgrad_kernel|conv1x1|conv2d_c1_k1|direct_group"
    r"|triton_tem_\w*(?:mm|attention|conv)|_matmul_ogs_|fused_moe_kernel|(?:^|\W)[Mm]arlin\w*<|^bmm_\w*_sm1\d\d"
    r"|Cijk_\w*_MI\d+x\d+x\d+|mfma|_xdl|gtcx|^(?:attn|sage)_[fb]wd"  # AMD
    r"|DPAS|(?<![a-z])dpas|[xX][mM][xX]"  # Intel
)


def kernel_uses_tensor_cores(name: str) -> bool:
    """Tells whether a kernel of this name multiplies with tensor cores."""
    return _TENSOR.search(name) is not None and _ORDINARY.search(name) is None and _HELPER.search(name) is None


def uses_tensor_cores(context: Context) -> Flags:
    """For each string of the trace: whether a kernel of that name uses tensor cores."""
    texts = context.trace.strings
    found = matches(texts, _TENSOR)
    for number in np.flatnonzero(found).tolist():
        found[number] = kernel_uses_tensor_cores(texts[number])
    return found


def names_tell(vendor: GpuVendor) -> bool:
    """Tells whether names of kernels on a vendor's GPUs say if they use tensor cores."""
    return vendor not in (GpuVendor.INTEL, GpuVendor.OTHER)


def gains_nothing_from_tensor_cores(context: Context) -> Flags:
    """For each string of the trace: whether a kernel of that name is a helper or multiplies with a vector."""
    texts = context.trace.strings
    return matches(texts, _HELPER) | matches(texts, _VECTOR)


def eligible_op_names(context: Context) -> Flags:
    """For each string of the trace: whether an operator of that name can use tensor cores."""
    texts = context.trace.strings
    return np.fromiter((_operator(text) in ELIGIBLE for text in texts), np.bool_, len(texts))


def _operator(name: str) -> str:
    """Without what the autograd engine puts in front of the names of backward operators."""
    return name.removeprefix("autograd::engine::evaluate_function: ")
