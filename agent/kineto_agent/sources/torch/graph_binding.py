"""The watcher of CUDA graph captures (agent/native/graphs/capture_watch.h) through ctypes.

Imported once the program has initialised CUDA. Every call releases the GIL. The mirror of the C structures is checked
by `kc_graphs_abi` when the library is loaded.
"""

import ctypes
import os
from typing import Optional, Tuple

from kineto_agent.sources.torch.object_layouts import TorchLayout
from kineto_agent.sources.torch.observer_binding import Described, TorchInterface

_LIBRARY, _SYSTEM, _CAPTURE, _ORDER = -1, -2, -3, -4
_REASONS = {
    _LIBRARY: "TORCH_LIBRARY",
    _SYSTEM: "TORCH_LIBRARY",
    _CAPTURE: "GRAPH_CAPTURE",
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
    REASONS = _REASONS
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
