"""Precision by the names that libraries give their kernels, and by the types of inputs."""

import numpy as np
import pytest
from kineto_trace.kernel_traits.precisions import (
    eligible_op_names,
    kernel_uses_tensor_cores,
    precision_of_name,
    precision_of_types,
    uses_tensor_cores,
)
from kineto_trace.model.context import Context
from kineto_trace.model.trace import NAME_CHARS
from support.trace_files import traces

FFMA = "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma_aligna4_alignc4_execute_kernel"


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn", "fp16"),
        ("ampere_h16816gemm_128x128_ldg8_stages_64x3_nn", "fp16"),
        ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn", "bf16"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_execute_kernel__5x_cublas", "bf16"),
        ("sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16", "tf32"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x64_16x6_nt_align4>(Params)", "tf32"),
        ("turing_fp16_s1688cudnn_fp16_128x128_ldg8_relu_f2f_exp_small_nhwc_tn_v1", "fp16"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN", "bf16"),
        ("nvjet_sm100_hsh_mma_128x128x64_1_NNT", "fp16"),
        ("nvjet_sm90_hsh_256x128_64x4_1x2_h_bz_coopA_NNT", "fp16"),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "bf16"),
        ("nvjet_sm90_qqtst_128x128_128x6_2x1_v_bz_coopA_algo2_TNT", "fp8"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_i16832gemm_s8_128x256_128x3_tn_align16>(Params)", "int8"),
        ("sm90_xmma_gemm_f64f64_f64f64_f64_nn_n_tilesize128x64x16_tensor16x8x8_execute_kernel__5x_cublas", "fp64"),
        ("sm90_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x256x32_execute_kernel__5x_cublas", "tf32"),
        ("ampere_sgemm_128x64_tn", "fp32"),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize32x32x8_stage3_ffma_execute_kernel", "fp32"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_d884gemm_64x64_16x3_nt_align1>(Params)", "fp64"),
        ("ampere_dgemm_64x64_tn", "fp64"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>", "bf16"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<c10::Half, float, 4>>", "fp16"),
        ("void at::native::elementwise_kernel<128, 2, at::native::(anonymous)::CUDAFunctor_add<float>>", "fp32"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::MulFunctor<double>>", "fp64"),
        ("cutlass3x_sm90_tensorop_s64x128x32gemm_e4m3_e4m3_f32_bf16_bf16_128x128x128", "fp8"),
        ("ampere_int8_i16832gemm_int8_128x128_ldg16", "int8"),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x32x64_MI16x16x1_SN", "bf16"),
        ("Cijk_Alik_Bljk_B_BS_BH_Bias_HA_S_SAV_UserArgs_MT256x128x64_MI16x16x1_SN", "bf16"),
        ("Cijk_Ailk_Bjlk_HHS_BH_MT128x128x32_MI32x32x8x1_SN", "fp16"),
        ("Cijk_Alik_Bljk_SB_Bias_AS_SAV_UserArgs_MT64x16x32_MI16x16x1_SN", "fp32"),
        ("Cijk_Ailk_Bljk_DB_MT64x64x16_MI16x16x4x1_SN", "fp64"),
        ("Cijk_Alik_Bljk_F8BS_BH_Bias_MT128x128x64_MI16x16x1", "fp8"),
        ("Cijk_Alik_Bljk_I8II_BH_MT128x128x64_MI32x32x16", "int8"),
        ("_ZN5aiter24add_rmsnorm_quant_kernelIDF16bDF16bLi256EEEvPT0_", "bf16"),
        ("_ZN2ck16tensor_operation6device16kernel_gemm_xdlIDF16_DF16_EE", "fp16"),
        ("igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt128x128x32", "bf16"),
        ("at::native::xpu::VectorizedElementwiseKernel<8, at::native::xpu::AddFunctor<c10::BFloat16>>", "bf16"),
        ("oneccl_reduce_base<float, 2, 16, 1, 1, 2>", "fp32"),
        ("gemm_kernel", None),
        ("triton_poi_fused_add_0", None),
        ("void at::native::index_kernel<long>", None),
    ],
)
def test_the_narrowest_type_in_a_kernels_name_is_its_precision(name: str, precision: str | None) -> None:
    assert precision_of_name(name) == precision


@pytest.mark.parametrize(
    ("types", "precision"),
    [
        (["c10::BFloat16", "float", ""], "bf16"),
        (["c10::Half", "c10::Half"], "fp16"),
        (["float", "long int"], "fp32"),
        (["double"], "fp64"),
        (["c10::Float8_e4m3fn", "float"], "fp8"),
        (["long int", "ScalarList", "Scalar"], None),
        ([], None),
        ("float", None),
        ([1, None], None),
    ],
)
def test_the_narrowest_floating_type_of_inputs_is_their_precision(types: object, precision: str | None) -> None:
    assert precision_of_types(types) == precision


@pytest.mark.parametrize(
    "name",
    [
        "volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn",
        "turing_fp16_s1688cudnn_fp16_128x128_ldg8_relu_f2f_exp_small_nhwc_tn_v1",
        "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_64x2_nn_align8>(Params)",
        "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x64_16x6_nt_align4>(Params)",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_kernel__5x_cublas",
        "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16_tensor16x8x8_kernel_cudnn",
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN",
        "nvjet_sm100_hsh_mma_128x128x64_1_NNT",
        "cutlass3x_sm90_tensorop_s64x128x16gemm_bf16_bf16_f32_bf16_bf16_128x128x64_warpspecialized",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::MainloopSm90TmaGmmaRs>>",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloop>>>",
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128>>(Params)",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64>>(Params)",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<bf16>::Params)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
        "triton_tem_fused_mm_0",
        "void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 4096u>(float*)",
        "Cijk_Ailk_Bljk_BBS_BH_MT128x128x32_MI32x32x8x1_SN_1LDSB0",
        "attn_fwd.kd",
        "igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt128x256x32_wt32x32x8",
        "_ZN2ck16tensor_operation6device12_GLOBAL__N_139kernel_grouped_conv_fwd_xdl_cshuffle_v3INS_7Problem",
        "bmm_Bfloat16_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3_et128x16_m128x16x32_cga1x1x1_16dp256b_rM_TN_dynBatch_sm100f",
        "fmhaSm100aKernel_QkvE4m3OBfloat16H64PagedKvCausalP16VarSeqQ128Kv128PersistentContext",
        "kernel_unified_attention_2d",
    ],
)
def test_kernels_with_tensor_cores(name: str) -> None:
    assert kernel_uses_tensor_cores(name)


@pytest.mark.parametrize(
    "name",
    [
        FFMA,
        "ampere_sgemm_128x64_nn",
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nn_align1>(Params)",
        "void sgemm_largek_lds64<true, false, 5, 5, 4, 4, 4, 34>(float*)",
        "sm80_xmma_gemm_bf16bf16_bf16f32_f32_nn_n_tilesize64x64x64_tensor16x8x16_execute_split_k_kernel__5x_cublas",
        "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<64>>(Params)",
        "void pytorch_flash::flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<64>>(Params)",
        "fmha_cutlassF_f32_aligned_64x64_rf_sm75(PyTorchMemEffAttention::AttentionKernel<float>::Params)",
        "void at::native::vectorized_elementwise_kernel<4, at::native::lgamma_kernel_cuda>(int)",
        "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernel<float>(long)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(Params)",
        "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false>(Params)",
        "triton_poi_fused_add_mm_0",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)",
        "SubTensorOpWithScalar1d",
        "triton_red_fused_addmm_as_strided_fmha_v3_fwd_mean_24",
    ],
)
def test_kernels_without_tensor_cores(name: str) -> None:
    assert not kernel_uses_tensor_cores(name)


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
    assert np.flatnonzero(uses_tensor_cores(context)).tolist() == [2]
    assert np.flatnonzero(eligible_op_names(context)).tolist() == [0, 4, 5]


def test_a_name_of_megabytes_is_looked_at_in_its_beginning() -> None:
    kernel = "volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn"
    long = "flash_fwd_" * 500_000  # beginnings of what is looked for, each of which could go on to the end
    assert kernel_uses_tensor_cores(kernel + long) and not kernel_uses_tensor_cores(long)
    assert not kernel_uses_tensor_cores("x" * NAME_CHARS + kernel)
