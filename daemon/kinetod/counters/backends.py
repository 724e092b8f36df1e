"""The backends that kinetod-counters can be started with."""

from collections.abc import Callable, Mapping, Sequence

from kinetod.counters.cupti.cupti_backend import CuptiBackend
from kinetod.counters.cupti.library_search import find_libraries
from kinetod.counters.cupti_python import CuptiPythonBackend
from kinetod.counters.interface import CounterBackend

CUPTI, CUPTI_PYTHON = "cupti", "cupti-python"


def _cupti(library: str, library_of: Sequence[int]) -> CounterBackend:
    return CuptiBackend(library, find=lambda: find_libraries(pids=tuple(library_of)))


def _cupti_python(library: str, _library_of: Sequence[int]) -> CounterBackend:
    return CuptiPythonBackend(library)


BACKENDS: Mapping[str, Callable[[str, Sequence[int]], CounterBackend]] = {CUPTI: _cupti, CUPTI_PYTHON: _cupti_python}


def make_backend(name: str, library: str, library_of: Sequence[int]) -> CounterBackend:
    """A backend that has loaded nothing yet. library: path of a libcupti; empty: the backend's choice."""
    return BACKENDS[name](library, library_of)
