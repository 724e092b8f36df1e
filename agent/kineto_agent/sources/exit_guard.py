"""Keeps a thread of ours that is inside C++ when the interpreter ends from ending the process with SIGABRT, through
agent/native/common/exit_guard.c. Imported when a capture is prepared.
"""

from typing import List

from kineto_agent.sources import collector_library
from kineto_agent.sources.native_interface import NativeInterface


class ExitGuard(NativeInterface):
    """What a source whose thread calls C++ without the GIL has ready for the exit."""

    ABI_FUNCTION = "kc_exit_guard_abi"
    ABI = 1
    USE = " for the exit"
    BY_PROGRAM = ("kc_exit_guard_place",)

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._library.kc_exit_guard_prepare()

    def place(self) -> None:
        """Guard from now on. Called on the program's thread, while it exits."""
        self._library.kc_exit_guard_place()


_loaded: List[ExitGuard] = []


def load() -> ExitGuard:
    """The process's guard, loaded at the first call. Raises SourceError."""
    if not _loaded:
        _loaded.append(ExitGuard(collector_library.path()))
        collector_library.loaded()
    return _loaded[0]
