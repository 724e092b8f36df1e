"""What the units of a GPU did, as totals that only grow, and what that was between two readings. Pure.

Theory of operation
    Several ask for the same GPU at intervals of their own: a scraper every 15 s, `kinetoctl top` every 2 s, lines of
    JSON every 10 s. So there are totals since a beginning, as the NVLinks and the energy have, and each compares two of
    them: nobody's interval cuts another one's short, and nothing that happened in between is missed.

    A share is counted as seconds of the whole GPU: 0.25 s are a quarter of the multiprocessors for a second, or all of
    them for 0.25 s. Totals can be compared only if they have the same beginning (`since_ns`). Whoever counts begins
    anew after any failure, so that a difference never spans a time in which nobody counted.
"""

import msgspec

SHARES = (
    "graphics_active",
    "sm_active",
    "sm_occupancy",
    "tensor_active",
    "dram_active",
    "fp64_active",
    "fp32_active",
    "fp16_active",
)
BYTES = ("pcie_transmit", "pcie_receive", "nvlink_transmit", "nvlink_receive")
NAMES = (*SHARES, *BYTES)


class GpuActivity(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of one GPU.

    totals: by NAMES, in seconds of the whole GPU for SHARES, in bytes for BYTES. What the GPU does not count is left
    out.
    """

    since_ns: int  # monotonic; the beginning of the totals
    seconds: float = 0.0  # that were observed since then
    totals: dict[str, float] = {}


def between(before: GpuActivity | None, now: GpuActivity | None) -> dict[str, float]:
    """Shares, 0 to 1, and bytes per second from one reading to a later one, by NAMES.

    Empty if one of them is missing, they have different beginnings, or nothing was observed in between.
    """
    if before is None or now is None or before.since_ns != now.since_ns or now.seconds <= before.seconds:
        return {}
    seconds = now.seconds - before.seconds
    rates = {name: (total - before.totals.get(name, 0.0)) / seconds for name, total in now.totals.items()}
    return {name: min(max(rate, 0.0), 1.0) if name in SHARES else max(rate, 0.0) for name, rate in rates.items()}
