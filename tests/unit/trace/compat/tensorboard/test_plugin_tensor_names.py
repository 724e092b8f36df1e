"""The plug-in's names of kernels with tensor cores, and of operators that could use them."""

import numpy as np
from kineto_trace.compat.tensorboard.plugin_tensor_names import (
    PLUGIN_KERNELS,
    plugin_eligible_names,
    plugin_tensor_names,
    plugin_uses_tensor_cores,
)
from kineto_trace.kernel_traits.tensor_cores import AUTOCAST_OPS
from kineto_trace.model.context import Context
from support.trace_files import traces

FFMA = "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma_aligna4_alignc4_execute_kernel"


def test_the_plugin_misses_hopper_and_takes_ffma_for_tensor_cores() -> None:
    assert len(PLUGIN_KERNELS) == 18
    assert plugin_uses_tensor_cores(FFMA)
    assert not plugin_uses_tensor_cores("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN")


def test_names_are_judged_once_per_string() -> None:
    names = [
        "aten::mm",
        "aten::add",
        "nvjet_x",
        FFMA,
        "autograd::engine::evaluate_function: MmBackward0",
        "BmmBackward0",
    ]
    context = Context(traces.trace({}, strings=tuple(names)))
    assert np.flatnonzero(plugin_tensor_names(context)).tolist() == [3]
    assert np.flatnonzero(plugin_eligible_names(context)).tolist() == [0, 5]
    assert len(AUTOCAST_OPS) == 45
