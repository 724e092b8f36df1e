"""Which kernels use tensor cores and which operators could, by the TensorBoard plug-in's lists of names of 2021.

It looks for parts of the kernels' names only: it misses Hopper's kernels and takes the ffma kernels of xmma_gemm for
kernels with tensor cores.
"""

import numpy as np
import numpy.typing as npt

from kineto_trace.kernel_traits.tensor_cores import AUTOCAST_OPS
from kineto_trace.model.context import Context

Flags = npt.NDArray[np.bool_]

PLUGIN_KERNELS = (
    "h884", "s884", "h1688", "s1688", "hmma", "i8816", "16816", "dgrad_1x1_stride_2x2", "first_layer_wgrad_kernel",
    "conv1x1", "conv2d_c1_k1", "direct_group", "xmma_implicit_gemm", "xmma_sparse_conv",
    "xmma_warp_specialized_implicit_gemm", "xmma_gemm", "xmma_sparse_gemm", "c1688",
)  # fmt: skip


def plugin_uses_tensor_cores(name: str) -> bool:
    """Tells whether the plug-in takes a kernel of this name for one with tensor cores."""
    return any(part in name for part in PLUGIN_KERNELS)


def plugin_tensor_names(context: Context) -> Flags:
    """Returns the same for each string of the trace."""
    texts = context.trace.strings
    return np.fromiter((plugin_uses_tensor_cores(text) for text in texts), np.bool_, len(texts))


def plugin_eligible_names(context: Context) -> Flags:
    """Returns for each string of the trace whether an operator of that name is in the plug-in's list."""
    texts = context.trace.strings
    return np.fromiter((text in AUTOCAST_OPS for text in texts), np.bool_, len(texts))
