"""Runs sessions of torch's own profiler for all threads, from any thread: begin, end, write to a file.

Theory of operation
    Kineto records for all threads if the session says profile_all_threads; it may then be begun, ended and read on
    different threads. Up to torch 2.13 a session that ends while threads are inside ops may access freed memory: so
    collection is switched off first, followed by a pause.

    The program is affected through the GIL. Ending, saving and freeing take microseconds per event, and torch's own
    Python functions hold the GIL throughout; libtorch_symbols.py has functions that do not. A recorder decides once
    which of the two to use.

    Kineto writes NAME.tmp and renames it. So a session's file is in a private folder until it is open; from then on it
    has no name. Folders left by processes killed in between are removed when the next one is created.

Rules
    At most one of our sessions is running. The process must not end or fork during it without our handlers: a session
    that runs when C++'s static objects are destroyed crashes the process, and a child would continue recording forever.
"""

import contextlib
import ctypes
import fcntl
import glob
import os
import shutil
import sys
import tempfile
import time
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional

from kineto_agent.sources import collector_library
from kineto_agent.sources.interface import SourceError
from kineto_agent.sources.native_interface import ErrorText
from kineto_agent.sources.torch import kineto_state, libtorch_symbols
from kineto_agent.sources.torch.kineto_state import LIBRARY, PROFILER, word
from kineto_agent.system.debuglog import log
from kineto_agent.system.libraries import Library
from kineto_agent.system.mappings import mapped_files

# Keeps Kineto off CUPTI while one of our operator-only sessions begins or ends; kineto_gate.c says why.
_NOTHING = 1  # KC_GATE_NOTHING


@contextlib.contextmanager
def kept_off(*, required: bool = True, maps: str = "/proc/self/maps", library: str = LIBRARY) -> Iterator[None]:
    """Inside the block, the library's calls to CUPTI on this thread do nothing. Has no effect without CUPTI.

    Raises SourceError (TORCH_PROFILER_UNAVAILABLE) if this is required but impossible, since the program's own
    torch.profiler might be harmed.
    """
    found = mapped_files("libcupti.so", maps)
    if not found:
        yield
        return
    collector = None
    try:
        collector = _up(found[0], library)
    except SourceError as error:
        if required:
            raise
        log("%s", error)
    try:
        yield
    finally:
        if collector is not None:
            log("blocked %d calls from Kineto to CUPTI", collector.kc_gate_down())


def _up(cupti: str, library: str) -> Optional[ctypes.CDLL]:
    """The collector with the gate closed; None if the library does not use CUPTI."""
    error = ErrorText()
    try:
        collector = _opened()
        code = collector.kc_gate_up(os.fsencode(library), os.fsencode(cupti), *error.room)
    except (OSError, AttributeError) as exc:
        raise _unavailable(str(exc)) from exc
    if code == _NOTHING:
        return None
    if code != 0:
        raise _unavailable(str(error))
    collector_library.loaded()
    return collector


def _opened() -> Library:
    """The collector, opened once: later calls may come on a thread of the program. Raises OSError, AttributeError."""
    path = collector_library.path()
    if path not in _collectors:
        _collectors[path] = Library(path)
        _collectors[path].kc_gate_down.restype = ctypes.c_uint64
    return _collectors[path]


_collectors: Dict[str, Library] = {}


def _unavailable(why: str) -> SourceError:
    return SourceError(
        "TORCH_PROFILER_UNAVAILABLE",
        "torch's profiler would have CUPTI record every CUDA call, which cannot be prevented here (%s): "
        "trace without the options that need this profiler" % why,
    )


# Starts Kineto in a process, on our thread, without any output on the program's standard error.
#
# Torch starts Kineto when its profiler is prepared for the first time: libkineto_init, then the log level. On another
# thread than the one that loaded libtorch_cpu, the former prints an ERROR straight to standard error, whatever the log
# level, and leaves out torch's own initialisation: libkineto::LibkinetoApi remembers which thread called
# registerClient. It also sets the log level from the environment, so that further messages in the same call of torch
# are printed.
#
# So all this is done here, before torch's profiler is prepared: the client that torch registered is registered once
# more, from this thread (before Kineto has a profiler, that only stores the thread), then Kineto is initialised as
# torch does it. Torch then uses the initialised Kineto quietly (libtorch_symbols.py).
#
# If the object's layout is unknown, or a function is missing, nothing is touched and the recording is refused, because
# it would print.
_API = "_ZN9libkineto3apiEv"
_REGISTER_CLIENT = "_ZN9libkineto12LibkinetoApi14registerClientEPNS_15ClientInterfaceE"
_CLIENT = 16  # in libkineto::LibkinetoApi: after the reference to the ConfigLoader and the profiler
_OTHER_DEVICES = {"CUDA", "XPU", "MTIA"}


def start_quietly(maps: str = "/proc/self/maps") -> None:
    """Initialise Kineto unless that has been done. Call it under libtorch_symbols.quiet().

    Raises SourceError if it is not initialised and cannot be without printing: TORCH_PROFILER_UNAVAILABLE.
    """
    try:
        library = libtorch_symbols.library()
        api = _function(library, _API)
        api.restype = ctypes.c_void_p
        address = api()
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if word(memory, address + PROFILER):
                return
            client = word(memory, address + _CLIENT)
            if client and not _is_in_library(word(memory, client), maps):
                raise OSError("its client has an unknown form")
        finally:
            os.close(memory)
        register, initialise, suppress = (
            _function(library, name) for name in (_REGISTER_CLIENT, "libkineto_init", "suppressLibkinetoLogMessages")
        )
        cpu_only = _cpu_only()
    except (OSError, AttributeError, KeyError, TypeError) as exc:
        raise SourceError(
            "TORCH_PROFILER_UNAVAILABLE",
            "torch's profiler has never been used in this process, and starting it from outside would make torch %s "
            "print to the program's standard error (%s: %s): trace without the options that need this profiler"
            % (libtorch_symbols.version_text() or "of unknown version", type(exc).__name__, exc),
        ) from exc
    if client:
        register(ctypes.c_void_p(address), ctypes.c_void_p(client))
    initialise(ctypes.c_bool(cpu_only), ctypes.c_bool(True))
    suppress()


def _function(library: ctypes.CDLL, name: str) -> Any:
    found = getattr(library, name)
    found.restype = None
    return found


def _cpu_only() -> bool:
    """Torch's argument for Kineto: whether there is neither another device nor a backend outside torch."""
    torch_c: Any = sys.modules["torch._C"]
    supported = {activity.name for activity in sys.modules["torch._C._autograd"]._supported_activities()}
    return not supported & _OTHER_DEVICES and torch_c._get_privateuse1_backend_name() == "privateuseone"


def _is_in_library(address: int, maps: str) -> bool:
    """Whether the address lies in a mapping of libtorch_cpu."""
    with open(maps, encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            if line.rstrip("\n").endswith("/" + LIBRARY):
                first, _, last = line.split(None, 1)[0].partition("-")
                if int(first, 16) <= address < int(last, 16):
                    return True
    return False


PAUSE_S = 0.02  # between the end of collection and of the session; 720 of 720 rounds succeeded with it
NEEDS_TOGGLE = (2, 13)  # the last torch that needs it
_FOLDER = "kineto-agent-"
_LEFT_S = 60  # younger folders may not be locked yet


class Flags(NamedTuple):
    """What torch's profiler records of an op besides its name and times."""

    record_shapes: bool
    with_flops: bool


class Times(NamedTuple):
    """How long the parts of one ending took, in ns."""

    end_ns: int
    save_ns: int
    free_ns: int


class Recorder:
    """Used under the caller's lock. Raises SourceError if this torch cannot record all threads.

    device: the member of ProfilerActivity for the accelerator to record; "": operators alone.
    """

    def __init__(self, flags: Flags, functions: Optional[libtorch_symbols.ProfilerFunctions], device: str = "") -> None:
        self._functions = functions
        self.on = False
        self._results: List[Any] = []  # of ended sessions: (address or object, ns that ending took)
        try:
            from_torch: Any = sys.modules["torch._C._profiler"]
            self._autograd: Any = sys.modules["torch._C._autograd"]
            experimental = from_torch._ExperimentalConfig(profile_all_threads=True)
            self._activities = {from_torch.ProfilerActivity.CPU}
            self._toggled = set(self._activities)  # torch cannot switch off another device's collection
            if device:
                self._activities.add(getattr(from_torch.ProfilerActivity, device))
            scope = from_torch.RecordScope
            self._scopes = {scope.FUNCTION, scope.USER_SCOPE, scope.BACKWARD_FUNCTION}
            self._config = from_torch.ProfilerConfig(
                _state(from_torch.ProfilerState, device),
                flags.record_shapes,
                False,  # profile_memory: yields nothing with all threads
                False,  # with_stack: its tracer of Python calls takes gigabytes
                flags.with_flops,
                False,  # with_modules: names of TorchScript modules, which are not used
                experimental,
            )
        except (KeyError, AttributeError, TypeError) as exc:
            reason = "torch %s cannot record all threads with its profiler (torch 2.7 and later can): %s"
            number = getattr(sys.modules.get("torch"), "__version__", "of unknown version")
            raise SourceError("TORCH_PROFILER_UNAVAILABLE", reason % (number, exc)) from exc

    def begin(self) -> None:
        """Begin a session. Raises SourceError."""
        try:
            with kept_off():
                with libtorch_symbols.quiet():
                    start_quietly()
                with libtorch_symbols.quiet():  # also here: starting Kineto resets its log level
                    self._autograd._prepare_profiler(self._config, self._activities)
                    self._autograd._enable_profiler(self._config, self._activities, self._scopes)
        except RuntimeError as exc:
            raise SourceError("TORCH_PROFILER_FAILED", "torch's profiler did not start: %s" % _first_line(exc)) from exc
        self.on = True
        if kineto_state.active() is not True:
            self._functions = None  # it could not be queried before the end, either

    @property
    def keeps_the_gil(self) -> bool:
        """Whether the program is blocked while a session ends and is written. Final once a session has begun."""
        return self._functions is None

    def stop_collecting(self) -> None:
        """Stop recording; the session continues."""
        if libtorch_symbols.version() <= NEEDS_TOGGLE:
            with libtorch_symbols.quiet():
                self._autograd._toggle_collection_dynamic(False, self._toggled)

    def end(self) -> int:
        """End the session, keep its result and return how long that took in ns; 0: no session. Raises SourceError."""
        if not self.on:
            return 0
        self.on = False
        try:
            self.stop_collecting()
            time.sleep(PAUSE_S)
            begin_ns = time.monotonic_ns()
            with kept_off(required=False), libtorch_symbols.quiet():
                result = self._end()
            took_ns = time.monotonic_ns() - begin_ns
        except RuntimeError as exc:
            reason = "torch's profiler did not end its session, and what it had recorded is lost: %s" % _first_line(exc)
            raise SourceError("TORCH_PROFILER_FAILED", reason) from exc
        if not result:
            raise SourceError("TORCH_PROFILER_FAILED", "torch's profiler returned no result")
        self._results.append((result, took_ns))
        return took_ns

    def leave_to_exit(self) -> None:
        """Stop recording permanently, and keep the session: an exit is safe with one that collects nothing."""
        if not self.on:
            return
        if libtorch_symbols.version() > NEEDS_TOGGLE:  # unknown for it
            self.end()
        self.on = False
        self.stop_collecting()

    def _end(self) -> Any:
        if self._functions is None:
            return self._autograd._disable_profiler()
        if kineto_state.active() is not True:  # disableProfiler would end the program
            raise RuntimeError("another user of the profiler has ended the session")
        return self._functions.disable()

    @property
    def pending(self) -> int:
        """Number of ended sessions that have not been written yet."""
        return len(self._results)

    def write_oldest(self, file: "PrivateFile", before_free: Callable[[], None] = lambda: None) -> Times:
        """Write the oldest ended session as JSON and free its result. Raises SourceError."""
        result, end_ns = self._results.pop(0)
        before_free()
        begin_ns = time.monotonic_ns()
        try:
            with libtorch_symbols.quiet_kineto:
                if self._functions is None:
                    result.save(file.path)
                else:
                    self._functions.save(result, file.path)
            saved_ns = time.monotonic_ns()
            before_free()
            file.take()
        except (OSError, RuntimeError) as exc:
            saved_ns = time.monotonic_ns()
            reason = "torch's profiler cannot write its events to %s (is there enough space?): %s" % (file.folder, exc)
            raise SourceError("TORCH_PROFILER_FAILED", reason) from exc
        finally:
            if self._functions is not None:
                self._functions.free(result)
            del result
        return Times(end_ns, saved_ns - begin_ns, time.monotonic_ns() - saved_ns)

    def drop_oldest(self) -> None:
        """Free the oldest ended session's result without writing it."""
        result, _end_ns = self._results.pop(0)
        if self._functions is not None:
            self._functions.free(result)

    def forget_in_child(self) -> None:
        """Stop recording into unread memory, in a forked child. Never raises."""
        was_on, self.on, self._results = self.on, False, []
        if was_on:
            with contextlib.suppress(Exception):
                self.stop_collecting()


def _state(states: Any, device: str) -> Any:
    """The state of a session. Torch forwards an accelerator's profiler to Kineto only in one of its own."""
    return getattr(states, "KINETO_PRIVATEUSE1", states.KINETO) if device == "PrivateUse1" else states.KINETO


class PrivateFile:
    """A file that only we can write, first by its name, then open without one. Raises OSError."""

    def __init__(self) -> None:
        parent = tempfile.gettempdir()
        _remove_left_folders(parent)
        self.folder = tempfile.mkdtemp(prefix=_FOLDER, dir=parent)
        self._lock = -1
        self.path = os.path.join(self.folder, "torch.json")
        self.fd = -1
        self._pid = os.getpid()
        self._lock = os.open(self.folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:  # if Kineto cannot create its file, it prints that on the program's standard error
            os.close(os.open(self.path + ".tmp", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except OSError:
            self.close()
            raise

    def take(self) -> None:
        """Open the written file and remove its name. Raises OSError."""
        self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._remove_folder()

    def close(self) -> None:
        """Close and remove everything. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._lock >= 0:
            if self._pid == os.getpid():
                shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _remove_left_folders(parent: str) -> None:
    """Remove folders of killed processes, which nobody has locked. (Process ids mean nothing across containers.)"""
    for path in glob.glob(os.path.join(glob.escape(parent), _FOLDER + "*")):
        with contextlib.suppress(OSError):
            folder = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                status = os.fstat(folder)
                if status.st_uid == os.geteuid() and time.time() - status.st_mtime > _LEFT_S:
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(folder)


def _first_line(exc: BaseException) -> str:
    return (str(exc).splitlines() or [type(exc).__name__])[0][:200]
