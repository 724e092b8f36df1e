"""Units in which people read values, whichever fits the largest: µs, ms or s; B to GiB; Hz to GHz."""

from collections.abc import Mapping, Sequence

SCALES: Mapping[str, Sequence[tuple[float, str]]] = {  # the largest first
    "us": ((1e6, "s"), (1e3, "ms"), (1, "µs")),
    "bytes": ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")),
    "B/s": ((2**30, "GiB/s"), (2**20, "MiB/s"), (2**10, "KiB/s"), (1, "B/s")),
    "Hz": ((1e9, "GHz"), (1e6, "MHz"), (1e3, "kHz"), (1, "Hz")),
}


def scaled_unit(unit: str, largest: float) -> tuple[float, str]:
    """Returns the factor for values in this unit and the unit that it leads to: the one that fits the largest value."""
    for size, name in SCALES.get(unit, ()):
        if largest >= size or size == 1:
            return 1 / size, name
    return 1.0, unit
