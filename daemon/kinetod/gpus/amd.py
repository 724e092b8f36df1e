"""AMD's GPUs through AMD SMI (pyrsmi)."""

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kineto_trace.base.install_advice import install_advice

from kinetod.base.safe_text import clean
from kinetod.gpus.gpu_types import GpuState, LibraryError, LibraryState

_DRIVER_VERSION = Path("/sys/module/amdgpu/version")
_ERROR = -1  # returned by pyrsmi's functions instead of raising


class AmdSmi:
    """AMD SMI. `module` is pyrsmi.rocml (default: the installed one)."""

    name = "amdsmi"

    def __init__(self, module: Any = None) -> None:
        self._smi: Any = module

    def open(self) -> str:
        """Loads libamd_smi.so; returns the driver's version. Raises LibraryError."""
        if self._smi is None:
            logging.getLogger().setLevel(logging.CRITICAL)  # pyrsmi logs every missing value to the root logger
            try:
                from pyrsmi import rocml
            except ImportError as exc:
                advice = install_advice("pyrsmi")
                raise LibraryError(LibraryState.ABSENT, f"pyrsmi is not installed ({advice})") from exc
            self._smi = rocml
        try:
            self._smi.smi_initialize()
        except Exception as exc:  # it may raise anything
            absent = "not found" in str(exc)  # its wording
            raise LibraryError(LibraryState.ABSENT if absent else LibraryState.FAILED, _said(exc)) from exc
        with contextlib.suppress(OSError):  # an in-tree driver has no version of its own
            return clean(_DRIVER_VERSION.read_text().strip(), 128)
        return ""

    def close(self) -> None:
        """Releases the devices."""
        try:
            self._smi.smi_shutdown()
        except Exception:
            logging.getLogger(__name__).debug("AMD SMI could not be shut down", exc_info=True)

    def read(self) -> list[GpuState]:
        """The current state of every GPU. Raises LibraryError."""
        try:
            return [self._gpu(index) for index in range(self._smi.smi_get_device_count())]
        except Exception as exc:
            raise LibraryError(LibraryState.FAILED, _said(exc)) from exc

    def read_processes(self) -> list[GpuState]:
        """Empty: the library does not report them."""
        return []

    def _gpu(self, index: int) -> GpuState:
        smi = self._smi
        busy = _number(smi.smi_get_device_utilization, index)
        total = _number(smi.smi_get_device_memory_total, index)
        used = _number(smi.smi_get_device_memory_used, index)
        memory_busy = _number(smi.smi_get_device_memory_busy, index)
        return GpuState(
            vendor="amd",
            index=index,
            uuid=clean(str(smi.smi_get_device_uuid(index)), 128),
            name=clean(str(smi.smi_get_device_name(index)), 128),
            pci_bus_id=bus_id(smi.smi_get_device_pci_id(index)),
            device=f"amd{index}",
            memory_total_bytes=None if total is None else int(total),
            memory_used_bytes=None if used is None else int(used),
            utilization=None if busy is None else busy / 100,
            memory_utilization=None if memory_busy is None else memory_busy / 100,
            power_watts=_number(smi.smi_get_device_average_power, index),
        )


def bus_id(number: Any) -> str:
    """Converts pyrsmi's number to a PCI address as the kernel writes it; empty if there is none.

    The domain starts at bit 32 if pyrsmi got it from the package amdsmi, at bit 16 if from the C library.
    """
    if not isinstance(number, int) or number < 0:
        return ""
    return f"{number >> 32 or number >> 16:04x}:{number >> 8 & 0xFF:02x}:{number >> 3 & 0x1F:02x}.{number & 7}"


def _number(function: Callable[[int], Any], index: int) -> float | None:
    value = function(index)
    return float(value) if isinstance(value, (int, float)) and value != _ERROR else None


def _said(exc: Exception) -> str:
    return f"AMD SMI: {clean(str(exc), 200)}"
