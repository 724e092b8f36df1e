import pytest
from kineto_trace.kernel_traits.kernel_types import HTA_TYPES, communication_names, hta_type
from kineto_trace.model.context import Context
from support.trace_files.traces import trace


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "COMMUNICATION"),
        ("void msccl_ncclKernel_AllGather", "COMMUNICATION"),
        ("hipMemcpyDtoH", "COMMUNICATION"),  # all that begins with hip
        ("Memcpy HtoD (Pinned -> Device)", "MEMORY"),
        ("Memset (Device)", "MEMORY"),
        ("dma0", "MEMORY"),
        ("gemm", "COMPUTATION"),
        ("void cub::Sync_nothing", "OTHER"),
        ("Stream Wait Event", "OTHER"),
        ("my_Memcpy_kernel", "OTHER"),
        ("rcclKernel", "COMPUTATION"),
    ],
)
def test_types_follow_the_patterns_in_their_order(name: str, kind: str) -> None:
    assert HTA_TYPES[hta_type(name)] == kind


@pytest.mark.parametrize(
    ("name", "communicates"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", True),
        ("rcclGenericKernel", True),
        ("void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)", True),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(RankData*)", True),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", False),
        ("triton_red_fused_all_reduce_add_3", False),
    ],
)
def test_kernels_that_reduce_over_ranks_are_communication_whoever_wrote_them(name: str, communicates: bool) -> None:
    assert communication_names(Context(trace({}, strings=(name,)))).tolist() == [communicates]
