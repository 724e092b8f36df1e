"""Floating-point operations and bytes of one call, as torch.utils.flop_counter counts them."""

from typing import Any

import pytest
from kineto_trace.analysis.kernels.operator_work import CallWork, work_of

IMAGE, WEIGHT = [2, 3, 8, 8], [4, 3, 3, 3]
HEADS = [2, 4, 16, 8]


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
