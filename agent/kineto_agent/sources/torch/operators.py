"""Records PyTorch's operators and annotations on all threads.

Theory of operation
    There are two ways. The observer (agent/native/torch/observer.c) registers our own RecordFunction callbacks in C: it
    conflicts with nothing, needs no GIL, and all its records are available at once when it stops. Torch's own profiler
    (sources/torch/torch_profiler.py) covers what the observer cannot: FLOPs, shapes if the layout of this torch's
    objects is unknown, and any torch without the functions that the observer needs. `way` decides; metadata["way"]
    informs the user. Torch's profiler is also the way to the kernels of accelerators that have registered a profiler
    with torch (sources/torch/device_profilers.py); the operators then come from the same session.

    The layout of the callbacks is checked against the loaded library before use, and so are the offsets of the sequence
    number and the inputs in a RecordFunction; tensors created here verify the layout of tensors, once, before shapes
    are recorded for the first time.
"""

import os
import re
import struct
import sys
from typing import Any, Dict, FrozenSet, List, NamedTuple, Optional, Tuple

from kineto_agent.protocol.records import TORCH_OPS_FORMAT
from kineto_agent.sources.interface import (
    PROFILER_OPTIONS,
    SourceCounts,
    SourceError,
    SourceOutcome,
    SourceRequest,
    SourceSession,
)
from kineto_agent.sources.torch import device_profilers
from kineto_agent.system import mappings
from kineto_agent.system.debuglog import log, log_exception

NAME = "torch_ops"
ACTIVITY_TYPES = ("cpu_op", "user_annotation")
_STOP_LIMIT_MS = 1000
_PAGE_BYTES = 4096
_MOST_BUFFER_BYTES = 64 * 1024  # 1024 records: any number of threads must fit, each with its own buffer
_LEAST_BUFFERS, _MANY_BUFFERS = 64, 8192
_PREFAULT_BYTES = 16 * 1024 * 1024  # 0.25 s of 1 M ops/s, until the daemon frees buffers
_STRINGS_BYTES = 1024 * 1024  # some 10,000 names
_INPUTS_STRINGS_BYTES = 16 * 1024 * 1024  # about 24,000 combinations of inputs
_RELEASE = re.compile(r"(\d+)\.(\d+)\.\d+(\.post\d+)?(\+.*)?")
_LIBRARY = b"/libtorch_cpu.so"
_mapped: Dict[str, str] = {}  # "path" -> path of libtorch_cpu
_unfit: List[str] = []  # why the observer can never work in this process
_tensors_fit: Dict[bool, bool] = {}  # True -> whether the layout of tensors was verified


class Way(NamedTuple):
    """How to serve a request."""

    profiler: str  # why torch's profiler must be used; "": the observer is
    inputs: bool


def way(options: Dict[str, Any], version: str, layout_known: bool, device: str = "") -> Way:
    """The way for these options (wire.Start.options) where the observer works. device: the name of an accelerator whose
    activities only torch's profiler records, and which are wanted.
    """
    if device:
        return Way("activities of %s need it" % device, False)
    for name in PROFILER_OPTIONS:
        if options.get(name):
            return Way("%s needs it" % name, False)
    inputs = bool(options.get("record_shapes"))
    if inputs and not layout_known:
        return Way("record_shapes needs it, because the observer does not know the layout of torch %s" % version, True)
    return Way("", inputs)


def device_of(request: SourceRequest) -> Optional[device_profilers.DeviceProfiler]:
    """The accelerator whose activities are requested from this source."""
    if not request.activity_types & device_profilers.ALL_TYPES:
        return None
    return device_profilers.find()


def _named(device: Optional[device_profilers.DeviceProfiler]) -> str:
    return "" if device is None else device.name


def release_of(version: str) -> Tuple[int, int]:
    """The major and minor version of a released torch; (0, 0) for anything else: a pre-release may differ from both."""
    match = _RELEASE.fullmatch(version)
    return (int(match.group(1)), int(match.group(2))) if match else (0, 0)


def torch_version() -> str:
    """Version of the torch in this process; "" if there is none or it is still being imported."""
    torch = sys.modules.get("torch")
    return str(getattr(torch, "__version__", "")) if hasattr(torch, "_C") else ""


def library_path() -> str:
    """Path of the libtorch_cpu that this process has mapped, or ""."""
    if "path" not in _mapped:
        for line in mappings.read().split(b"\n"):
            if line.endswith(_LIBRARY):
                _mapped["path"] = os.fsdecode(line.split(None, 5)[5])
                break
    return _mapped.get("path", "")


class TorchOpsSource:
    """Every operator and annotation of every thread."""

    name = NAME
    on_request: FrozenSet[str] = frozenset()

    def activity_types(self) -> List[str]:
        """Offered as soon as the program has imported torch; those of an accelerator once it is registered there."""
        if not (torch_version() and library_path()):
            return []
        device = device_profilers.find()
        return [*ACTIVITY_TYPES, *(device.types if device else ())]

    def last_resort(self) -> FrozenSet[str]:
        """Activity types left to any other source that offers them."""
        device = device_profilers.find()
        return frozenset(device.types if device and device.last_resort else ())

    def would_yield(self, request: SourceRequest) -> bool:
        """True only with torch's profiler. If the observer failed here before, it is not tried again."""
        from kineto_agent.sources.torch.object_layouts import LAYOUTS

        version = torch_version()
        known = release_of(version) in LAYOUTS and _tensors_fit.get(True, True)
        return bool(_unfit or way(request.options, version, known, _named(device_of(request))).profiler)

    def prepare(self, request: SourceRequest) -> SourceSession:
        """Choose the way and create its arena. Raises SourceError."""
        version, device = torch_version(), device_of(request)
        why = way(request.options, version, True, _named(device)).profiler or "".join(_unfit)
        if not why:
            try:
                return self._observe(request, version)
            except _NeedsProfiler as exc:
                why = exc.why
        from kineto_agent.sources.torch import torch_profiler

        return torch_profiler.prepare(request, why, device)

    def _observe(self, request: SourceRequest, version: str) -> "TorchOpsSession":
        from kineto_agent.sources.torch import observer_binding  # ctypes: only where it is needed
        from kineto_agent.sources.torch.object_layouts import LAYOUTS

        observer = observer_binding.Observer.of_process()
        try:
            layout = observer.open(library_path(), LAYOUTS.get(release_of(version), ()))
        except SourceError as exc:
            if exc.reason_code != "TORCH_LIBRARY":
                raise
            _unfit.append("the observer cannot work: %s" % exc.reason)
            raise _NeedsProfiler(_unfit[0]) from exc
        if layout is None:
            log("torch_ops: the layout of torch %s is not known", version)
        known = layout is not None and (not request.options.get("record_shapes") or tensors_fit(observer))
        chosen = way(request.options, version, known)
        if chosen.profiler:
            raise _NeedsProfiler(chosen.profiler)
        config = observer_binding.ObserverConfig(
            buffer_limit_bytes=request.buffer_limit_bytes,
            buffer_bytes=buffer_bytes(request.buffer_limit_bytes),
            strings_bytes=min(_INPUTS_STRINGS_BYTES if chosen.inputs else _STRINGS_BYTES, request.buffer_limit_bytes),
            prefault_bytes=_PREFAULT_BYTES,
            record_inputs=chosen.inputs,
        )
        metadata: Dict[str, Any] = {"way": "observer, torch %s" % version, "torch_version": version}
        if layout is not None:
            metadata["dtypes"] = list(layout.dtype_names)
        return TorchOpsSession(observer, observer.prepare(config), metadata, request.activity_types, layout is not None)


class _NeedsProfiler(Exception):
    """The observer cannot serve this request."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


def buffer_bytes(limit_bytes: int) -> int:
    """The size of one buffer, so that a small arena has enough of them and a large one not too many."""
    wanted = min(limit_bytes // _LEAST_BUFFERS, _MOST_BUFFER_BYTES)
    pages = max(wanted, limit_bytes // _MANY_BUFFERS, _PAGE_BYTES) // _PAGE_BYTES
    return pages * _PAGE_BYTES


def tensors_fit(observer: Any) -> bool:
    """Whether the layout of tensors is right: checks two new tensors, once per process."""
    if True not in _tensors_fit:
        try:
            _tensors_fit[True] = look_at_tensors(observer, sys.modules["torch"])
        except Exception:  # noqa: BLE001 - then they are not looked at
            log_exception("torch_ops: the layout of tensors cannot be checked")
            _tensors_fit[True] = False
    return _tensors_fit[True]


def look_at_tensors(observer: Any, torch: Any) -> bool:
    """Whether two new tensors are described correctly."""
    inline = torch.empty_strided((2, 3, 5), (15, 1, 3), dtype=torch.float64, device="cpu")
    outside = torch.empty((1, 2, 3, 4, 5, 6), dtype=torch.int16, device="cpu")
    expected = (
        (inline, struct.pack("<BBB6q", 7, 3, 0, 2, 3, 5, 15, 1, 3)),
        (outside, struct.pack("<BBB12q", 2, 6, 0, 1, 2, 3, 4, 5, 6, 720, 360, 120, 30, 6, 1)),
    )
    return all(
        observer.describe_tensor(tensor._cdata) == (entry, tensor.untyped_storage().data_ptr())
        for tensor, entry in expected
    )


class TorchOpsSession:
    """One recording by the observer."""

    format = TORCH_OPS_FORMAT
    yields = False

    def __init__(
        self, observer: Any, arena_fd: int, metadata: Dict[str, Any], wanted: FrozenSet[str], layout_known: bool
    ) -> None:
        self._observer = observer
        self._layout_known = layout_known
        self.arena_fd = arena_fd
        self.metadata = dict(metadata, activity_types=sorted(wanted))

    def start(self) -> None:
        """Register the callbacks. Raises SourceError."""
        self._observer.start()

    def counts(self) -> SourceCounts:
        """Records so far, including those of tensors."""
        counts = self._observer.counts()
        return SourceCounts(counts.records, counts.bytes, counts.dropped)

    def stop(self) -> SourceOutcome:
        """Remove the callbacks; never raises."""
        result = self._observer.stop(_STOP_LIMIT_MS)
        counts = SourceCounts(result.counts.records, result.counts.bytes, result.counts.dropped)
        metadata = {
            "way": self.metadata["way"],
            "threads": result.threads,
            "ended_elsewhere": result.ended_elsewhere,
            "unfinished": result.unfinished,
        }
        return SourceOutcome(counts, metadata, self._warnings(result), detach_ns=0, cpu_ns=0)

    def _warnings(self, result: Any) -> List[str]:
        said = [
            (result.names_lost, "%d operator names did not fit into their table: they are shown as unknown"),
            (result.inputs_lost, "%d sets of operator inputs did not fit into their table: their shapes are missing"),
            (result.too_deep, "%d operators were dropped: they were nested more than 256 deep"),
            (result.unserved, "%d operators were dropped: they ran on more than 2048 threads at once"),
            (result.stuck, "%d threads did not return from an operator's callback: their last operators are missing"),
        ]
        warnings = [text % number for number, text in said if number]
        if not self._layout_known:
            warnings.append(
                "the layout of torch %s is not known to this agent: sequence numbers, which link backward to forward "
                "operators, are not recorded (a newer kineto-agent may know it)" % self.metadata["torch_version"]
            )
        return warnings

    def give_way(self) -> None:
        """Do nothing: the observer and torch's profiler do not conflict."""

    def close(self) -> None:
        """Free the arena."""
        self._observer.close()
