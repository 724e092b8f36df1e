"""The CUDA driver over ctypes: streams, and work on them that does not end until it is let go."""

from __future__ import annotations

import ctypes
from typing import Any

from gpu.zoo.life import Skip

NON_BLOCKING, SCHED_AUTO, HOST_MAPPED = 1, 0, 3  # HOST_MAPPED: portable, too
WAIT_EQ = 1  # CU_STREAM_WAIT_VALUE_EQ
# Spins until the word that the argument points to is not 0.
SPIN = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry spin(.param .u64 flag)
{
    .reg .pred %p;
    .reg .u32 %v;
    .reg .u64 %a;
    ld.param.u64 %a, [flag];
LOOP:
    ld.volatile.u32 %v, [%a];
    setp.eq.u32 %p, %v, 0;
    @%p bra LOOP;
    ret;
}
"""


class Driver:
    """libcuda, with every result checked."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as exc:
            raise Skip(str(exc)) from exc
        self("cuInit", 0)

    def __call__(self, name: str, *arguments: Any) -> None:
        """Calls a function. Integers are 32 bits unless they come as ctypes objects."""
        result = getattr(self._library, name)(*arguments)
        if result != 0:
            raise RuntimeError(f"{name}: error {result}")

    def stream(self, flags: int = NON_BLOCKING) -> ctypes.c_void_p:
        """A stream of the current context that waits for no other one."""
        made = ctypes.c_void_p()
        self("cuStreamCreate", ctypes.byref(made), flags)
        return made

    def push_primary(self) -> ctypes.c_void_p:
        """Makes the primary context of the first device current, the one that torch uses."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self("cuDeviceGet", ctypes.byref(device), 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self("cuCtxSetCurrent", context)
        return context

    def own_context(self) -> ctypes.c_void_p:
        """A context of its own; it is current on this thread until another one is made so."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self("cuDeviceGet", ctypes.byref(device), 0)
        self("cuCtxCreate_v2", ctypes.byref(context), SCHED_AUTO, device)
        return context


class Flag:
    """A word in pinned memory that the device sees."""

    def __init__(self, driver: Driver) -> None:
        memory, device = ctypes.c_void_p(), ctypes.c_uint64()
        driver("cuMemHostAlloc", ctypes.byref(memory), ctypes.c_size_t(4096), HOST_MAPPED)
        driver("cuMemHostGetDevicePointer_v2", ctypes.byref(device), memory, 0)
        assert memory.value is not None
        self._word = ctypes.c_uint32.from_address(memory.value)
        self.device = device
        self.value = 0

    @property
    def value(self) -> int:
        """What the device reads."""
        return self._word.value

    @value.setter
    def value(self, value: int) -> None:
        self._word.value = value


class Spin:
    """A kernel of one thread that runs until its flag is set. All is loaded before the first launch."""

    def __init__(self, driver: Driver) -> None:
        self._driver, self.flag = driver, Flag(driver)
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        driver("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(SPIN))
        driver("cuModuleGetFunction", ctypes.byref(self._function), module, ctypes.c_char_p(b"spin"))
        self.flag.value = 1  # a first launch ends at once
        stream = driver.stream()
        self.launch(stream)
        driver("cuStreamSynchronize", stream)

    def launch(self, stream: ctypes.c_void_p) -> None:
        """One kernel; it ends when the flag is not 0."""
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.flag.device))
        self._driver("cuLaunchKernel", self._function, 1, 1, 1, 1, 1, 1, 0, stream, pointers, None)


class Semaphore:
    """A semaphore of the C library: a host function that waits for it needs no Python."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._memory = (ctypes.c_uint64 * 8)()
        self._libc.sem_init(self._memory, 0, 0)

    def wait_on(self, driver: Driver, stream: ctypes.c_void_p) -> None:
        """Enqueues a host function that returns after `post`."""
        function = ctypes.cast(self._libc.sem_wait, ctypes.c_void_p)
        driver("cuLaunchHostFunc", stream, function, ctypes.cast(self._memory, ctypes.c_void_p))

    def post(self) -> None:
        """Lets one waiting host function go."""
        self._libc.sem_post(self._memory)
