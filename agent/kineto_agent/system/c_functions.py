"""Calls C functions through `_ctypes` alone, with or without the GIL, and opens libraries without it.

`_ctypes` is what the ctypes package wraps; importing it reads no Python file.

dlopen and dlsym wait for the loader's lock, which another thread holds while it runs the constructors of a library: for
seconds, or forever if a constructor takes the GIL while the caller holds it. So they are called by address and without
the GIL. A live attach supplies the addresses; an agent that starts by itself looks them up once, at import.
"""

import _ctypes
import os
import sys
from typing import Any, List, Optional, Tuple

_KEEPS_GIL, _KEEPS_ERRNO, _C_CALL = 0x4, 0x8, 0x1  # flags of ctypes functions


class Long(_ctypes._SimpleCData):  # type: ignore[type-arg]
    """A C long, the result type of the functions here."""

    _type_ = "l"


class Function(_ctypes.CFuncPtr):
    """A function, by its address, that is called with the GIL held."""

    _flags_ = _C_CALL | _KEEPS_GIL | _KEEPS_ERRNO
    _restype_ = Long


class FunctionWithoutGil(_ctypes.CFuncPtr):
    """A function, by its address, that is called without the GIL."""

    _flags_ = _C_CALL
    _restype_ = Long


class _Text(_ctypes._SimpleCData):  # type: ignore[type-arg]
    _type_ = "z"


class _TextFunction(_ctypes.CFuncPtr):
    _flags_ = _C_CALL
    _restype_ = _Text


def _loader_functions() -> Tuple[Any, Any]:
    given = getattr(sys, "_kineto_attach", {}).get("calls")
    if given is None:
        program = _ctypes.dlopen(_no_path, os.RTLD_NOW)
        given = tuple(_ctypes.dlsym(program, name) for name in ("dlopen", "dlsym"))
    return FunctionWithoutGil(given[0]), FunctionWithoutGil(given[1])


PROGRAM = 0  # for symbol_address(): everything that the program has loaded (RTLD_DEFAULT)
_no_path: Any = None
_R_STATE_OFFSET = 24  # in struct r_debug, which debuggers read
# Process and path: a forked child has a half-opened library if another thread was opening it. A live attach checks
# this, too.
_opening: List[Tuple[int, Optional[str]]] = getattr(sys, "_kineto_attach", {}).setdefault("opening", [])
_dlopen, _dlsym = _loader_functions()
_dlerror = _TextFunction(_dlsym(Long(PROGRAM), b"dlerror"))  # at import: a search clears the last error
_r_debug: int = _dlsym(Long(PROGRAM), b"_r_debug")


class _Int(_ctypes._SimpleCData):  # type: ignore[type-arg]
    _type_ = "i"


def _mend_loader() -> None:
    """Repair the loader's state in a forked child: otherwise it believes that it is busy, and aborts the process."""
    _Int.from_address(_r_debug + _R_STATE_OFFSET).value = 0


if _r_debug and not hasattr(sys, "_kineto_attach"):  # in that case the bootstrap does it
    os.register_at_fork(after_in_child=_mend_loader)


def symbol_address(library: int, name: str) -> int:
    """The address of a symbol in an opened library. Raises AttributeError."""
    address: int = _dlsym(Long(library), name.encode())
    if not address:
        raise AttributeError("there is no symbol " + name)
    return address


def half_open(path: Optional[str]) -> bool:
    """Whether this process was forked while another thread was opening it."""
    return any(process != os.getpid() and other == path for process, other in list(_opening))


def open_library(path: Optional[str], mode: int = os.RTLD_NOW) -> int:
    """The library's handle, as returned by dlopen. Raises OSError."""
    ours = (os.getpid(), path)
    if half_open(path):
        raise OSError("%s is partly loaded: this process was forked while another thread was loading it" % path)
    _opening.append(ours)
    try:
        handle: int = _dlopen(None if path is None else os.fsencode(path), mode | os.RTLD_NOW)
    finally:
        _opening.remove(ours)
    if not handle:
        raise OSError((_dlerror() or b"").decode("utf-8", "replace"))
    return handle


def program_function(name: str) -> Any:
    """A function of the program's loaded libraries, called with the GIL held. Raises OSError."""
    try:
        return Function(symbol_address(PROGRAM, name))
    except AttributeError as exc:
        raise OSError(str(exc)) from exc
