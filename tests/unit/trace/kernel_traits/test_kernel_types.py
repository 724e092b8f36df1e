import pytest
from kineto_trace.kernel_traits.kernel_types import (
    HTA_TYPES,
    OPERATOR_TYPES,
    OTHER,
    communication_names,
    hta_type,
    operator_type,
    operator_types,
)
from kineto_trace.model.context import Context
from support.trace_files.traces import trace

ANOTHER_MEANING = {"aten::clone", "aten::max", "aten::min", "aten::native_dropout_backward"}  # of several, or a copy


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


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", "matrix product"),
        ("aten::_scaled_mm", "matrix product"),
        ("AddmmBackward0", "matrix product"),
        ("aten::cudnn_convolution", "convolution"),
        ("ConvolutionBackward0", "convolution"),
        ("aten::_scaled_dot_product_flash_attention", "attention"),
        ("aten::_cudnn_rnn", "recurrent layer"),
        ("NativeLayerNormBackward0", "normalization"),
        ("aten::max_pool2d_with_indices", "pooling"),
        ("aten::_log_softmax_backward_data", "softmax or loss"),
        ("aten::embedding_dense_backward", "indexing"),
        ("aten::topk", "sorting"),
        ("aten::dropout", "random numbers"),
        ("aten::add_", "elementwise"),
        ("aten::threshold_backward", "elementwise"),
        ("aten::_foreach_addcdiv_", "elementwise"),
        ("aten::sum", "reduction"),
        ("aten::_foreach_norm", "reduction"),
        ("aten::t", "view"),
        ("UnsafeViewBackward0", "view"),
        ("aten::copy_", "copy or allocation"),
        ("aten::slice_backward", "copy or allocation"),
        ("ToCopyBackward0", "copy or allocation"),
        ("nccl:all_reduce", "communication"),
        ("c10d::allreduce_", "communication"),
        ("Optimizer.step#SGD.step", "optimizer"),
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "data loading"),
        ("autograd::engine::evaluate_function: MmBackward0", "autograd"),
        ("my_library::mm", OTHER),
        ("matmul", OTHER),
        ("", OTHER),
    ],
)
def test_names_say_what_kind_of_work_operators_are(name: str, kind: str) -> None:
    assert operator_type(name) == kind


def test_every_name_of_a_trace_has_a_type() -> None:
    made = trace({"cpu_op": [{"name": "aten::mm"}, {"name": "x"}]})
    found = operator_types(Context(made))
    kinds = {text: OPERATOR_TYPES[number] for text, number in zip(made.strings, found.tolist(), strict=True)}
    assert (kinds["aten::mm"], kinds["x"]) == ("matrix product", "other")


def test_what_pytorch_tags_as_elementwise_or_as_a_reduction_is_so_here() -> None:
    torch = pytest.importorskip("torch")
    wrong = []
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        operator = getattr(torch.ops.aten, name, None) if namespace == "aten" else None
        tags = getattr(getattr(operator, schema.overload_name or "default", None), "tags", ())
        expected = {"pointwise": "elementwise", "reduction": "reduction"}
        kinds = {expected[tag.name] for tag in tags if tag.name in expected}
        found = operator_type(schema.name)
        rare = name.startswith(("special_", "__", "linalg__"))
        if kinds and found not in kinds and schema.name not in ANOTHER_MEANING and not rare:
            wrong.append((schema.name, found))
    assert wrong == []
