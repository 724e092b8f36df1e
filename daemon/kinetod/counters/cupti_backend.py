"""The backend that every installation has: libcupti through our own C library."""

import ctypes
import importlib.util
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from kineto_agent.system.mappings import mapped_files
from kineto_trace.base.install_advice import install_advice

from kinetod.counters.interface import (
    SETS,
    CounterCode,
    CounterDevice,
    CounterError,
    CounterMetric,
    CounterPlan,
    LeftOutMetric,
    WantedCounters,
    checked_wanted,
    described,
)
from kinetod.counters.sample_rings import Failure, NativeLibraryError, RingWriter, load
from kinetod.plugins.file_trust import problem_of, trusted_uids
from kinetod.processes.identity import text_of

CUDA = "libcuda.so.1"
# Where the driver has no time trigger, the interval is in cycles of the system clock, which varies; samples carry their
# length. GA100: up to 1410 MHz.
_BY_CLOCK_HZ = {"GA100": 1_410_000_000}
_MAY_BE_MISSING = "nvl"  # NVLink's metrics are listed even without a link, and then fail to start
_FILES = "libcupti.so.[0-9]*"
# Folders of the wheels nvidia-cuda-cupti and nvidia-cuda-cupti-cu12, below the package `nvidia`.
_WHEEL_FOLDERS = ("cu[0-9]*/lib", "cuda_cupti/lib")
_HOST_FOLDERS = (
    "usr/local/cuda/extras/CUPTI/lib64",
    "usr/local/cuda/targets/*/lib",
    "usr/local/cuda-*/extras/CUPTI/lib64",
    "usr/local/cuda-*/targets/*/lib",
    "opt/cuda/extras/CUPTI/lib64",
    "usr/lib/*-linux-gnu",
    "usr/lib64",
)
INVALID_METRIC_NAME = 17
HARDWARE_BUSY = 26
NOT_SUPPORTED = 27
INSUFFICIENT_PRIVILEGES = 35
VIRTUAL_INSUFFICIENT_PRIVILEGES = 40
UNKNOWN_CHIP = 46
UNKNOWN = 999
UNAVAILABLE = {
    15: "CUPTI cannot find libnvperf_host.so and libnvperf_target.so; reinstall its package, which contains them",
    NOT_SUPPORTED: "CUPTI cannot sample the counters of this GPU",
    33: "this is a virtual GPU, which provides no counters",
    38: "CUPTI cannot sample the counters of a GPU of this generation",
    41: "confidential computing is on, so the driver provides no counters",
    42: "NVIDIA's mining GPUs provide no counters",
    43: "MIG is on: counters of units that instances share would be wrong",
    44: "SLI is on, so the driver provides no counters",
    45: "the Windows Subsystem for Linux provides no counters",
    UNKNOWN_CHIP: "this libcupti does not support the chip",
}
_CUDA_NO_DEVICE = 100
_OLD_CHIPS = ("GV", "TU")
# kn_failure_kind
LOADING, DRIVER, CUPTI, SYSTEM = range(1, 5)
DRIVER_LIBRARY = "libcuda"  # the call that is reported if loading it fails
SUPPORT_UNKNOWN, UNSUPPORTED, DISABLED, SUPPORTED = range(4)
METRIC_TYPES = range(3)  # counters, ratios, throughputs
HARDWARE_BUFFER_BYTES = 64 << 20  # as in Kineto
IMAGE_BYTES = 16 << 20
POLL_NS = 50_000_000
_NAMES_BYTES = 1 << 20


# libkineto_counters.so through ctypes: see daemon/native_counters/counters.h. Calls release the interpreter lock.
class NativeFailure(Exception):
    """A call failed. kind: LOADING, DRIVER, CUPTI or SYSTEM; result: the number that the call returned."""

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
    """One kn_device. supported and the fields after it: SUPPORT_UNKNOWN, UNSUPPORTED, DISABLED or SUPPORTED."""

    index: int  # CUDA's
    uuid: str  # as in NVML: GPU-…
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
        """Decodes in this thread until the ring says to end."""
        self._library.kn_run(self._session)

    def close(self) -> None:
        """Releases the counters."""
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
        """How many passes it takes to measure these together."""
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
        """Starts sampling. cycles: the interval in cycles of the system clock, for chips without a timer; 0: use the
        timer.
        """
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


# Chooses the libcupti that kinetod-counters loads: the configured one, the wheel's, the host's, or a process's.
#
# The library runs with the rights of kinetod-counters. So its path comes from the command line or from folders that
# only root and its user can change, never from a request; libraries of other users' processes are not used.
def find_libraries(root: Path = Path("/"), pids: tuple[int, ...] = (), proc: Path = Path("/proc")) -> list[str]:
    """Paths to try, the best first: the wheel's, the host's (the newest first in each folder), those of processes."""
    found = [*_of_wheel(), *_of_host(root)]
    for pid in pids:
        found += [path for path in mapped_files("libcupti.so", str(proc / str(pid) / "maps")) if is_trusted(path)]
    return list(dict.fromkeys(found))


def is_trusted(path: str) -> bool:
    """Whether only root and our user could have created it and the files beside it."""
    return Path(path).is_absolute() and not problem_of([Path(path).resolve().parent], trusted_uids())


def _of_wheel() -> Iterator[str]:
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        return
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        for pattern in _WHEEL_FOLDERS:
            yield from _in_order(Path(folder), pattern)


def _of_host(root: Path) -> Iterator[str]:
    for folder in _HOST_FOLDERS:
        yield from _in_order(root, folder)


def _in_order(root: Path, folders: str) -> list[str]:
    return sorted((str(path) for path in root.glob(f"{folders}/{_FILES}")), reverse=True)


class CuptiSampling:
    """A GPU that is being sampled."""

    def __init__(self, session: NativeSession, plan: CounterPlan) -> None:
        self._session = session
        self.plan = plan

    def run(self) -> None:
        """Decodes until the end."""
        self._session.run()

    def close(self) -> None:
        """Releases the counters."""
        self._session.close()


class CuptiBackend:
    """Implements interface.CounterBackend. library: path of a libcupti; empty: tries find_libraries' in turn."""

    name = "cupti"
    serves_once = False

    def __init__(
        self,
        library: str = "",
        *,
        cuda: str = CUDA,
        find: Callable[[], Sequence[str]] = find_libraries,
        proc: Path = Path("/proc"),
    ) -> None:
        self._paths = (lambda: [library]) if library else find
        self._cuda = cuda
        self._proc = proc
        self._lock = threading.Lock()
        self._cupti: NativeCupti | None = None
        self._gpus: dict[str, SampledGpu] = {}
        self.library_version = ""

    def open(self) -> None:
        """Loads the first library that works."""
        with self._lock:
            if self._cupti is None:
                os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # numbered as in NVML and the kernel, and all of them
                os.environ.pop("CUDA_VISIBLE_DEVICES", None)
                self._cupti = self._opened()
                self.library_version = str(self._cupti.version)

    def _opened(self) -> NativeCupti:
        failures: list[str] = []
        for path in self._paths():
            try:
                return NativeCupti(path, self._cuda)
            except NativeLibraryError as exc:
                raise CounterError(CounterCode.FAILED, str(exc)) from exc
            except NativeFailure as exc:
                if exc.kind != LOADING or exc.call == DRIVER_LIBRARY:
                    raise translated(exc) from exc
                failures.append(f"{path}: {exc}")
        tried = "; ".join(failures) or "no libcupti is installed"
        advice = f"{install_advice('nvidia-cuda-cupti')}, or name a library with --library"
        raise CounterError(CounterCode.UNAVAILABLE, f"no libcupti from CUDA 12.8 or later: {tried}; {advice}")

    def _loaded(self) -> NativeCupti:
        self.open()
        assert self._cupti is not None
        return self._cupti

    def devices(self) -> list[CounterDevice]:
        """Every GPU that CUDA sees."""
        cupti = self._loaded()
        try:
            gpus = cupti.gpus()
        except NativeFailure as exc:
            raise translated(exc) from exc
        self._gpus = {gpu.uuid: gpu for gpu in gpus}
        return [self._device(gpu) for gpu in gpus]

    def _device(self, gpu: SampledGpu) -> CounterDevice:
        code, problem = problem_of_gpu(gpu, self._proc) or ("", "")
        return CounterDevice(
            uuid=gpu.uuid, index=gpu.index, name=gpu.name, chip=gpu.chip, pci_bus_id=gpu.pci_bus_id, code=code,
            problem=problem,
        )  # fmt: skip

    def _gpu(self, uuid: str) -> SampledGpu:
        if uuid not in self._gpus:
            self.devices()
        if (gpu := self._gpus.get(uuid)) is None:
            reason = f"there is no GPU {uuid}; `kinetoctl counters list` lists those that can be measured"
            raise CounterError(CounterCode.UNAVAILABLE, reason)
        if (problem := problem_of_gpu(gpu, self._proc)) is not None:
            raise CounterError(problem[0], f"GPU {uuid}: {problem[1]}")
        return gpu

    def base_metrics(self, uuid: str) -> list[str]:
        """Counters, ratios and throughputs of the chip."""
        cupti = self._loaded()
        gpu = self._gpu(uuid)
        try:
            return cupti.base_metrics(gpu.index)
        except NativeFailure as exc:
            raise translated(exc, uuid) from exc

    def plan(self, uuid: str, wanted: WantedCounters) -> CounterPlan:
        """The metrics that fit into one pass."""
        checked_wanted(wanted, tuple(SETS))
        cupti = self._loaded()
        gpu = self._gpu(uuid)
        if wanted.set_name:
            return _fitting(cupti, gpu, SETS[wanted.set_name])
        return CounterPlan(metrics=_all_of(cupti, gpu, wanted.metrics))

    def start(
        self, uuid: str, wanted: WantedCounters, interval_ns: int, make_ring: Callable[[int], RingWriter]
    ) -> CuptiSampling:
        """Starts the sampling."""
        plan = self.plan(uuid, wanted)
        gpu = self._gpu(uuid)
        try:
            return CuptiSampling(self._started(gpu, plan, interval_ns, make_ring), plan)
        except NativeFailure as exc:
            links = [metric for metric in plan.metrics if metric.name.startswith(_MAY_BE_MISSING)]
            if exc.kind != CUPTI or exc.result != UNKNOWN or not wanted.set_name or not links:
                raise translated(exc, uuid, self._proc) from exc
        plan = CounterPlan(
            metrics=tuple(metric for metric in plan.metrics if metric not in links),
            left_out=(*plan.left_out, *(LeftOutMetric(name=each.name, why="this GPU has no NVLink") for each in links)),
        )
        try:
            return CuptiSampling(self._started(gpu, plan, interval_ns, make_ring), plan)
        except NativeFailure as exc:
            raise translated(exc, uuid, self._proc) from exc

    def _started(
        self, gpu: SampledGpu, plan: CounterPlan, interval_ns: int, make_ring: Callable[[int], RingWriter]
    ) -> NativeSession:
        hertz = _BY_CLOCK_HZ.get(gpu.chip, 0)
        names = [metric.name for metric in plan.metrics]
        ring = make_ring(len(names))
        cycles = interval_ns * hertz // 10**9
        return self._loaded().start(gpu.index, names, ring, interval_ns=interval_ns, cycles=cycles)


def _fitting(cupti: NativeCupti, gpu: SampledGpu, wanted: Sequence[CounterMetric]) -> CounterPlan:
    """Keeps as many as fit into one pass, in this order, one for each label. Raises CounterError if none does."""
    known, left_out = list[CounterMetric](), dict[str, LeftOutMetric]()  # the latter by label
    for metric in wanted:
        if any(metric.label == each.label for each in known):
            continue
        try:
            passes = cupti.passes(gpu.index, [each.name for each in (*known, metric)])
        except NativeFailure as exc:
            if exc.kind != CUPTI or exc.result not in (INVALID_METRIC_NAME, UNKNOWN, HARDWARE_BUSY):
                raise translated(exc, gpu.uuid) from exc
            left_out[metric.label] = LeftOutMetric(name=metric.name, why=f"{gpu.chip} does not have it")
            continue
        if passes == 1:
            known.append(metric)
            left_out.pop(metric.label, None)
        else:
            why = f"it needs {passes} passes together with the others" if known else f"it needs {passes} passes"
            left_out[metric.label] = LeftOutMetric(name=metric.name, why=why)
    if not known:
        first = next(iter(left_out.values()))
        reason = f"GPU {gpu.uuid}: {gpu.chip} cannot measure any metric of this set ({first.name}: {first.why})"
        raise CounterError(CounterCode.INVALID_METRIC, reason)
    return CounterPlan(metrics=tuple(known), left_out=tuple(left_out.values()))


def _all_of(cupti: NativeCupti, gpu: SampledGpu, names: Sequence[str]) -> tuple[CounterMetric, ...]:
    """Returns all of these metrics. Raises CounterError if one is unknown, or if they do not fit into one pass."""
    metrics = []
    for name in names:
        try:
            metrics.append(described(name, cupti.dimension(gpu.index, name)))
            alone = cupti.passes(gpu.index, [name])
        except NativeFailure as exc:
            error = translated(exc, gpu.uuid)
            if error.code is not CounterCode.INVALID_METRIC:
                raise error from exc
            reason = f"{gpu.chip} has no metric {name!r}; `kinetoctl counters list --metrics` lists all"
            completed = "to be completed with a submetric, such as .avg or .sum.per_second"
            raise CounterError(error.code, f"GPU {gpu.uuid}: {reason}, {completed}") from exc
        if alone != 1:
            reason = f"{name} needs {alone} passes on {gpu.chip}, but a running program can be sampled in only one"
            raise CounterError(CounterCode.INVALID_METRIC, f"GPU {gpu.uuid}: {reason}")
    try:
        passes = cupti.passes(gpu.index, names)
    except NativeFailure as exc:
        raise translated(exc, gpu.uuid) from exc
    if passes != 1:
        reason = f"these {len(names)} metrics need {passes} passes on {gpu.chip}, but only one is possible; name fewer"
        raise CounterError(CounterCode.INVALID_METRIC, f"GPU {gpu.uuid}: {reason}")
    return tuple(metrics)


# Translates CUPTI's results into codes and advice for users of counters; the only place that does.
#
# The numbers are CUptiResult of cupti_result.h, CUDA 12.8 to 13.5.
def translated(failure: NativeFailure, gpu: str = "", proc: Path = Path("/proc")) -> CounterError:
    """Error for a failed call; HARDWARE_BUSY without the holder, which the caller may find out."""
    of = f"GPU {gpu}: " if gpu else ""
    if failure.kind == LOADING:
        reason = f"{of}no counters: {failure}; install the driver and, for CUPTI, {install_advice('nvidia-cuda-cupti')}"
        return CounterError(CounterCode.UNAVAILABLE, reason)
    if failure.kind == DRIVER:
        what = "the driver sees no GPU" if failure.result == _CUDA_NO_DEVICE else f"the driver failed: {failure}"
        return CounterError(CounterCode.UNAVAILABLE, f"{of}{what}; check that nvidia-smi lists the GPU for this user")
    if failure.kind != CUPTI:
        return CounterError(CounterCode.FAILED, f"{of}{failure}")
    if failure.result == HARDWARE_BUSY:
        return CounterError(CounterCode.BUSY, f"{of}another process is using its counters")
    if failure.result in (INSUFFICIENT_PRIVILEGES, VIRTUAL_INSUFFICIENT_PRIVILEGES):
        return CounterError(CounterCode.NOT_PERMITTED, f"{of}{rights_problem(proc)}")
    if failure.result == INVALID_METRIC_NAME:
        return CounterError(
            CounterCode.INVALID_METRIC, f"{of}it has no such metric; `kinetoctl counters list --metrics` lists all"
        )
    if failure.result in UNAVAILABLE:
        return CounterError(CounterCode.UNAVAILABLE, f"{of}{_unavailable(failure.result)}")
    return CounterError(CounterCode.FAILED, f"{of}{failure}")


def _unavailable(result: int) -> str:
    newer = f"; for a newer one, {install_advice('-U nvidia-cuda-cupti')}" if result == UNKNOWN_CHIP else ""
    return UNAVAILABLE[result] + newer


def rights_problem(proc: Path = Path("/proc")) -> str:
    """Why the driver refuses, and how to change that."""
    restricted = "RmProfilingAdminOnly: 1" in text_of(proc / "driver/nvidia/params")
    why = " (RmProfilingAdminOnly: 1 in /proc/driver/nvidia/params)" if restricted else ""
    return (
        f"the driver restricts counters to administrators{why}; enable the drop-in of kinetod-counters.service "
        "that adds CAP_SYS_ADMIN, or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
    )


def problem_of_gpu(gpu: SampledGpu, proc: Path = Path("/proc")) -> tuple[CounterCode, str] | None:
    """Why this GPU cannot be measured, as far as is known without trying."""
    if " MIG " in f" {gpu.name} ":
        return CounterCode.UNAVAILABLE, UNAVAILABLE[43]
    if not gpu.chip:
        return CounterCode.UNAVAILABLE, _unavailable(UNKNOWN_CHIP)
    if gpu.chip.startswith(_OLD_CHIPS) or gpu.architecture == UNSUPPORTED:
        return CounterCode.UNAVAILABLE, f"{gpu.chip} is too old: continuous sampling needs Ampere or later"
    for level, result in (
        (gpu.sli, 44), (gpu.vgpu, 33), (gpu.confidential_compute, 41), (gpu.mining, 42), (gpu.wsl, 45),
    ):  # fmt: skip
        if level in (UNSUPPORTED, DISABLED):
            off = "; the host's administrator can enable profiling" if level == DISABLED else ""
            return CounterCode.UNAVAILABLE, UNAVAILABLE[result] + off
    if gpu.supported == UNSUPPORTED:
        return CounterCode.UNAVAILABLE, UNAVAILABLE[NOT_SUPPORTED]
    if gpu.availability in (INSUFFICIENT_PRIVILEGES, VIRTUAL_INSUFFICIENT_PRIVILEGES):
        return CounterCode.NOT_PERMITTED, rights_problem(proc)
    return None
