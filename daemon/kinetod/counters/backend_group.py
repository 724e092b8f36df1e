"""Several backends as one: a host may have GPUs of several vendors.

Theory of operation
    Each member is queried in a thread of its own, with a deadline; callers that arrive in between wait for the same
    answer. A member that raises or is late does not affect the others: the kernel's GPUs of its vendor are listed with
    its reason. A late thread is abandoned, and the member is not queried again until it returns. Only a library that
    crashes ends all members, since they share the process.

    A GPU belongs to the member that listed it; everything else about it is that member's.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from kinetod.counters.amdgpu_backend import AmdgpuBackend
from kinetod.counters.cupti_backend import CuptiBackend, find_libraries
from kinetod.counters.cupti_python import CuptiPythonBackend
from kinetod.counters.interface import (
    CounterBackend,
    CounterCode,
    CounterDevice,
    CounterError,
    CounterPlan,
    Sampling,
    WantedCounters,
)
from kinetod.counters.kernel_gpus import AMD, INTEL, NVIDIA, kernel_gpus
from kinetod.counters.level_zero_backend import LevelZeroBackend
from kinetod.counters.sample_rings import RingWriter

ANSWER_S = 15.0  # a driver takes a few seconds to start; less than kinetod-counters allows for a request


class _Asked:
    """A member whose GPUs a thread is listing."""

    def __init__(self, backend: CounterBackend, answer_s: float) -> None:
        self._due = time.monotonic() + answer_s
        self.gpus: list[CounterDevice] | None = None
        self.error = CounterError(CounterCode.FAILED, f"the library of the {backend.name} backend is not responding")
        self.done = threading.Event()
        threading.Thread(target=self._ask, args=(backend,), name=f"counters {backend.name}", daemon=True).start()

    def _ask(self, backend: CounterBackend) -> None:
        try:
            backend.open()
            self.gpus = backend.devices()
        except CounterError as exc:
            self.error = exc
        except Exception as exc:  # noqa: BLE001  # whatever one vendor's library does, the others serve
            self.error = CounterError(CounterCode.FAILED, f"{backend.name}: {exc}")
        self.done.set()

    def wait(self) -> None:
        """Waits for the answer or the deadline."""
        self.done.wait(max(0.0, self._due - time.monotonic()))


class BackendGroup:
    """Implements interface.CounterBackend. members: one for each vendor. known_gpus: lists a vendor's GPUs from its
    driver.
    """

    def __init__(
        self,
        members: Mapping[str, CounterBackend],
        *,
        known_gpus: Callable[[str], Sequence[CounterDevice]] = kernel_gpus,
        answer_s: float = ANSWER_S,
    ) -> None:
        self._members = members
        self._known_gpus = known_gpus
        self._answer_s = answer_s
        self._lock = threading.Lock()
        self._asked: Mapping[str, _Asked] = {}  # by vendor
        self._owners: dict[str, CounterBackend] = {}
        self._refused: dict[str, CounterDevice] = {}
        self._serving: tuple[CounterBackend, ...] = ()

    @property
    def serves_once(self) -> bool:
        """Whether one of the members does."""
        return any(each.serves_once for each in self._members.values())

    @property
    def name(self) -> str:
        """The members that have GPUs, such as "cupti, amdgpu"."""
        return ", ".join(each.name for each in self._serving)

    @property
    def library_version(self) -> str:
        """The version of each of them, in the same order."""
        return ", ".join(each.library_version for each in self._serving)

    def open(self) -> None:
        """Does nothing: `devices` opens the members."""

    def devices(self) -> list[CounterDevice]:
        """The GPUs of all members, and the kernel's GPUs of vendors whose member fails."""
        with self._lock:
            awaited = {vendor: each for vendor, each in self._asked.items() if not each.done.is_set()}
            self._asked = {
                vendor: awaited.get(vendor) or _Asked(backend, self._answer_s)
                for vendor, backend in self._members.items()
            }
            asked = self._asked
        for each in asked.values():
            each.wait()
        return self._gathered(asked)

    def _gathered(self, asked: Mapping[str, _Asked]) -> list[CounterDevice]:
        """Combines the members' GPUs. Raises CounterError if there is no GPU at all."""
        found: list[CounterDevice] = []
        owners, refused = dict[str, CounterBackend](), dict[str, CounterDevice]()
        errors: list[CounterError] = []
        for vendor, backend in self._members.items():
            if (gpus := asked[vendor].gpus) is not None:
                found += gpus
                owners |= {gpu.uuid: backend for gpu in gpus}
                continue
            error = asked[vendor].error
            errors.append(error)
            for gpu in self._known_gpus(vendor):
                refused[gpu.uuid] = msgspec.structs.replace(gpu, code=error.code, problem=error.reason)
        found += refused.values()
        with self._lock:
            self._owners, self._refused = owners, refused
            self._serving = tuple(each for each in self._members.values() if each in owners.values())
        if not found and errors:
            code = next((each.code for each in errors if each.code is not CounterCode.UNAVAILABLE), errors[0].code)
            raise CounterError(code, "; ".join(each.reason for each in errors))
        return _numbered(found)

    def member_of(self, uuid: str) -> CounterBackend:
        """The member that measures this GPU. Raises CounterError."""
        if uuid not in self._owners and uuid not in self._refused:
            self.devices()
        if (backend := self._owners.get(uuid)) is not None:
            return backend
        if (gpu := self._refused.get(uuid)) is not None:
            raise CounterError(CounterCode(gpu.code), f"GPU {uuid}: {gpu.problem}")
        reason = f"there is no GPU {uuid}; `kinetoctl counters list` lists those that can be measured"
        raise CounterError(CounterCode.UNAVAILABLE, reason)

    def base_metrics(self, uuid: str) -> list[str]:
        """The metrics of this GPU."""
        return self.member_of(uuid).base_metrics(uuid)

    def plan(self, uuid: str, wanted: WantedCounters) -> CounterPlan:
        """What would be measured."""
        return self.member_of(uuid).plan(uuid, wanted)

    def start(
        self, uuid: str, wanted: WantedCounters, interval_ns: int, make_ring: Callable[[int], RingWriter]
    ) -> Sampling:
        """Starts the sampling."""
        return self.member_of(uuid).start(uuid, wanted, interval_ns, make_ring)


def _numbered(gpus: Sequence[CounterDevice]) -> list[CounterDevice]:
    """Gives each GPU a unique number: where NVIDIA's driver is not visible in /proc, others begin at 0, too."""
    found = dict[int, CounterDevice]()
    for gpu in gpus:
        index = gpu.index if gpu.index not in found else max(found) + 1
        found[index] = msgspec.structs.replace(gpu, index=index)
    return list(found.values())


def who_measures(backend: CounterBackend, uuid: str) -> CounterBackend:
    """The member of a group that has this GPU, or the backend itself. Raises CounterError."""
    return backend.member_of(uuid) if isinstance(backend, BackendGroup) else backend


# The backends that kinetod-counters can be started with.
# A new one needs an entry in BACKENDS, its name in AUTOMATIC if it is its vendor's first choice, and its name among the
# values of `counters.backend` (kinetod/config/metrics_settings.py).
AUTO = "auto"
CUPTI, CUPTI_PYTHON, AMDGPU, LEVEL_ZERO = "cupti", "cupti-python", "amdgpu", "level-zero"


class KnownBackend(msgspec.Struct, frozen=True, kw_only=True):
    """How to create a backend, without loading anything yet. make: takes the path of its library (empty: its own
    choice) and pids whose loaded library may be used.
    """

    vendor: str
    make: Callable[[str, Sequence[int]], CounterBackend]


def _cupti(library: str, library_of: Sequence[int]) -> CounterBackend:
    return CuptiBackend(library, find=lambda: find_libraries(pids=tuple(library_of)))


BACKENDS: Mapping[str, KnownBackend] = {
    CUPTI: KnownBackend(vendor=NVIDIA, make=_cupti),
    CUPTI_PYTHON: KnownBackend(vendor=NVIDIA, make=lambda library, _pids: CuptiPythonBackend(library)),
    AMDGPU: KnownBackend(vendor=AMD, make=lambda _library, _pids: AmdgpuBackend()),
    LEVEL_ZERO: KnownBackend(vendor=INTEL, make=lambda library, _pids: LevelZeroBackend(library)),
}
AUTOMATIC = (CUPTI, AMDGPU, LEVEL_ZERO)  # used together by AUTO: one for each vendor
CHOICES = (AUTO, *BACKENDS)


def make_backend(name: str, library: str, library_of: Sequence[int]) -> CounterBackend:
    """Creates one of CHOICES, which has loaded nothing yet. library: NVIDIA's with AUTO, otherwise the chosen
    backend's.
    """
    if name != AUTO:
        return BACKENDS[name].make(library, library_of)
    members = ((BACKENDS[each].vendor, BACKENDS[each].make) for each in AUTOMATIC)
    return BackendGroup({vendor: make(library if vendor == NVIDIA else "", library_of) for vendor, make in members})
