"""Speed of products beside what the GPU can do."""

import json
from typing import Any

import pytest
from kineto_trace.analysis.gpu_time_views import NO_GPU
from kineto_trace.analysis.overview.flop_views import CallWork, flops_utilization, operator_flops, work_of
from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Trace
from support.trace_files import traces

H200 = {**traces.H100, "name": "NVIDIA H200"}
SIZES = [[4096, 4096], [4096, 4096]]
FLOP = 2 * 4096**3
BYTES = 3 * 2 * 4096**2
IMAGE, WEIGHT = [2, 3, 8, 8], [4, 3, 3, 3]
HEADS = [2, 4, 16, 8]


def inputs(sizes: list[list[int]], kind: str = "c10::BFloat16") -> str:
    return json.dumps({"Input Dims": sizes, "Input type": [kind] * len(sizes), "Concrete Inputs": [""] * len(sizes)})[
        1:-1
    ]


def trained(*, shapes: bool = True, gpu: bool = True, kind: str = "c10::BFloat16", **changes: Any) -> Trace:
    """A product of 0.2 ms, one of a matrix with a vector of 0.1 ms, and a kernel of no product, 0.1 ms each."""
    ops = [
        {"name": "aten::matmul", "start": 0, "duration": 20_000, "finished": 1},
        {"name": "aten::mm", "start": 1_000, "duration": 9_000, "finished": 1, "inputs": inputs(SIZES, kind)},
        {
            "name": "aten::mm",
            "start": 11_000,
            "duration": 8_000,
            "finished": 1,
            "inputs": inputs([[1, 4096], [4096, 4096]], kind),
        },
        {"name": "aten::relu", "start": 30_000, "duration": 1_000, "finished": 1},
    ]
    if not shapes:
        ops = [{name: value for name, value in op.items() if name != "inputs"} for op in ops]
    starts = (2_000, 12_000, 30_100)
    rows: dict[str, list[dict[str, Any]]] = {"cpu_op": ops}
    if gpu:
        rows["cuda_runtime"] = [
            {"name": "cudaLaunchKernel", "start": start, "duration": 100, "correlation": at + 1}
            for at, start in enumerate(starts)
        ]
        rows["kernel"] = [
            {"name": "nvjet_tst_128x256", "start": 50_000, "duration": 200_000, "correlation": 1},
            {
                "name": "gemv2T_kernel_val<int, int, __nv_bfloat16>",
                "start": 300_000,
                "duration": 100_000,
                "correlation": 2,
            },
            {"name": "triton_poi_fused_relu_0", "start": 500_000, "duration": 100_000, "correlation": 3},
        ]
    return traces.trace(rows, **{"devices": (H200,), **changes})


def test_the_speed_of_a_product_stands_beside_the_peak_and_what_memory_allows() -> None:
    large, small = operator_flops(Context(trained())).rows()
    assert (large["name"], large["input_shape"], large["precision"]) == ("aten::mm", str(SIZES), "bf16")
    assert (large["calls"], large["call_gflop"], large["device_us"]) == (1, FLOP / 1e9, 200)
    assert large["speed_tflop_s"] == pytest.approx(FLOP / 200e-6 / 1e12)
    assert (large["peak_tflop_s"], large["bound"]) == (989.4, "arithmetic")
    assert large["peak_pct"] == pytest.approx(large["roof_pct"])
    assert large["intensity_flop_byte"] == pytest.approx(FLOP / BYTES)
    assert small["bound"] == "memory"
    assert small["roof_tflop_s"] == pytest.approx(4.8 * small["intensity_flop_byte"])
    assert small["roof_pct"] == pytest.approx(100 * small["speed_tflop_s"] / small["roof_tflop_s"])


def test_an_operator_around_the_product_does_not_count_it_again() -> None:
    ops = [
        {"name": "aten::convolution", "start": 0, "duration": 9_000, "finished": 1},
        {"name": "aten::cudnn_convolution", "start": 1_000, "duration": 5_000, "finished": 1},
    ]
    sizes: list[Any] = [[1, 8, 8, 8], [8, 8, 3, 3]]
    outer = ["", "", "", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"]
    inner = ["", "", "[1, 1]", "[1, 1]", "[1, 1]", "1"]
    for op, texts in zip(ops, (outer, inner), strict=True):
        dims = sizes + [[]] * (len(texts) - 2)
        op["inputs"] = json.dumps({"Input Dims": dims, "Input type": ["float"] * 2, "Concrete Inputs": texts})[1:-1]
    (row,) = operator_flops(Context(traces.trace({"cpu_op": ops}))).rows()
    assert row["name"] == "aten::cudnn_convolution"


def test_float32_on_tensor_cores_is_tf32() -> None:
    precisions = operator_flops(Context(trained(kind="float"))).values("precision")
    assert precisions == ["tf32", "fp32"]  # nvjet uses tensor cores, gemv does not


def test_without_a_gpu_the_speed_is_that_of_the_host() -> None:
    found = operator_flops(Context(trained(gpu=False)))
    (large, _) = found.rows()
    assert large["speed_tflop_s"] == pytest.approx(FLOP / 9e-6 / 1e12)
    assert (large["device_us"], large["peak_pct"], large["bound"]) == (None, None, None)
    assert found.notes == (NO_GPU,)


def test_an_unknown_gpu_is_named_and_its_peaks_can_be_given() -> None:
    context = Context(trained(devices=({**H200, "name": "Quadro X"},)))
    found = operator_flops(context)
    assert found.values("peak_tflop_s") == [None, None]
    assert "the peak speeds of Quadro X are not known" in found.notes[0]
    given = operator_flops(context, peak=500.0, bandwidth=1000.0)
    assert given.values("peak_tflop_s") == [500, 500]
    assert given.values("bound") == ["arithmetic", "memory"]
    assert given.notes == ()


def test_a_trace_without_shapes_says_how_to_record_them() -> None:
    for found in (operator_flops(Context(trained(shapes=False))), flops_utilization(Context(trained(shapes=False)))):
        assert found.rows() == []
        assert "--record-shapes" in found.notes[0]


def test_a_trace_without_products_says_so() -> None:
    assert "no operators whose floating-point operations" in operator_flops(Context(traces.trace({}))).notes[0]


def test_utilization_is_what_the_operations_would_take_at_their_peak() -> None:
    (row,) = flops_utilization(Context(trained())).rows()
    assert (row["gpu"], row["precision"], row["peak_tflop_s"]) == ("NVIDIA H200", "bf16", 989.4)
    assert row["time_us"] == 600  # from the first operator to the end of the last kernel
    flop = FLOP + 2 * 4096**2
    assert row["work_tflop"] == pytest.approx(flop / 1e12)
    assert row["utilization_pct"] == pytest.approx(100 * flop / 989.4e12 / 600e-6)
    assert row["known_pct"] == pytest.approx(75)  # 300 of 400 us


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_what_is_no_speed_is_refused(value: float) -> None:
    context = Context(trained())
    with pytest.raises(ViewError, match="must be positive numbers, or 0"):
        operator_flops(context, bandwidth=value)
    with pytest.raises(ViewError, match="must be positive numbers, or 0"):
        flops_utilization(context, peak=value)


def recorded(*inputs: Any) -> dict[str, Any]:
    """Sizes where an input is a list, otherwise the text of its value."""
    return {
        "Input Dims": [each if isinstance(each, list) else [] for each in inputs],
        "Concrete Inputs": ["" if isinstance(each, list) else each for each in inputs],
    }


@pytest.mark.parametrize(
    ("name", "inputs", "flop", "elements"),
    [
        ("aten::mm", ([64, 512], [512, 256]), 2 * 64 * 512 * 256, 64 * 512 + 512 * 256 + 64 * 256),
        ("aten::addmm", ([256], [64, 512], [512, 256], "1", "1"), 2 * 64 * 512 * 256, 64 * 512 + 512 * 256 + 64 * 256),
        ("aten::bmm", ([3, 4, 5], [3, 5, 6]), 2 * 3 * 4 * 5 * 6, 60 + 90 + 72),
        (
            "aten::convolution",
            (IMAGE, WEIGHT, [4], "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"),
            2 * (2 * 4 * 4 * 4) * 27,
            384 + 128 + 108,
        ),
        (
            "aten::cudnn_convolution",
            (IMAGE, WEIGHT, "[1, 1]", "[2, 2]", "[1, 1]", "1", "False", "True", "True"),
            2 * (2 * 4 * 4 * 4) * 27,
            384 + 128 + 108,
        ),
        (  # transposed: each pixel of the input meets all weights of its channel
            "aten::convolution",
            ([2, 3, 9], [3, 5, 3], [5], "[1]", "[0]", "[1]", "True", "[0]", "1"),
            2 * 54 * 15,
            54 + 54 + 45,
        ),
        (  # the gradient of the image is not wanted, as in a first layer
            "aten::convolution_backward",
            (
                [2, 4, 8, 8],
                IMAGE,
                WEIGHT,
                "[4]",
                "[1, 1]",
                "[1, 1]",
                "[1, 1]",
                "False",
                "[0, 0]",
                "1",
                "[False, True, True]",
            ),
            2 * 512 * 27,
            512 + 384 + 108 + 108,
        ),
        (
            "aten::_scaled_dot_product_flash_attention",
            (HEADS, HEADS, HEADS, "0.", "False", "False", ""),
            2 * (2 * 4 * 16 * 16) * 16,
            4 * 1024,
        ),
        (
            "aten::_scaled_dot_product_flash_attention",
            (HEADS, HEADS, HEADS, "0.", "True", "False", ""),
            (2 * 4 * 16 * 16) * 16,
            4 * 1024,
        ),
        (  # two products forward, five backward
            "aten::_scaled_dot_product_flash_attention_backward",
            (HEADS, HEADS, HEADS, HEADS, HEADS, [2, 4, 16], "", "", "16", "16", "0.", "False", "", "", ""),
            2 * (2 * 4 * 16 * 16) * 40,
            8 * 1024,
        ),
    ],
)
def test_operations_and_elements_of_a_call(name: str, inputs: tuple[Any, ...], flop: int, elements: int) -> None:
    assert work_of(name, recorded(*inputs)) == CallWork(flop, elements)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("aten::add", recorded([4], [4])),
        ("aten::mm", {}),
        ("aten::mm", {"Input Dims": "[[4, 4], [4, 4]]"}),
        ("aten::mm", recorded([64, 512], [511, 256])),
        ("aten::mm", recorded([64, -512], [-512, 256])),
        ("aten::mm", recorded([1 << 50, 4], [4, 4])),
        ("aten::mm", recorded([True, 4], [4, 4])),
        ("aten::bmm", recorded([3, 4, 5], [2, 5, 6])),
        ("aten::convolution", recorded(IMAGE, WEIGHT, [4], "[0, 0]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1")),
        ("aten::convolution", recorded(IMAGE, WEIGHT, [4], "", "", "", "", "", "")),
        ("aten::convolution", recorded(IMAGE, WEIGHT, [4], "[[1]]", "[1]", "[1]", "False", "[0]", "1")),
        ("aten::convolution_backward", recorded(IMAGE, IMAGE, WEIGHT)),
        ("aten::_scaled_dot_product_flash_attention", recorded(HEADS, HEADS, [2, 4, 8, 8], "0.", "False")),
        ("aten::_scaled_dot_product_flash_attention", recorded(HEADS, HEADS, HEADS, "0.", "1")),
    ],
)
def test_inputs_that_do_not_fit_give_nothing(name: str, arguments: dict[str, Any]) -> None:
    assert work_of(name, arguments) is None
