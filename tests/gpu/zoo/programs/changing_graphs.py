"""Threads that change the kernel of an executable graph without a pause, as XLA's command buffers do; no torch."""

from __future__ import annotations

import ctypes
import threading

_PTX = b""".version 7.0
.target sm_70
.address_size 64
.visible .entry nothing() { ret; }
"""


class _KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("function", ctypes.c_void_p),
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("parameters", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    ]


class ChangingGraphs:
    """So many threads, each with a graph of its own, until `end`."""

    def __init__(self, threads: int) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._over = threading.Event()
        self._context = ctypes.c_void_p()
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), 0)
        self._call("cuCtxSetCurrent", self._context)
        self._call("cuModuleLoadData", ctypes.byref(module), _PTX)
        self._call("cuModuleGetFunction", ctypes.byref(function), module, b"nothing")
        self._kernel = _KernelNode(function.value, 1, 1, 1, 1, 1, 1)
        self._threads = [threading.Thread(target=self._change) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self._cuda, name)(*arguments)
        assert result == 0, (name, result)

    def _change(self) -> None:
        graph, node, executable = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        kernel = ctypes.byref(self._kernel)
        self._call("cuCtxSetCurrent", self._context)
        self._call("cuGraphCreate", ctypes.byref(graph), 0)
        self._call("cuGraphAddKernelNode_v2", ctypes.byref(node), graph, None, ctypes.c_size_t(0), kernel)
        self._call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
        while not self._over.is_set():
            for _ in range(100):
                self._call("cuGraphExecKernelNodeSetParams_v2", executable, node, kernel)

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
