"""Tensors whose type or layout makes operators on the CPU slow: float64, and images that are not channels-last.

Types and strides are known only where inputs were recorded (--record-shapes); without them there is no finding.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.host_findings.host_figures import LEAST_MOMENTS, is_enough, per_step
from kineto_trace.analysis.host_time.host_moments import host_steps
from kineto_trace.kernel_traits.kernel_types import matches
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import gpu, ops
from kineto_trace.structure.event_arguments import NOTHING, argument_objects

DOUBLE_GAIN = 0.5  # float64 has twice the bytes, and half as many numbers in a vector register
LAYOUT_GAIN = 0.3  # of convolutions, normalisation and pooling, which reorder or walk over distant numbers
_CONVOLUTION = re.compile(r"^aten::(?:mkldnn_)?convolution")
_IMAGES = 4  # dimensions


def number_types(context: Context) -> Iterator[Finding]:
    """Yields a finding if operators on the CPU compute in float64."""
    took = _self_time(context, "Input type", lambda types: "double" in types)
    if is_enough(context, took * DOUBLE_GAIN, LEAST_MOMENTS):
        yield Finding(
            name="float64",
            title="Operators compute in float64 (double)",
            saving_ns=int(took * DOUBLE_GAIN),
            advice="Use float32 (or bfloat16): look for .double(), dtype=float64, and data from numpy, whose numbers "
            "are float64 unless they are converted.",
            evidence=f"{per_step(context, took)} in operators with float64 inputs; the saving assumes half of it",
        )


def layouts(context: Context) -> Iterator[Finding]:
    """Yields a finding if a convolution network on the CPU keeps its images channel by channel."""
    names = matches(context.trace.strings, _CONVOLUTION)[context.trace.table("cpu_op")["name"]]
    if not names.any() or not _self_time(context, "Input Strides", _is_contiguous, names):
        return
    took = _self_time(context, "Input Strides", _is_contiguous)
    if is_enough(context, took * LAYOUT_GAIN, LEAST_MOMENTS):
        yield Finding(
            name="not_channels_last",
            title="Convolutions run on images that are stored channel by channel",
            saving_ns=int(took * LAYOUT_GAIN),
            advice="Convert the model and its inputs with .to(memory_format=torch.channels_last).",
            evidence=f"{per_step(context, took)} in operators on images with contiguous channels; the saving assumes "
            f"{100 * LAYOUT_GAIN:.0f} % of it",
        )


def _is_contiguous(strides: Any) -> bool:
    """Tells whether the first input has four dimensions, the last one dense and the second one not."""
    first = strides[0] if isinstance(strides, list) and strides else None
    return isinstance(first, list) and len(first) == _IMAGES and first[3] == 1 and first[1] > 1


def _self_time(
    context: Context, argument: str, chosen: Callable[[Any], bool], among: npt.NDArray[np.bool_] | None = None
) -> float:
    """The time (ns) of operators inside the steps, without those inside them, whose argument is of the kind."""
    if len(context.get(gpu)):
        return 0.0
    places, values = argument_objects(context, "cpu_op", argument)
    fits = np.array([value is not None and chosen(value) for value in values] + [False])[places]
    table, tree = context.trace.table("cpu_op"), context.get(ops)
    fits &= (places != NOTHING) & (context.get(host_steps).of(table["start"]) >= 0)
    if among is not None:
        fits &= among
    return float(tree.nested.tree.self_time[tree.place][fits].sum())
