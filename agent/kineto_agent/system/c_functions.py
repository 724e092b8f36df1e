"""Functions of C, called by `_ctypes` alone, with the GIL held or without it, and libraries, opened without it.

`_ctypes` is what the ctypes package wraps; importing it reads no Python file.

dlopen and dlsym wait for the loader's lock, which another thread has while it runs the constructors of a library: for
seconds, and if one of these takes the GIL, for good where the GIL is held meanwhile. So they are called by address and
without the GIL. A live attach brings the addresses along; an agent that starts by itself asks for them once, at once.
"""

import _ctypes
import os
import sys
from typing import Any, List, Optional, Tuple

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


PROGRAM = 0  # for symbol_address(): all that the program has loaded (RTLD_DEFAULT)
_no_path: Any = None
_R_STATE_OFFSET = 24  # in struct r_debug, which debuggers read
# Process and path: in a forked child, there is half of what another thread was opening. A live attach looks here, too.
_opening: List[Tuple[int, Optional[str]]] = getattr(sys, "_kineto_attach", {}).setdefault("opening", [])
_dlopen, _dlsym = _loader_functions()
_dlerror = _TextFunction(_dlsym(Long(PROGRAM), b"dlerror"))  # at once: a search forgets the last error
_r_debug: int = _dlsym(Long(PROGRAM), b"_r_debug")


class _Int(_ctypes._SimpleCData):  # type: ignore[type-arg]
    _type_ = "i"


def _mend_loader() -> None:
    """In a forked child: else the loader takes itself to be at work for ever, and ends the process."""
    _Int.from_address(_r_debug + _R_STATE_OFFSET).value = 0


if _r_debug and not hasattr(sys, "_kineto_attach"):  # there, the bootstrap sees to it
    os.register_at_fork(after_in_child=_mend_loader)


def symbol_address(library: int, name: str) -> int:
    """The address of what has that name in an opened library. Raises AttributeError."""
    address: int = _dlsym(Long(library), name.encode())
    if not address:
        raise AttributeError("there is no symbol " + name)
    return address


def open_library(path: Optional[str], mode: int = os.RTLD_NOW) -> int:
    """Its handle, as dlopen returns it. Raises OSError."""
    ours = (os.getpid(), path)
    if any(process != ours[0] and other == path for process, other in list(_opening)):
        raise OSError("%s is half open: this process was forked while another thread opened it" % path)
    _opening.append(ours)
    try:
        handle: int = _dlopen(None if path is None else os.fsencode(path), mode | os.RTLD_NOW)
    finally:
        _opening.remove(ours)
    if not handle:
        raise OSError((_dlerror() or b"").decode("utf-8", "replace"))
    return handle


def program_function(name: str) -> Any:
    """A function of what the program has loaded, called with the GIL held. Raises OSError."""
    try:
        return Function(symbol_address(PROGRAM, name))
    except AttributeError as exc:
        raise OSError(str(exc)) from exc
