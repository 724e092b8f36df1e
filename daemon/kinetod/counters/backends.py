"""The backends that kinetod-counters can be started with.

A new one needs an entry in BACKENDS, its name in AUTOMATIC if it is its vendor's first choice, and its name among the
words of `counters.backend` (kinetod/config/counters_settings.py).
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from kinetod.counters.amdgpu.amdgpu_backend import AmdgpuBackend
from kinetod.counters.backend_group import BackendGroup
from kinetod.counters.cupti.cupti_backend import CuptiBackend
from kinetod.counters.cupti.library_search import find_libraries
from kinetod.counters.cupti_python import CuptiPythonBackend
from kinetod.counters.interface import CounterBackend
from kinetod.counters.kernel_gpus import AMD, INTEL, NVIDIA
from kinetod.counters.level_zero.level_zero_backend import LevelZeroBackend

AUTO = "auto"
CUPTI, CUPTI_PYTHON, AMDGPU, LEVEL_ZERO = "cupti", "cupti-python", "amdgpu", "level-zero"


class KnownBackend(msgspec.Struct, frozen=True, kw_only=True):
    """How one is made, which loads nothing yet. make: of the path of its library (empty: its own choice), and of
    processes whose library may serve.
    """

    vendor: str
    make: Callable[[str, Sequence[int]], CounterBackend]


def _cupti(library: str, library_of: Sequence[int]) -> CounterBackend:
    return CuptiBackend(library, find=lambda: find_libraries(pids=tuple(library_of)))


def _cupti_python(library: str, _library_of: Sequence[int]) -> CounterBackend:
    return CuptiPythonBackend(library)


def _amdgpu(_library: str, _library_of: Sequence[int]) -> CounterBackend:
    return AmdgpuBackend()


def _level_zero(library: str, _library_of: Sequence[int]) -> CounterBackend:
    return LevelZeroBackend(library)


BACKENDS: Mapping[str, KnownBackend] = {
    CUPTI: KnownBackend(vendor=NVIDIA, make=_cupti),
    CUPTI_PYTHON: KnownBackend(vendor=NVIDIA, make=_cupti_python),
    AMDGPU: KnownBackend(vendor=AMD, make=_amdgpu),
    LEVEL_ZERO: KnownBackend(vendor=INTEL, make=_level_zero),
}
AUTOMATIC = (CUPTI, AMDGPU, LEVEL_ZERO)  # what AUTO serves together: one for each vendor
CHOICES = (AUTO, *BACKENDS)


def make_backend(name: str, library: str, library_of: Sequence[int]) -> CounterBackend:
    """One of CHOICES, which has loaded nothing yet. library: with AUTO that of NVIDIA's, otherwise the chosen one's."""
    if name != AUTO:
        return BACKENDS[name].make(library, library_of)
    members = ((BACKENDS[each].vendor, BACKENDS[each].make) for each in AUTOMATIC)
    return BackendGroup({vendor: make(library if vendor == NVIDIA else "", library_of) for vendor, make in members})
