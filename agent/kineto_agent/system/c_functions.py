"""Functions of C, called by `_ctypes` alone, with the GIL held or without it.

`_ctypes` is what the ctypes package wraps; importing it reads no Python file.
"""

import _ctypes
import os
from typing import Any

_KEEPS_GIL, _KEEPS_ERRNO, _C_CALL = 0x4, 0x8, 0x1  # flags of ctypes functions


class Long(_ctypes._SimpleCData):  # type: ignore[type-arg]
    """A C long, which is also what the functions here return."""

    _type_ = "l"


class Function(_ctypes.CFuncPtr):
    """A function, by its address, that is called with the GIL held."""

    _flags_ = _C_CALL | _KEEPS_GIL | _KEEPS_ERRNO
    _restype_ = Long


class FunctionWithoutGil(_ctypes.CFuncPtr):
    """A function, by its address, during which the GIL is released."""

    _flags_ = _C_CALL
    _restype_ = Long


_program: Any = None  # for dlopen: all that it has loaded


def program_function(name: str) -> Any:
    """A function of what the program has loaded. Raises OSError."""
    return Function(_ctypes.dlsym(_ctypes.dlopen(_program, os.RTLD_NOW), name))
