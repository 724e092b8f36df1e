"""libkineto_counters.so through ctypes: see daemon/native_counters/counters.h. Calls release the interpreter lock."""

import ctypes
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from kinetod.counters.sample_rings import Failure, RingWriter, load

# kn_failure_kind
LOADING, DRIVER, CUPTI, SYSTEM = range(1, 5)
DRIVER_LIBRARY = "libcuda"  # the call of a failure to load it
SUPPORT_UNKNOWN, UNSUPPORTED, DISABLED, SUPPORTED = range(4)
METRIC_TYPES = range(3)  # counters, ratios, throughputs
HARDWARE_BUFFER_BYTES = 64 << 20  # as Kineto has it
IMAGE_BYTES = 16 << 20
POLL_NS = 50_000_000
_NAMES_BYTES = 1 << 20


class NativeFailure(Exception):
    """A call that failed. kind: LOADING, DRIVER, CUPTI or SYSTEM; result: the number that the call gave."""

    def __init__(self, kind: int, result: int, call: str, text: str) -> None:
        super().__init__(f"{call}: {text}" + (f" ({result})" if result else ""))
        self.kind = kind
        self.result = result
        self.call = call


class _Device(ctypes.Structure):
    _fields_ = (
        ("uuid", ctypes.c_uint8 * 16),
        ("name", ctypes.c_char * 128),
        ("pci_bus_id", ctypes.c_char * 32),
        ("chip", ctypes.c_char * 32),
        ("availability", ctypes.c_int32),
        *(
            (name, ctypes.c_uint32)
            for name in ("supported", "architecture", "sli", "vgpu", "confidential_compute", "mining", "wsl")
        ),
    )


class _Metric(ctypes.Structure):
    _fields_ = (("unit", ctypes.c_char * 64), ("description", ctypes.c_char * 512), ("type", ctypes.c_uint32))


class _Request(ctypes.Structure):
    _fields_ = (
        ("metrics", ctypes.POINTER(ctypes.c_char_p)),
        *(
            (name, ctypes.c_uint64)
            for name in ("interval", "interval_ns", "poll_ns", "hardware_buffer_bytes", "image_bytes_most")
        ),
        *((name, ctypes.c_uint32) for name in ("device", "metric_count", "by_clock")),
    )


class SampledGpu(msgspec.Struct, frozen=True, kw_only=True):
    """kn_device. supported and what follows: DRIVER_LIBRARY = "libcuda"  # the call of a failure to load it
    SUPPORT_UNKNOWN, UNSUPPORTED, DISABLED or SUPPORTED."""

    index: int  # CUDA's
    uuid: str  # as NVML has it: GPU-…
    name: str
    pci_bus_id: str
    chip: str
    availability: int
    supported: int
    architecture: int
    sli: int
    vgpu: int
    confidential_compute: int
    mining: int
    wsl: int


class NativeSession:
    """kn_session: one GPU that is being sampled into a ring."""

    def __init__(self, library: Any, session: int, ring: RingWriter) -> None:
        self._library = library
        self._session = session
        self._ring = ring  # must outlive the session

    def run(self) -> None:
        """Decodes in this thread until the end, which the ring tells."""
        self._library.kn_run(self._session)

    def close(self) -> None:
        """Gives the counters back."""
        session, self._session = self._session, 0
        if session:
            self._library.kn_free(session)


class NativeCupti:
    """kn_library: a loaded libcupti. Methods raise NativeFailure."""

    def __init__(self, cupti: str, cuda: str) -> None:
        """cupti, cuda: names or paths of libraries. Raises NativeFailure, NativeLibraryError."""
        self._library = _declared()
        failure = Failure()
        self._handle = self._library.kn_open(cuda.encode(), cupti.encode(), ctypes.byref(failure))
        if not self._handle:
            raise _raised(failure)
        self.version = int(self._library.kn_version(self._handle))

    def gpus(self) -> list[SampledGpu]:
        """Every GPU, in the driver's order."""
        return [self._gpu(index) for index in range(self._library.kn_device_count(self._handle))]

    def _gpu(self, index: int) -> SampledGpu:
        found, failure = _Device(), Failure()
        if self._library.kn_describe(self._handle, index, ctypes.byref(found), ctypes.byref(failure)):
            raise _raised(failure)
        facts = {field[0]: getattr(found, field[0]) for field in _Device._fields_}
        texts = {name: facts[name].decode("utf-8", "replace") for name in ("name", "pci_bus_id", "chip")}
        name = f"GPU-{uuid.UUID(bytes=bytes(found.uuid))}"
        return SampledGpu(**{**facts, **texts, "uuid": name, "index": index})

    def dimension(self, device: int, metric: str) -> str:
        """The unit of a metric's counter, such as "byte"."""
        found, failure = _Metric(), Failure()
        if self._library.kn_metric_of(
            self._handle, device, metric.encode(), ctypes.byref(found), ctypes.byref(failure)
        ):
            raise _raised(failure)
        return str(found.unit.decode("utf-8", "replace"))

    def passes(self, device: int, metrics: Sequence[str]) -> int:
        """In how many passes these can be measured together."""
        passes, failure = ctypes.c_uint64(), Failure()
        if self._library.kn_passes(
            self._handle, device, _names(metrics), len(metrics), ctypes.byref(passes), ctypes.byref(failure)
        ):
            raise _raised(failure)
        return passes.value

    def base_metrics(self, device: int) -> list[str]:
        """The names without submetrics."""
        names: list[str] = []
        text, failure = ctypes.create_string_buffer(_NAMES_BYTES), Failure()
        for kind in METRIC_TYPES:
            if self._library.kn_base_metrics(self._handle, device, kind, text, len(text), ctypes.byref(failure)) < 0:
                raise _raised(failure)
            names += text.value.decode("utf-8", "replace").split()
        return names

    def start(
        self, device: int, metrics: Sequence[str], ring: RingWriter, *, interval_ns: int, cycles: int = 0
    ) -> NativeSession:
        """Begins. cycles: the interval in cycles of the system clock, for chips that have no timer; 0: it has one."""
        names = _names(metrics)
        request = _Request(
            metrics=names,
            interval=cycles or interval_ns,
            interval_ns=interval_ns,
            poll_ns=POLL_NS,
            hardware_buffer_bytes=HARDWARE_BUFFER_BYTES,
            image_bytes_most=IMAGE_BYTES,
            device=device,
            metric_count=len(metrics),
            by_clock=bool(cycles),
        )
        failure = Failure()
        session = self._library.kn_start(
            self._handle, ctypes.byref(request), ctypes.byref(ring.writer), ctypes.byref(failure)
        )
        if not session:
            raise _raised(failure)
        return NativeSession(self._library, session, ring)


def _names(metrics: Sequence[str]) -> Any:
    return (ctypes.c_char_p * len(metrics))(*(name.encode() for name in metrics))


def _declared() -> Any:
    library = load()
    handle, u32, text, failure = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_char_p, ctypes.POINTER(Failure)
    names = ctypes.POINTER(ctypes.c_char_p)
    for name, result, arguments in (
        ("kn_open", handle, [text, text, failure]),
        ("kn_version", u32, [handle]),
        ("kn_device_count", u32, [handle]),
        ("kn_describe", ctypes.c_int, [handle, u32, ctypes.POINTER(_Device), failure]),
        ("kn_metric_of", ctypes.c_int, [handle, u32, text, ctypes.POINTER(_Metric), failure]),
        ("kn_passes", ctypes.c_int, [handle, u32, names, u32, ctypes.POINTER(ctypes.c_uint64), failure]),
        ("kn_base_metrics", ctypes.c_int64, [handle, u32, u32, text, ctypes.c_size_t, failure]),
        ("kn_start", handle, [handle, ctypes.POINTER(_Request), ctypes.c_void_p, failure]),
        ("kn_run", None, [handle]),
        ("kn_free", None, [handle]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _raised(failure: Failure) -> NativeFailure:
    call, text = (each.decode("utf-8", "replace") for each in (failure.call, failure.text))
    return NativeFailure(failure.kind, failure.result, call, text)
