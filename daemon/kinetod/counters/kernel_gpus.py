"""Lists GPUs from the kernel drivers, whether or not the vendor's library works."""

from collections.abc import Iterator
from pathlib import Path

from kinetod.base.safe_text import clean
from kinetod.counters.interface import CounterDevice
from kinetod.processes.drm_gpus import PROC, SYS, drm_gpus, nvidia_gpus
from kinetod.processes.identity import text_of

NVIDIA, AMD, INTEL = "nvidia", "amd", "intel"
_NAMES = {AMD: "AMD GPU", INTEL: "Intel GPU"}


def kernel_gpus(vendor: str, sys: Path = SYS, proc: Path = PROC) -> list[CounterDevice]:
    """The GPUs of NVIDIA, AMD or INTEL by PCI address, numbered as everywhere in kinetod."""
    return list(_nvidia(proc)) if vendor == NVIDIA else list(_drm(vendor, sys, proc))


def _nvidia(proc: Path) -> Iterator[CounterDevice]:
    for index, address in enumerate(nvidia_gpus(proc)):
        facts = dict(_lines(proc / "driver/nvidia/gpus" / address / "information"))
        yield CounterDevice(
            uuid=clean(facts.get("GPU UUID", "") or address, 64),
            index=index,
            name=clean(facts.get("Model", "") or "NVIDIA GPU", 128),
            chip="",
            pci_bus_id=address,
        )


def _drm(vendor: str, sys: Path, proc: Path) -> Iterator[CounterDevice]:
    for gpu in drm_gpus(sys, proc):
        if gpu.vendor == vendor:
            yield CounterDevice(
                uuid=clean(first_line(gpu.folder / "unique_id") or gpu.pci_bus_id, 64),
                index=gpu.number,
                name=clean(first_line(gpu.folder / "product_name") or _NAMES[vendor], 128),
                chip="",
                pci_bus_id=gpu.pci_bus_id,
            )


def first_line(path: Path) -> str:
    """The first line of a kernel file; empty if it cannot be read."""
    return next((line.strip() for line in text_of(path).splitlines()), "")


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    for line in text_of(path).splitlines():
        name, _, value = line.partition(":")
        yield name.strip(), value.strip()
