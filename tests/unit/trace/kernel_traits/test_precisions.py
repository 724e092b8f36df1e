"""Precision by the names that libraries give their kernels, and by the types of inputs."""

import pytest
from kineto_trace.kernel_traits.precisions import precision_of_name, precision_of_types


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
