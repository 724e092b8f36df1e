"""Calls of NVML with translated errors: loading, missing values, and lost GPUs."""

from collections.abc import Callable
from typing import Any, TypeVar

from kinetod.base.safe_text import clean
from kinetod.gpus.gpu_types import LibraryError, LibraryState

T = TypeVar("T")

INSTALL = "nvidia-ml-py is not installed (pip install 'kinetod[nvidia]')"


class GpuLost(Exception):
    """The GPU no longer answers."""


class NvmlCalls:
    """NVML. module: pynvml; None: the installed one."""

    def __init__(self, module: Any = None) -> None:
        self.nvml: Any = module

    def open(self) -> None:
        """Loads libnvidia-ml.so.1. Raises LibraryError."""
        if self.nvml is None:
            try:
                import pynvml
            except ImportError as exc:
                raise LibraryError(LibraryState.ABSENT, INSTALL) from exc
            self.nvml = pynvml
        nvml = self.nvml
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as exc:
            missing = exc.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND
            raise LibraryError(LibraryState.ABSENT if missing else LibraryState.FAILED, said(exc)) from exc

    def maybe(self, function: Callable[..., T], *args: Any) -> T | None:
        """The function's result; None if the GPU or the driver does not support it.

        Raises GpuLost, and LibraryError if the library must be opened anew.
        """
        nvml = self.nvml
        try:
            return function(*args)
        except nvml.NVMLError as exc:
            if exc.value in self.lost_codes():
                raise GpuLost(said(exc)) from exc
            if exc.value in (nvml.NVML_ERROR_UNINITIALIZED, nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH):
                raise LibraryError(LibraryState.FAILED, said(exc)) from exc
            return None

    def lost_codes(self) -> tuple[int, ...]:
        """Result codes for a GPU that no longer answers."""
        nvml = self.nvml
        return nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED, nvml.NVML_ERROR_GPU_NOT_FOUND

    def scaled(self, factor: float, function: Callable[..., int], *args: Any) -> float | None:
        """The function's result times a factor; otherwise like `maybe`."""
        value = self.maybe(function, *args)
        return None if value is None else value * factor

    def field(self, handle: Any, field: int, scope: int = 0) -> int | None:
        """The value of an integer field; otherwise like `maybe`."""
        nvml = self.nvml
        values = self.maybe(nvml.nvmlDeviceGetFieldValues, handle, [(field, scope)])
        if values is None or values[0].nvmlReturn != nvml.NVML_SUCCESS:
            return None
        member = {
            nvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
            nvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
            nvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
            nvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
        }.get(values[0].valueType)
        return None if member is None else int(getattr(values[0].value, member))


def said(exc: Exception) -> str:
    """Formats an error of NVML for people."""
    return f"NVML: {clean(str(exc), 200)}"


def text(value: str | bytes) -> str:
    """Cleans a text of NVML."""
    return clean(value.decode("utf-8", "replace") if isinstance(value, bytes) else value, 128)
