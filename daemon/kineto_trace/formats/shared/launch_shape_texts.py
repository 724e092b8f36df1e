"""Ready-made texts for the launch shapes of kernels.

A training step launches the same few hundred shapes over and over. Grid, block, registers, shared memory and all the
occupancy figures depend on the shape alone, so their text is made once per shape.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.codec import Interner, PreparedTexts
from kineto_trace.kernel_traits.occupancy import Occupancy, Shapes, occupancy, usable

_COLUMNS = (
    "grid_x",
    "grid_y",
    "grid_z",
    "block_x",
    "block_y",
    "block_z",
    "static_shared_memory",
    "dynamic_shared_memory",
    "registers",
    "device",
)
_CACHED_SHAPES = 50_000  # at this size the cache is cleared, so that it does not grow with the trace

_Shape = tuple[int, ...]  # the values of _COLUMNS


class LaunchShapes:
    """Texts by shape. devices: Kineto's deviceProperties items."""

    def __init__(self, devices: Sequence[Mapping[str, Any]]) -> None:
        self._devices = {device["id"]: device for device in devices if usable(device)}
        self._texts: dict[_Shape, bytes] = {}

    def texts(self, kernels: Mapping[str, npt.NDArray[Any]]) -> tuple[npt.NDArray[np.uint32], PreparedTexts]:
        """Returns a text number for each kernel, and the arguments ',"registers per thread":…' for each number."""
        numbers, shapes = _distinct(kernels)
        missing = [shape for shape in shapes if shape not in self._texts]
        if len(self._texts) + len(missing) > _CACHED_SHAPES:
            self._texts.clear()
            missing = shapes
        self._texts.update(self._render(missing))
        return numbers, PreparedTexts([self._texts[shape] for shape in shapes])

    def _render(self, shapes: Sequence[_Shape]) -> dict[_Shape, bytes]:
        rendered: dict[_Shape, bytes] = {}
        by_device: dict[int, list[_Shape]] = {}
        for shape in shapes:
            by_device.setdefault(shape[-1], []).append(shape)
        for device, group in by_device.items():
            figures = occupancy(self._devices[device], _as_shapes(group)) if device in self._devices else None
            for row, shape in enumerate(group):
                rendered[shape] = _text(shape, figures, row)
        return rendered


def _distinct(kernels: Mapping[str, npt.NDArray[Any]]) -> tuple[npt.NDArray[np.uint32], list[_Shape]]:
    """Returns a shape number for each kernel, and the distinct shapes.

    The result is exact: pairs of 32-bit values are numbered, then pairs of those numbers, until one number is left.
    """
    columns = [kernels[name].astype(np.uint32) for name in _COLUMNS]
    while len(columns) > 1:
        pairs = [
            Interner().intern(high.astype(np.uint64) << np.uint64(32) | low)
            for high, low in zip(columns[::2], columns[1::2], strict=False)
        ]
        columns = pairs + columns[len(pairs) * 2 :]
    numbers = columns[0]
    first = np.zeros(int(numbers.max(initial=0)) + 1, np.int64)
    first[numbers[::-1]] = np.arange(len(numbers))[::-1]
    values = np.stack([kernels[name][first].astype(np.int64) for name in _COLUMNS], axis=1)
    return numbers, [tuple(row) for row in values.tolist()]


def _as_shapes(group: Sequence[_Shape]) -> Shapes:
    values = np.array(group, np.int64).clip(0, 2**31 - 1)
    return Shapes(
        blocks=values[:, 0] * values[:, 1] * values[:, 2],
        threads=values[:, 3] * values[:, 4] * values[:, 5],
        static_shared_memory=values[:, 6],
        dynamic_shared_memory=values[:, 7],
        registers=values[:, 8],
    )


def _text(shape: _Shape, figures: Occupancy | None, row: int) -> bytes:
    grid_x, grid_y, grid_z, block_x, block_y, block_z, static, dynamic, registers, _ = shape
    parts = [f',"registers per thread":{registers},"shared memory":{static + dynamic}']
    if figures is not None:
        parts.append(
            f',"blocks per SM":{figures.blocks_per_sm[row]:.6f},"warps per SM":{figures.warps_per_sm[row]:.6f}'
        )
    parts.append(f',"grid":[{grid_x},{grid_y},{grid_z}],"block":[{block_x},{block_y},{block_z}]')
    if figures is not None:
        parts.append(f',"est. achieved occupancy %":{figures.percent[row]},"occupancy":{{{_details(figures, row)}}}')
    return "".join(parts).encode()


def _details(figures: Occupancy, row: int) -> str:
    values = {
        "activeBlocksPerMultiprocessor": figures.active_blocks,
        "limitingFactors": figures.limiting_factors,
        "blockLimitRegs": figures.limit_registers,
        "blockLimitSharedMem": figures.limit_shared_memory,
        "blockLimitWarps": figures.limit_warps,
        "blockLimitBlocks": figures.limit_blocks,
        "blockLimitBarriers": figures.limit_barriers,
        "allocatedRegistersPerBlock": figures.allocated_registers,
        "allocatedSharedMemPerBlock": figures.allocated_shared_memory,
    }
    return ",".join(f'"{name}":{column[row]}' for name, column in values.items())
