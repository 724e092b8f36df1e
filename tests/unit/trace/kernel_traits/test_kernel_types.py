import pytest
from kineto_trace.kernel_traits.kernel_types import HTA_TYPES, hta_type


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
