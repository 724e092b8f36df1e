"""Libraries for ctypes, opened and searched without the GIL (c_functions.py says why).

ctypes.CDLL, PyDLL, pythonapi and in_dll call dlopen and dlsym with the GIL held: they are used nowhere else in the
agent.
"""

import ctypes
import os
from typing import Any, Optional

from kineto_agent.system.c_functions import PROGRAM, open_library, symbol_address


class Library(ctypes.CDLL):
    """Like ctypes.CDLL. handle: of a library that is already open. Raises OSError."""

    def __init__(self, path: Optional[str], mode: int = os.RTLD_NOW, handle: Optional[int] = None) -> None:
        super().__init__(path, mode, open_library(path, mode) if handle is None else handle)

    def __getitem__(self, name: Any) -> Any:
        function: Any = self._FuncPtr(self.address(name))
        function.__name__ = name
        return function

    def address(self, name: str) -> int:
        """The address of a function or variable. Raises AttributeError."""
        return symbol_address(self._handle, name)


class PyLibrary(Library):
    """Like ctypes.PyDLL: its functions are called with the GIL held, and may raise."""

    _func_flags_ = ctypes.PyDLL._func_flags_


def interpreter() -> PyLibrary:
    """The functions of Python, like ctypes.pythonapi, which is shared with the program."""
    return PyLibrary(None, handle=PROGRAM)
