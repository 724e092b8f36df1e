"""Conditions on what a GPU does, on the command line: `sm_active<30% for 10s`. Pure."""

import math
import re
from dataclasses import dataclass

from kineto_protos.options import Parsed
from kineto_protos.units import format_duration

from kinetoctl.base.value_types import parse_positive_duration_ns

# Figures of GpuSample (profiler.proto).
SHARES = (
    *("utilization", "memory_utilization", "graphics_active", "sm_active", "sm_occupancy", "tensor_active"),
    *("dram_active", "fp64_active", "fp32_active", "fp16_active"),
)
OTHERS = (
    *("power_watts", "temperature_celsius", "sm_clock_hertz", "memory_clock_hertz"),
    *("pcie_transmit_bytes_per_second", "pcie_receive_bytes_per_second"),
    *("nvlink_transmit_bytes_per_second", "nvlink_receive_bytes_per_second"),
)
FIGURES = (*SHARES, *OTHERS)
DEFAULT_LASTS_NS = 5 * 10**9
_FORM = "NAME<NUMBER or NAME>NUMBER, with or without `for DURATION`, for example 'sm_active<30% for 10s'"
_CONDITION = re.compile(
    r"\s*(?P<figure>\w+)\s*(?P<sign>[<>])\s*(?P<limit>[-+.\deE]+)\s*(?P<percent>%?)(?:\s+for\s+(?P<lasts>\S+))?\s*"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCondition:
    """figure: one of FIGURES. limit: in the unit of its name, of a share from 0 to 1.

    lasts_ns: how long it has to hold.
    """

    figure: str
    below: bool
    limit: float
    lasts_ns: int = DEFAULT_LASTS_NS

    def holds(self, value: float) -> bool:
        """Whether a value is below the limit, or above it."""
        return value < self.limit if self.below else value > self.limit

    def shown(self, value: float) -> str:
        """A value as people read it."""
        return f"{100 * value:.3g} %" if self.figure in SHARES else f"{value:.6g}"

    def __str__(self) -> str:
        sign = "<" if self.below else ">"
        return f"{self.figure} {sign} {self.shown(self.limit)} for {format_duration(self.lasts_ns)}"


def parse_gpu_condition(text: str) -> GpuCondition:
    """Raises ValueError."""
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise ValueError(f"expected {_FORM}, got {text!r}")
    figure = match["figure"]
    if figure not in FIGURES:
        raise ValueError(f"a GPU has no figure {figure!r}; there are {', '.join(FIGURES)}")
    try:
        limit = float(match["limit"])
    except ValueError:
        limit = math.nan
    if not math.isfinite(limit):
        raise ValueError(f"expected {_FORM}, got the number {match['limit']!r}")
    if match["percent"] and figure not in SHARES:
        raise ValueError(f"{figure} is no share: give its limit without %")
    limit = limit / 100 if match["percent"] else limit
    if figure in SHARES and not 0 <= limit <= 1:
        raise ValueError(f"{figure} is a share: give its limit from 0% to 100%, or from 0 to 1")
    lasts_ns = parse_positive_duration_ns(match["lasts"]) if match["lasts"] else DEFAULT_LASTS_NS
    return GpuCondition(figure=figure, below=match["sign"] == "<", limit=limit, lasts_ns=lasts_ns)


GPU_CONDITION = Parsed("condition", parse_gpu_condition)
