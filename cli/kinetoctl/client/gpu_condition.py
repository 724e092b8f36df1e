"""Conditions on what a GPU does. Pure."""

from dataclasses import dataclass

from kineto_protos.units import format_duration

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
