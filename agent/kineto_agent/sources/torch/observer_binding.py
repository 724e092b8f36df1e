"""The observer's C interface (agent/native/torch/observer.h) through ctypes. Imported when a capture is prepared.

Every call releases the GIL. The mirror of the C structures is checked by `kc_observer_abi` when the library is loaded.
"""

import ctypes
import os
from typing import Any, NamedTuple, Optional, Tuple

from kineto_agent.sources.native_interface import NativeCounts, NativeInterface
from kineto_agent.sources.torch.object_layouts import TorchLayout

_DESCRIPTION_BYTES = 512
_LIBRARY, _SYSTEM, _CALLBACK, _ORDER = -1, -2, -3, -4
_REASONS = {
    _LIBRARY: "TORCH_LIBRARY",
    _SYSTEM: "ARENA_FAILED",
    _CALLBACK: "TORCH_LIBRARY",
    _ORDER: "TORCH_OPS_BUSY",
}
_NUMBERS = tuple(field for field in TorchLayout._fields if field != "dtype_names")
_LAYOUT_NUMBERS = len(_NUMBERS)  # the first fields of a TorchLayout


class ObserverLayout(ctypes.Structure):
    """kc_observer_layout: the numbers of a TorchLayout, in its order."""

    _fields_ = [(name, ctypes.c_uint32) for name in _NUMBERS]


class ObserverConfig(ctypes.Structure):
    """kc_observer_config."""

    _fields_ = [
        ("buffer_limit_bytes", ctypes.c_uint64),
        ("buffer_bytes", ctypes.c_uint64),
        ("strings_bytes", ctypes.c_uint64),
        ("prefault_bytes", ctypes.c_uint64),
        ("record_inputs", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


class ObserverResult(ctypes.Structure):
    """kc_observer_stop_result."""

    counts: NativeCounts
    names_lost: int
    inputs_lost: int
    ended_elsewhere: int
    unfinished: int
    too_deep: int
    unserved: int
    threads: int
    stuck: int
    _fields_ = [
        ("counts", NativeCounts),
        ("names_lost", ctypes.c_uint64),
        ("inputs_lost", ctypes.c_uint64),
        ("ended_elsewhere", ctypes.c_uint64),
        ("unfinished", ctypes.c_uint64),
        ("too_deep", ctypes.c_uint64),
        ("unserved", ctypes.c_uint64),
        ("threads", ctypes.c_uint64),
        ("stuck", ctypes.c_uint64),
    ]


class Described(NamedTuple):
    """A tensor as the observer sees it."""

    entry: bytes  # in the form of SPACE_OP_INPUTS
    storage_data: int  # address


class TorchInterface(NativeInterface):
    """Common part of the interfaces that read torch's objects."""

    def open_with(self, function: Any, libraries: Any, layouts: Tuple[TorchLayout, ...]) -> Optional[TorchLayout]:
        """Try to open with each layout, finally with none. Returns the one that fits, or None."""
        fits = ctypes.c_uint32()
        for layout in (*layouts, None):
            numbers = None if layout is None else ctypes.byref(ObserverLayout(*layout[:_LAYOUT_NUMBERS]))
            self._check(function(libraries, numbers, ctypes.byref(fits), *self._error.room))
            if fits.value:
                break
        return layout

    def described_by(self, function: Any, address: int) -> Described:
        """This function's description of the TensorImpl at `address`; empty without a layout."""
        entry = ctypes.create_string_buffer(_DESCRIPTION_BYTES)
        data = ctypes.c_uint64()
        size = function(ctypes.c_void_p(address), entry, _DESCRIPTION_BYTES, ctypes.byref(data))
        return Described(entry.raw[: max(size, 0)], data.value)


class Observer(TorchInterface):
    """The one observer of this process. Methods raise SourceError with the C side's reason."""

    ABI_FUNCTION = "kc_observer_abi"
    ABI = 2
    USE = " for operators"
    REASONS = _REASONS

    def open(self, path: str, layouts: Tuple[TorchLayout, ...]) -> Optional[TorchLayout]:
        """Find torch's functions in libtorch_cpu. Returns the layout that fits, or None."""
        return self.open_with(self._library.kc_observer_open, os.fsencode(path), layouts)

    def describe_tensor(self, address: int) -> Described:
        """The observer's record of the TensorImpl at `address`; empty without a layout."""
        return self.described_by(self._library.kc_observer_describe_tensor, address)

    def prepare(self, config: ObserverConfig) -> int:
        """Make the arena and return its file descriptor, which the observer keeps."""
        return self._check(self._library.kc_observer_prepare(ctypes.byref(config), *self._error.room))

    def start(self) -> None:
        """Register the callbacks."""
        self._check(self._library.kc_observer_start(*self._error.room))

    def counts(self) -> NativeCounts:
        """Counts so far; zeros when nothing is recorded."""
        counts = NativeCounts()
        self._library.kc_observer_counts(ctypes.byref(counts))
        return counts

    def stop(self, limit_ms: int) -> ObserverResult:
        """End the recording; zeros when nothing was recorded."""
        result = ObserverResult()
        self._library.kc_observer_stop(limit_ms, ctypes.byref(result))
        return result

    def close(self) -> None:
        """Free the arena, unless a thread is still inside."""
        self._library.kc_observer_close()


# The watcher of CUDA graph captures (agent/native/graphs/capture_watch.h) through ctypes.
#
# Imported once the program has initialised CUDA. Every call releases the GIL. The mirror of the C structures is checked
# by `kc_graphs_abi` when the library is loaded.
_GRAPH_REASONS = {
    _LIBRARY: "TORCH_LIBRARY",
    _SYSTEM: "TORCH_LIBRARY",
    _CALLBACK: "GRAPH_CAPTURE",  # of the capture here
    _ORDER: "GRAPH_CAPTURE",
}


class _Libraries(ctypes.Structure):
    """kc_graphs_libraries."""

    _fields_ = [("torch", ctypes.c_char_p), ("cuda", ctypes.c_char_p), ("c10_cuda", ctypes.c_char_p)]


class GraphWatcher(TorchInterface):
    """The one watcher of this process. Methods raise SourceError with the C side's reason."""

    ABI_FUNCTION = "kc_graphs_abi"
    ABI = 1
    USE = " for CUDA graphs"
    REASONS = _GRAPH_REASONS
    BY_PROGRAM = ("kc_graphs_begin", "kc_graphs_seal", "kc_graphs_take", "kc_graphs_drop")

    def open(self, torch: str, cuda: str, c10_cuda: str, layouts: Tuple[TorchLayout, ...]) -> Optional[TorchLayout]:
        """Find the functions of these loaded libraries. Returns the layout that fits, or None."""
        libraries = _Libraries(os.fsencode(torch), os.fsencode(cuda), os.fsencode(c10_cuda))
        return self.open_with(self._library.kc_graphs_open, ctypes.byref(libraries), layouts)

    def describe_tensor(self, address: int) -> Described:
        """The record of the TensorImpl at `address`; empty without a layout."""
        return self.described_by(self._library.kc_graphs_describe_tensor, address)

    def begin(self, stream: int, device: int, inputs: bool) -> int:
        """Begin to watch the capture of this stream. Returns the number of the watch."""
        watch = ctypes.c_uint64()
        self._check(
            self._library.kc_graphs_begin(
                ctypes.c_uint64(stream), device, int(inputs), ctypes.byref(watch), *self._error.room
            )
        )
        return watch.value

    def seal(self, watch: int) -> bytes:
        """End the watch while the capture is active. Returns one graph in the form of GRAPH_NODES_FORMAT."""
        size = ctypes.c_uint64()
        self._check(self._library.kc_graphs_seal(ctypes.c_uint64(watch), ctypes.byref(size), *self._error.room))
        found = ctypes.create_string_buffer(size.value)
        self._check(self._library.kc_graphs_take(found, size))
        return found.raw

    def drop(self) -> None:
        """End the watch, if there is one."""
        self._library.kc_graphs_drop()
