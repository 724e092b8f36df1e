"""Records the devices of a PJRT plug-in in a program that uses XLA without JAX (torch_xla, other languages).

Theory of operation
    Such a program has the plug-in's library mapped, but no Python profiler. The plug-in's own profiler is called
    through its C interface: it returns the planes of devices, and none of the host.

    It is recorded only on request. A plug-in may allow only one session at a time, and does not show whether the
    program has one: then ours fails with the plug-in's message, and the program's would fail while ours runs. Plug-ins
    for NVIDIA's and AMD's GPUs are left alone: their profilers would take CUPTI or rocprofiler away from ours.
"""

import _thread
import atexit
import ctypes
import os
import re
import struct
import time
from typing import Any, Dict, FrozenSet, Iterator, List, NamedTuple

from kineto_agent.protocol.records import PART_HEAD, XPLANE_FORMAT
from kineto_agent.sources.file_arena import FileArena
from kineto_agent.sources.interface import SourceCounts, SourceError, SourceOutcome, SourceRequest
from kineto_agent.sources.jax import jax_runtime
from kineto_agent.system import mappings
from kineto_agent.system.debuglog import log_exception
from kineto_agent.system.libraries import Library

# Calls the profiler of a PJRT plug-in through its C interface: PLUGIN_Profiler_Api, version 1.
#
# A plug-in is a library that exports GetPjrtApi(). Its PJRT_Api begins with its size and a chain of extensions; the one
# of type PROFILER has a table of functions: create, start, stop, collect data, destroy. Each takes one struct, which
# begins with its own size, and returns an error object or NULL. ctypes calls them without the GIL.
#
# The plug-in is not ours, and may have an unknown version. So structs are read through /proc/self/mem, where a wrong
# address is an error and not a crash, and every size must be at least the known one.
#
# The header says that collecting takes two calls, the first of which only states the size; XLA itself calls once and
# takes the address that plug-ins return there. Both are accepted: with an address, the data is copied from there;
# without, a second call fills a buffer of ours. An impossible size means another layout.
#
# Field offsets are those of xla/pjrt/c/pjrt_c_api_profiler_extension.h and
# xla/backends/profiler/plugin/profiler_c_api.h.
_UNAVAILABLE = "PJRT_PROFILER_UNAVAILABLE"
_FAILED = "PJRT_PROFILER_FAILED"
_PLUGIN = re.compile(rb"(?:pjrt|libtpu|xla_[a-z]+_plugin)[^/]*\.so", re.IGNORECASE)
_ENTRY = "GetPjrtApi"
_HEAD = struct.Struct("=QQ")  # PJRT_Api: struct_size, extension_start
_EXTENSION = struct.Struct("=QI4xQQ")  # struct_size, type, next, of a profiler's: profiler_api
_API = struct.Struct("=10Q")  # struct_size, priv, error_destroy, error_message, error_get_code, create, destroy, …
_PROFILER = 1  # PJRT_Extension_Type_Profiler
_MOST_EXTENSIONS = 64
MOST_BYTES = 1 << 34  # of collected data: addresses are larger
_MOST_MESSAGE = 1000
_COPY_BYTES = 1 << 26  # the kernel copies 2 GiB at a time at most
# tensorflow.ProfileOptions: device_tracer_level 1, version 1, and nothing of the host
OPTIONS = bytes((3 << 3, 1, 5 << 3, 1))


class _Create(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("options", ctypes.c_char_p),
        ("options_size", ctypes.c_size_t),
        ("profiler", ctypes.c_void_p),
    )


class _Handle(ctypes.Structure):  # of destroy, start and stop
    _fields_ = (("size", ctypes.c_size_t), ("profiler", ctypes.c_void_p))


class _Collect(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("profiler", ctypes.c_void_p),
        ("buffer", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
    )


class _Message(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("priv", ctypes.c_void_p),
        ("error", ctypes.c_void_p),
        ("message", ctypes.c_void_p),
        ("message_size", ctypes.c_size_t),
    )


class _Destroy(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("priv", ctypes.c_void_p), ("error", ctypes.c_void_p))


class PluginFunctions(NamedTuple):
    """Addresses of a plug-in's functions, in the order of PLUGIN_Profiler_Api."""

    error_destroy: int
    error_message: int
    error_get_code: int
    create: int
    destroy: int
    start: int
    stop: int
    collect_data: int


def plugins(maps: str = "/proc/self/maps") -> List[str]:
    """Paths of the mapped libraries that may be PJRT plug-ins, by their names; sorted."""
    try:
        lines = mappings.read(maps).split(b"\n")
    except OSError:
        return []
    paths = {fields[5] for fields in (line.split(None, 5) for line in lines) if len(fields) > 5}
    return sorted(os.fsdecode(path) for path in paths if _PLUGIN.search(os.path.basename(path)))


def functions_of(path: str) -> PluginFunctions:
    """Return the profiler's functions of the plug-in. Raises SourceError if it has none that we know."""
    try:
        entry = getattr(Library(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW), _ENTRY)
    except (OSError, AttributeError) as exc:
        raise SourceError(_UNAVAILABLE, "%s is not a PJRT plug-in: %s" % (os.path.basename(path), exc)) from exc
    entry.restype = ctypes.c_void_p
    return functions_at(entry(), os.path.basename(path))


def functions_at(api: int, name: str) -> PluginFunctions:
    """Return the functions of the PJRT_Api at this address. name: of the plug-in, for messages."""
    memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for size, kind, table in _extensions(memory, api):
            if kind == _PROFILER:
                return _functions(memory, size, table, name)
    except OSError as exc:
        raise SourceError(_UNAVAILABLE, "the PJRT plug-in %s is not in a known form: %s" % (name, exc)) from exc
    finally:
        os.close(memory)
    raise SourceError(_UNAVAILABLE, "the PJRT plug-in %s has no profiler" % name)


def _extensions(memory: int, api: int) -> Iterator[Any]:
    """Yield size, type and first member of each extension. Raises OSError."""
    size, extension = _read(memory, api, _HEAD)
    if size < _HEAD.size:
        raise OSError("its PJRT_Api has only %d bytes" % size)
    for _ in range(_MOST_EXTENSIONS):
        if not extension:
            return
        size, kind, following, table = _read(memory, extension, _EXTENSION)
        yield size, kind, table
        extension = following


def _functions(memory: int, size: int, table: int, name: str) -> PluginFunctions:
    if size < _EXTENSION.size or not table:
        raise OSError("its profiler extension has %d bytes, not %d" % (size, _EXTENSION.size))
    table_size, _priv, *functions = _read(memory, table, _API)
    if table_size < _API.size:
        raise OSError("its PLUGIN_Profiler_Api has %d bytes, not %d" % (table_size, _API.size))
    found = PluginFunctions(*functions)
    missing = [field for field, address in found._asdict().items() if not address]
    if missing:
        raise OSError("its profiler has no %s" % ", ".join(missing))
    return found


def _read(memory: int, address: int, layout: struct.Struct) -> Any:
    return layout.unpack(_bytes_at(memory, address, layout.size))


def _bytes_at(memory: int, address: int, size: int) -> bytes:
    try:
        data = os.pread(memory, size, address)
    except (OSError, OverflowError):  # of an address that is none
        data = b""
    if len(data) != size:
        raise OSError("no memory is mapped at %#x" % address)
    return data


class PluginProfiler:
    """One session of a plug-in's profiler. Methods raise SourceError with the plug-in's message."""

    def __init__(self, functions: PluginFunctions, name: str) -> None:
        self._functions = functions
        self._name = name
        self._profiler = 0

    def create(self) -> None:
        """Create the session."""
        args = _Create(ctypes.sizeof(_Create), OPTIONS, len(OPTIONS), None)
        self._call("create", args)
        if not args.profiler:
            raise SourceError(_FAILED, "the PJRT plug-in %s created no profiler" % self._name)
        self._profiler = args.profiler

    def start(self) -> None:
        """Begin to record."""
        self._call("start", self._handle())

    def stop(self) -> None:
        """End recording."""
        self._call("stop", self._handle())

    def collect(self) -> bytes:
        """Return the serialised XSpace, once recording has ended."""
        args = _Collect(ctypes.sizeof(_Collect), self._profiler, None, 0)
        self._call("collect_data", args)
        size, address = args.bytes, args.buffer
        if size > MOST_BYTES:
            reason = "the PJRT plug-in %s reports %d bytes of data: its profiler has an unknown version"
            raise SourceError(_FAILED, reason % (self._name, size))
        if not size:
            return b""
        if address:
            return self._copied(address, size)
        room = ctypes.create_string_buffer(size)
        args.buffer = ctypes.addressof(room)
        self._call("collect_data", args)
        if args.bytes > size:
            raise SourceError(_FAILED, "the data of the PJRT plug-in %s grew while being collected" % self._name)
        return self._copied(ctypes.addressof(room), args.bytes)

    def destroy(self) -> None:
        """Free the session. Idempotent."""
        if self._profiler:
            args, self._profiler = self._handle(), 0
            self._call("destroy", args)

    def _handle(self) -> _Handle:
        return _Handle(ctypes.sizeof(_Handle), self._profiler)

    def _copied(self, address: int, size: int) -> bytes:
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            places = range(0, size, _COPY_BYTES)
            pieces = [_bytes_at(memory, address + at, min(_COPY_BYTES, size - at)) for at in places]
        except OSError as exc:
            reason = "the data of the PJRT plug-in %s cannot be read: %s" % (self._name, exc)
            raise SourceError(_FAILED, reason) from exc
        finally:
            os.close(memory)
        return b"".join(pieces)

    def _call(self, function: str, args: ctypes.Structure) -> None:
        call = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(getattr(self._functions, function))
        error = call(ctypes.addressof(args))
        if error:
            raise SourceError(
                _FAILED, "the PJRT plug-in %s refused to %s: %s" % (self._name, function, self._text(error))
            )

    def _text(self, error: int) -> str:
        """Return the message of an error and free it."""
        nothing = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        said = _Message(ctypes.sizeof(_Message), None, error, None, 0)
        nothing(self._functions.error_message)(ctypes.addressof(said))
        size = min(said.message_size, _MOST_MESSAGE)
        data = self._copied(said.message, size) if said.message and size else b"no reason given"
        freed = _Destroy(ctypes.sizeof(_Destroy), None, error)
        nothing(self._functions.error_destroy)(ctypes.addressof(freed))
        return data.decode("utf-8", "replace")


_TYPES = ["kernel"]
_EXIT_LIMIT_S = 0.02
_GPUS = ("cuda", "rocm")


class PjrtSession:
    """One recording."""

    format = XPLANE_FORMAT
    yields = False

    def __init__(self, profiler: PluginProfiler, arena: FileArena, metadata: Dict[str, Any]) -> None:
        self.metadata = metadata
        self.arena_fd = arena.fd
        self._profiler = profiler
        self._arena = arena
        self._lock = _thread.allocate_lock()
        self._pid = os.getpid()
        self._on = False

    def start(self) -> None:
        """Begin to record. Raises SourceError."""
        self.metadata["started_ns"] = time.time_ns()
        self._profiler.create()
        atexit.register(self._end)
        self._profiler.start()
        self._on = True

    def counts(self) -> SourceCounts:
        """Records so far; a record is a buffer of a serialised XSpace."""
        return self._arena.counts()

    def stop(self) -> SourceOutcome:
        """End recording and write the data. Raises SourceError."""
        begin_ns = time.thread_time_ns()
        with self._lock:
            if self._on:
                self._on = False
                self._profiler.stop()
                data = self._profiler.collect()
                self._arena.copy_from(PART_HEAD.pack(len(data)))
                self._arena.copy_from(data)
        self._arena.finish()
        metadata = {"started_ns": self.metadata["started_ns"]}
        return SourceOutcome(self.counts(), metadata, [], detach_ns=0, cpu_ns=time.thread_time_ns() - begin_ns)

    def give_way(self) -> None:
        """Do nothing: torch.profiler does not use the plug-in."""

    def close(self) -> None:
        """Free everything."""
        self._end()
        self._arena.close()

    def _end(self) -> None:
        """End the session, also when the process exits; a forked child must not touch it. Never raises."""
        atexit.unregister(self._end)
        if self._pid != os.getpid():
            return
        if not self._lock.acquire(timeout=_EXIT_LIMIT_S):
            return  # our thread is inside the plug-in while the process exits
        try:
            try:
                if self._on:
                    self._on = False
                    self._profiler.stop()
            except SourceError:
                log_exception("the profiler of a PJRT plug-in")
            try:
                self._profiler.destroy()
            except SourceError:
                log_exception("the profiler of a PJRT plug-in")
        finally:
            self._lock.release()


class PluginsSource:
    """Devices of PJRT plug-ins."""

    name = "pjrt"
    on_request: FrozenSet[str] = frozenset(_TYPES)

    def __init__(self, maps: str = "/proc/self/maps") -> None:
        self._maps = maps

    def activity_types(self) -> List[str]:
        """Kernels, if a plug-in is loaded and JAX is not imported."""
        return _TYPES if self._paths() else []

    def would_yield(self, request: SourceRequest) -> bool:
        """False: torch.profiler does not use plug-ins."""
        return False

    def prepare(self, request: SourceRequest) -> PjrtSession:
        """Find the profiler and create the arena. Raises SourceError."""
        refusals = []
        for path in self._paths():
            try:
                functions = functions_of(path)
            except SourceError as error:
                refusals.append(error.reason)
                continue
            name = os.path.basename(path)
            metadata: Dict[str, Any] = {"plugin": name, "activity_types": sorted(request.activity_types)}
            arena = FileArena(self.name, request.buffer_limit_bytes)
            return PjrtSession(PluginProfiler(functions, name), arena, metadata)
        raise SourceError("PJRT_PROFILER_UNAVAILABLE", "; ".join(refusals) or "the process has no PJRT plug-in")

    def _paths(self) -> List[str]:
        if jax_runtime.imported():
            return []
        found = plugins(self._maps)
        return [path for path in found if not any(name in os.path.basename(path).lower() for name in _GPUS)]
