"""Level Zero's System Resource Management (Sysman) through ctypes: functions, and structures by offset.

Theory of operation
    The loader, libze_loader.so.1, finds Intel's driver library (libze_intel_gpu.so.1) by itself. Sysman begins with
    zesInit (loaders from 1.9 on); older ones begin with zeInit and the variable ZES_ENABLE_SYSMAN, and take the
    handles of ze functions. A structure is a block of bytes whose first word is its type, so that the driver knows what
    it may write; STRUCTURES has the sizes and offsets, which are the same in the public headers zes_api.h 1.4 to 1.13.
    Lists take two calls: one for the length, one for the handles.

Errors
    Every function returns 0 or a result code, which SysmanError carries. Groups of codes: LOST, UNSUPPORTED.
"""

import ctypes
import os
import struct
from typing import Any, NamedTuple

LIBRARY = "libze_loader.so.1"
LOST = frozenset((0x70000001, 0x70000006))  # device lost, device requires a reset
UNINITIALIZED = 0x78000001
UNSUPPORTED = 0x78000003
_MAX_HANDLES = 1024
_STARTUP_VARIABLE = "ZES_ENABLE_SYSMAN"


class Structure(NamedTuple):
    """A structure of zes_api.h. type: its first word; 0: it has none. fields: name -> struct code, offset."""

    type: int
    size: int
    fields: dict[str, tuple[str, int]]


STRUCTURES = {
    "zes_device_properties_t": Structure(
        1, 776, {"core.vendorId": ("I", 36), "core.uuid": ("16s", 112), "core.name": ("256s", 128),
                 "driverVersion": ("64s", 708)},
    ),
    "zes_pci_properties_t": Structure(
        2, 56, {"address.domain": ("I", 16), "address.bus": ("I", 20), "address.device": ("I", 24),
                "address.function": ("I", 28)},
    ),
    "zes_mem_properties_t": Structure(0xB, 48, {"location": ("I", 28), "physicalSize": ("Q", 32)}),
    "zes_mem_state_t": Structure(0x1E, 40, {"free": ("Q", 24), "size": ("Q", 32)}),
    "zes_engine_properties_t": Structure(5, 32, {"type": ("I", 16), "onSubdevice": ("B", 20)}),
    "zes_engine_stats_t": Structure(0, 16, {"activeTime": ("Q", 0), "timestamp": ("Q", 8)}),
    "zes_power_properties_t": Structure(0xD, 40, {"onSubdevice": ("B", 16)}),
    "zes_power_energy_counter_t": Structure(0, 16, {"energy": ("Q", 0), "timestamp": ("Q", 8)}),
    "zes_power_sustained_limit_t": Structure(0, 12, {"enabled": ("B", 0), "power": ("i", 4)}),
    "zes_temp_properties_t": Structure(0x14, 48, {"type": ("I", 16), "onSubdevice": ("B", 20)}),
    "zes_freq_properties_t": Structure(9, 48, {"type": ("I", 16), "onSubdevice": ("B", 20)}),
    "zes_freq_state_t": Structure(0x1B, 64, {"actual": ("d", 48)}),
    "zes_pci_stats_t": Structure(0, 56, {"timestamp": ("Q", 0), "rxCounter": ("Q", 24), "txCounter": ("Q", 32)}),
}  # fmt: skip


class SysmanError(Exception):
    """A function failed. code: its result."""

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function} returned {code:#x}")
        self.code = code


class Sysman:
    """The loaded library. Raises OSError if it is missing, and SysmanError."""

    def __init__(self, library: str = LIBRARY) -> None:
        self._library = ctypes.CDLL(library)
        self._prefix = "zes" if hasattr(self._library, "zesInit") else "ze"
        if self._prefix == "ze":
            os.environ[_STARTUP_VARIABLE] = "1"  # read when the driver is loaded, which zeInit does
        self.call(f"{self._prefix}Init", ctypes.c_uint32(0))

    def call(self, function: str, *arguments: object) -> None:
        """Calls a function."""
        try:
            found = getattr(self._library, function)
        except AttributeError as exc:
            raise SysmanError(function, UNSUPPORTED) from exc
        found.restype = ctypes.c_uint32
        if code := found(*arguments):
            raise SysmanError(function, code)

    def devices(self) -> list[ctypes.c_void_p]:
        """Every device of every driver."""
        drivers = self._handles(f"{self._prefix}DriverGet")
        return [device for driver in drivers for device in self._handles(f"{self._prefix}DeviceGet", driver)]

    def handles(self, function: str, device: ctypes.c_void_p) -> list[ctypes.c_void_p]:
        """The components of a device, from a function like zesDeviceEnumEngineGroups; none if the device has none."""
        try:
            return self._handles(function, device)
        except SysmanError as exc:
            if exc.code in LOST or exc.code == UNINITIALIZED:
                raise
            return []

    def read(self, function: str, handle: ctypes.c_void_p, structure: str, *more: None) -> dict[str, Any]:
        """The fields of the structure that a function fills in. more: the function's further arguments."""
        layout = STRUCTURES[structure]
        block = ctypes.create_string_buffer(layout.size)
        if layout.type:
            struct.pack_into("=I", block, 0, layout.type)
        self.call(function, handle, block, *more)
        return {
            name: struct.unpack_from(f"={code}", block.raw, offset)[0] for name, (code, offset) in layout.fields.items()
        }

    def maybe(self, function: str, handle: ctypes.c_void_p, structure: str, *more: None) -> dict[str, Any]:
        """Like `read`; empty if the device does not report it to this user. Raises SysmanError if it is lost."""
        try:
            return self.read(function, handle, structure, *more)
        except SysmanError as exc:
            if exc.code in LOST or exc.code == UNINITIALIZED:
                raise
            return {}

    def _handles(self, function: str, *of: ctypes.c_void_p) -> list[ctypes.c_void_p]:
        count = ctypes.c_uint32(0)
        self.call(function, *of, ctypes.byref(count), None)
        found = (ctypes.c_void_p * min(count.value, _MAX_HANDLES))()
        count.value = len(found)
        if found:
            self.call(function, *of, ctypes.byref(count), found)
        return [ctypes.c_void_p(each) for each in found[: count.value] if each]
