"""The sets of metrics that users name, for NVIDIA's chips, in order of importance.

Written after a GH100. Metrics that a chip does not have, or that do not fit into one pass beside those before them, are
left out there. Of several with the same label, the first one that fits is taken.

`dramc__…` counts something else than the use of the memory: 0.9 % during a copy that takes 87 % of it. The counters of
the multiprocessors come in groups. `TPC.TriageCompute.…` are of the group of `sm__cycles_active`; beside a counter of
another group, libcupti 13.0 takes 400 µs to decode a sample, in place of 50: so the overview goes without instructions
on chips that have no such counter of them.
"""

from collections.abc import Mapping, Sequence

from kinetod.counters.interface import CounterMetric

_ELAPSED = ".avg.pct_of_peak_sustained_elapsed"
_PER_SECOND = ".sum.per_second"


def _percent(name: str, label: str, submetric: str = _ELAPSED) -> CounterMetric:
    return CounterMetric(name=name + submetric, label=label, unit="%")


def _bytes(name: str, label: str) -> CounterMetric:
    return CounterMetric(name=name + _PER_SECOND, label=label, unit="B/s")


_GPU = _percent("gr__cycles_active", "GPU busy")
_SM = _percent("sm__cycles_active", "SM busy")  # at least one warp resident
_TENSOR = (
    _percent("TPC.TriageCompute.sm__pipe_tensor_cycles_active_realtime", "Tensor pipe"),
    _percent("sm__pipe_tensor_cycles_active", "Tensor pipe"),
)
_DRAM = _percent("dram__throughput", "DRAM")
_OCCUPANCY = _percent("sm__warps_active", "Occupancy", ".avg.pct_of_peak_sustained_active")
_INSTRUCTIONS = (
    _percent("TPC.TriageCompute.sm__inst_executed_realtime", "Instructions"),
    _percent("sm__inst_issued", "Instructions"),
)
_PCIE = (_bytes("pcie__read_bytes", "PCIe read"), _bytes("pcie__write_bytes", "PCIe write"))
_CLOCK = CounterMetric(name="gpc__cycles_elapsed.avg.per_second", label="GPC clock", unit="Hz")

OVERVIEW = "overview"
SETS: Mapping[str, Sequence[CounterMetric]] = {
    OVERVIEW: (_GPU, _SM, *_TENSOR, _DRAM, _OCCUPANCY, _INSTRUCTIONS[0], *_PCIE, _CLOCK),
    "memory": (
        _DRAM,
        _percent("dram__read_throughput", "DRAM read"),
        _percent("dram__write_throughput", "DRAM write"),
        _bytes("dram__bytes_read", "DRAM bytes read"),
        _bytes("dram__bytes_write", "DRAM bytes written"),
        CounterMetric(name="lts__t_sectors.sum.per_second", label="L2 sectors", unit="sector/s"),
        _GPU,
        _SM,
    ),
    "tensor": (
        *_TENSOR,
        _SM,
        _OCCUPANCY,
        *_INSTRUCTIONS,
        _percent("TPC.TriageCompute.sm__inst_executed_pipe_fma_realtime", "FMA pipe"),
        _percent("sm__pipe_fma_cycles_active", "FMA pipe"),
        _DRAM,
        _GPU,
        _CLOCK,
    ),
    "interconnect": (
        _bytes("nvlrx__bytes", "NVLink received"),
        _bytes("nvltx__bytes", "NVLink sent"),
        *_PCIE,
        _bytes("nvlrx__bytes_data_user", "NVLink received, data"),
        _bytes("nvltx__bytes_data_user", "NVLink sent, data"),
        _GPU,
        _DRAM,
    ),
}
_BY_NAME = {metric.name: metric for metrics in SETS.values() for metric in metrics}


def described(name: str, dimension: str) -> CounterMetric:
    """A metric that a user names. dimension: the vendor's unit of the counter, such as "byte"."""
    if (known := _BY_NAME.get(name)) is not None:
        return known
    return CounterMetric(name=name, label=name, unit=_unit(name, dimension))


def _unit(name: str, dimension: str) -> str:
    submetric = name.partition(".")[2]
    if submetric.endswith(".pct") or submetric == "pct" or ".pct_of_" in f".{submetric}":
        return "%"
    unit = {"byte": "B", "bytes": "B", "cycle": "cycle", "cycles": "cycle"}.get(dimension, dimension)
    if not submetric.endswith("per_second"):
        return unit
    return "Hz" if unit == "cycle" else f"{unit}/s"
