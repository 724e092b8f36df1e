"""Versions of rocprofiler-sdk whose records are known: as in kineto_trace/decode/rocprofiler/rocprofiler_layouts."""

from typing import Dict, Tuple

# Major and minor number -> ROCm releases that carry it.
RELEASES: Dict[Tuple[int, int], str] = {
    (1, 0): "7.0",
    (1, 1): "7.1, 7.2",
    (1, 2): "7.2",
    (1, 3): "7.2.4, 7.13, 7.14, 10.0.0",
    (1, 4): "10.0.1",
}


def text_of(version: int) -> str:
    """10305 as people write it: "1.3.5"."""
    return "%d.%d.%d" % (version // 10000, version // 100 % 100, version % 100)
