"""Reads files of the kernel drivers of AMD's and Intel's GPUs in /sys: values, and a GPU's sensors."""

import contextlib
from collections.abc import Iterable
from pathlib import Path

# Frequencies in MHz below the PCI device: xe's of its first tile, and i915's below the DRM device.
INTEL_CLOCKS = ("tile0/gt0/freq0/act_freq", "drm/card*/gt/gt0/rps_act_freq_mhz", "drm/card*/gt_act_freq_mhz")


class Sensors:
    """The hardware monitor of a PCI device; the driver's own has the lowest number."""

    def __init__(self, folder: Path) -> None:
        self._folder = next(iter(sorted(folder.glob("hwmon/hwmon*"))), folder / "none")

    def path(self, name: str) -> Path:
        """The path of the file with this name, which may not exist."""
        return self._folder / name

    def labelled_path(self, kind: str, label: str) -> Path | None:
        """The file of the sensor of this kind with this label; None if there is none."""
        for path in sorted(self._folder.glob(f"{kind}*_label")):
            if text(path) == label:
                return self.path(path.name.removesuffix("_label") + "_input")
        return None

    def number(self, name: str, factor: float) -> float | None:
        """The value of a file; None if it does not exist."""
        return scaled(self.path(name), factor)

    def labelled(self, kind: str, label: str, factor: float) -> float | None:
        """The value of the sensor of this kind with this label; None if there is none."""
        path = self.labelled_path(kind, label)
        return None if path is None else scaled(path, factor)


def first(values: Iterable[float | None]) -> float | None:
    """The first value that is not None."""
    return next((each for each in values if each is not None), None)


def whole(path: Path) -> int | None:
    """The integer in a file; None if there is none."""
    content = text(path)
    return int(content) if content.isdecimal() else None


def scaled(path: Path, factor: float) -> float | None:
    """The number in a file, times a factor; None if there is none."""
    with contextlib.suppress(ValueError):
        return float(text(path)) * factor
    return None


def text(path: Path) -> str:
    """The content of a file; empty if it cannot be read."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text().strip()
    return ""
