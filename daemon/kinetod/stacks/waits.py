"""What a thread waits for, in words, from its Python frames and its system call. Pure.

The rules, first match first: the thread is stopped; another thread holds the GIL, and this one looks for it every 5 ms;
a function of a known library, in the frames inside the innermost one of the program's own, is known to wait; the thread
is in a call of CUDA's driver that waits; the line ends in a call that waits for the GPU, and the process uses one; the
system call; the kernel's state.

A thread that runs can only wait by spinning, as those do that wait for a GPU or for a collective.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kinetod.stacks.thread_facts import BlockingCall, ThreadFacts, ThreadTable, is_gpu
from kinetod.stacks.thread_stacks import StackFrame

COLLECTIVE, GPU, GIL, NONE, UNSPECIFIED = "COLLECTIVE", "GPU", "GIL", "NONE", "UNSPECIFIED"
_COLLECTIVES = (
    r"(all_reduce|all_gather|reduce_scatter|all_to_all|broadcast|reduce|gather|scatter|barrier|monitored_barrier"
    r"|send|recv)\w*"
)


@dataclass(frozen=True, slots=True)
class _Known:
    """A function that waits. file: the end of its path; {function} in `waits` is its name."""

    wait: str
    file: str
    function: re.Pattern[str]
    waits: str


def _known(*rows: tuple[str, str, str, str]) -> tuple[_Known, ...]:
    return tuple(_Known(wait, file, re.compile(function), waits) for wait, file, function, waits in rows)


# The more a row says, the earlier it stands: a DataLoader waits in a queue, which waits in a condition.
_FUNCTIONS = _known(
    (COLLECTIVE, "torch/distributed/distributed_c10d.py", _COLLECTIVES, "waits in {function}"),
    (
        COLLECTIVE,
        "torch/distributed/distributed_c10d.py",
        r"init_process_group|_new_process_group_helper|_store_based_barrier|new_group\w*",
        "waits for the other ranks to join ({function})",
    ),
    (COLLECTIVE, "torch/distributed/rendezvous.py", r".*", "waits for the other ranks to join (rendezvous)"),
    (COLLECTIVE, "torch/distributed/_functional_collectives.py", r".*wait.*", "waits for the result of a collective"),
    (GPU, "torch/cuda/__init__.py", r"synchronize", "waits for the GPU (torch.cuda.synchronize)"),
    (GPU, "torch/cuda/streams.py", r"synchronize", "waits for the GPU (synchronize on a stream or an event)"),
    (GPU, "jax/_src/api.py", r"block_until_ready", "waits for the device (block_until_ready)"),
    (GPU, "jax/_src/array.py", r"_value|__array__|__float__|__int__|item|tolist", "waits for the device ({function})"),
    ("WORKER", "torch/utils/data/dataloader.py", r"\w*_?(try_)?get_data", "waits for a DataLoader worker"),
    ("PROCESS", "subprocess.py", r"wait|_wait|_try_wait", "waits for a child process to end"),
    ("PROCESS", "subprocess.py", r"_?communicate", "waits for the pipes of a child process"),
    ("PROCESS", "subprocess.py", r"_execute_child", "waits for a child process to execute its program"),
    ("PROCESS", "multiprocessing/popen_fork.py", r"poll|wait", "waits for a child process to end"),
    ("PROCESS", "multiprocessing/pool.py", r"get|wait", "waits for a result from a process pool"),
    ("QUEUE", "multiprocessing/queues.py", r"get", "waits for an item from an inter-process queue"),
    ("QUEUE", "multiprocessing/queues.py", r"_finalize_join", "waits until an inter-process queue is flushed"),
    ("QUEUE", "queue.py", r"get", "waits for an item from a queue"),
    ("QUEUE", "queue.py", r"put", "waits for room in a queue"),
    ("QUEUE", "queue.py", r"join", "waits until all items in a queue have been processed"),
    ("THREAD", "concurrent/futures/_base.py", r"result|exception|wait", "waits for the result of a future"),
    ("THREAD", "concurrent/futures/thread.py", r"shutdown|_python_exit", "waits for the threads of a pool to end"),
    ("THREAD", "threading.py", r"join|_wait_for_tstate_lock", "waits for another thread to end"),
    ("THREAD", "threading.py", r"_shutdown", "waits at exit for other threads to end"),
    ("IMPORT", "<frozen importlib._bootstrap>", r"acquire|__enter__", "waits for another thread's import"),
    ("EVENTS", "asyncio/base_events.py", r"_run_once", "waits in asyncio's event loop, with no task ready"),
    ("EVENTS", "socketserver.py", r"serve_forever", "waits for requests"),
    ("EVENTS", "selectors.py", r"select", "waits for events"),
    ("PROCESS", "multiprocessing/connection.py", r"_recv|_poll|poll|wait|accept|recv\w*", "waits for another process"),
    ("LOCK", "multiprocessing/synchronize.py", r"__enter__|wait\w*", "waits for an inter-process lock or event"),
    ("LOCK", "threading.py", r"wait|wait_for", "waits for a condition or an event"),
    ("LOCK", "threading.py", r"acquire|__enter__", "waits for a lock or a semaphore"),
    ("NETWORK", "ssl.py", r"read|recv\w*|do_handshake", "waits for data from the network"),
    ("NETWORK", "socket.py", r"readinto|accept|create_connection", "waits for the network ({function})"),
)  # fmt: skip
# Calls at the end of a line that wait for the device's results. Of those in which a thread may as well compute, only a
# thread that waits is told to wait.
_SPINS_FOR_GPU = re.compile(r"(\.(item|cpu|block_until_ready)|\bsynchronize)\([^()]*\)$")
_WAITS_FOR_GPU = re.compile(r"(\.(item|cpu|block_until_ready|tolist|numpy|nonzero|to)|\bsynchronize)\([^()]*\)$")
_CALLS_FOR_GPU = frozenset(("futex", "poll", "ppoll", "ioctl"))
_OF_PACKAGES = re.compile(r"/(torch|jax)/")
_LOCKS = re.compile(r"\.acquire\([^()]*\)$|^(async )?with\b")
_QUERIES = re.compile(r"\.(execute\w*|commit)\(")
_P_PID = 1  # of waitid
_FILE_LOCKS = {7, 38}  # F_SETLKW, F_OFD_SETLKW
_NO_DEADLINE = 0
_PRIVATE = 128  # FUTEX_PRIVATE_FLAG: no other process can wake it
_BETWEEN_THREADS = frozenset(("LOCK", "QUEUE", "IMPORT"))
SLEEPS = frozenset(("nanosleep", "clock_nanosleep"))
_CREATES = frozenset(("vfork", "clone", "clone3"))
_POLLS = frozenset(
    ("poll", "ppoll", "select", "pselect6", "epoll_wait", "epoll_pwait", "epoll_pwait2", "io_uring_enter")
)
_SIGNALS = frozenset(("pause", "rt_sigtimedwait", "rt_sigsuspend"))
_OPENS = frozenset(("open", "openat", "stat", "newfstatat", "statx", "getdents64"))


def explain(thread: ThreadFacts, frames: Sequence[StackFrame], process: ThreadTable, gil: str = "") -> tuple[str, str]:
    """The wait and its words, which follow "it ". gil: which other thread holds the GIL and where; empty: none does."""
    wait, words = _explained(thread, frames, process, gil)
    if wait in _BETWEEN_THREADS and len(process.threads) + process.left_out == 1 and _is_private(thread.call):
        words += ", with no other thread in the process"  # as after a fork while another one held the lock
    return wait, words


def _explained(thread: ThreadFacts, frames: Sequence[StackFrame], process: ThreadTable, gil: str) -> tuple[str, str]:
    if (stopped := _stopped(thread, process)) is not None:
        return stopped
    if gil and frames and thread.wakes_per_s and _waits_with_deadline(thread.call):
        return GIL, f"waits for the GIL, which {gil}"
    runs = thread.state == "RUNNING"
    found = _by_function(frames)
    if found is not None and (not runs or found[0] == GPU or _in_collective(frames[0])):
        return found
    if thread.driver_call:
        return GPU, f"waits for the GPU ({thread.driver_call})"
    if process.uses_gpu and frames and (code := _for_gpu(thread, frames[0])):
        return GPU, f"waits for the GPU ({code})"
    if runs:
        return NONE, "runs"
    if thread.call is not None and (called := _by_call(thread.call, frames)) is not None:
        return called
    if thread.state == "UNINTERRUPTIBLE":
        where = f" ({thread.kernel_function})" if thread.kernel_function else ""
        return "KERNEL", f"waits in the kernel, uninterruptibly, for a file, a driver or swapped memory{where}"
    return UNSPECIFIED, "waits for something that cannot be seen from outside"


def _stopped(thread: ThreadFacts, process: ThreadTable) -> tuple[str, str] | None:
    if thread.state == "ENDED":
        return NONE, "has ended"
    if thread.state == "TRACED":
        who = f" (process {process.tracer})" if process.tracer else ""
        return "STOPPED", f"is stopped by a debugger{who}"
    if thread.state == "STOPPED":
        return "STOPPED", "is stopped (SIGSTOP or Ctrl-Z)"
    return ("STOPPED", "is frozen by a control group") if process.frozen else None


def _library_frames(frames: Iterable[StackFrame]) -> list[StackFrame]:
    """Those inside the innermost frame of the program's own."""
    inside = []
    for frame in frames:
        if (frame.own and not _OF_PACKAGES.search(frame.file)) or _is_callback(frame):
            break
        inside.append(frame)
    return inside


def _is_callback(frame: StackFrame) -> bool:
    """Whether an event loop runs code of somebody else from here on."""
    return frame.function.rpartition(".")[2] == "_run" and _ends(frame.file, "asyncio/events.py")


def _in_collective(frame: StackFrame) -> bool:
    return _ends(frame.file, "torch/distributed/distributed_c10d.py")


def _by_function(frames: Sequence[StackFrame]) -> tuple[str, str] | None:
    inside = [(frame.file, frame.function.rpartition(".")[2]) for frame in _library_frames(frames)]
    for known in _FUNCTIONS:
        for file, function in inside:
            if _ends(file, known.file) and known.function.fullmatch(function):
                return known.wait, known.waits.format(function=function)
    return None


def _ends(file: str, end: str) -> bool:
    """Whether it is that file of the standard library, or of the package that it begins with."""
    ends = file == end or file.endswith(f"/{end}")
    return ends and ("-packages/" not in file or _OF_PACKAGES.search(f"/{end}") is not None)


def _for_gpu(thread: ThreadFacts, frame: StackFrame) -> str:
    """The line, if it ends in a call that waits for the GPU and the thread may be in there."""
    if thread.state == "RUNNING":
        return frame.code if _SPINS_FOR_GPU.search(frame.code) else ""
    may_be = thread.call is None or thread.call.name in _CALLS_FOR_GPU
    return frame.code if may_be and _WAITS_FOR_GPU.search(frame.code) else ""


def _waits_with_deadline(call: BlockingCall | None) -> bool:
    """Whether it waits for a futex until some time, as for the GIL."""
    return call is not None and call.name == "futex" and len(call.arguments) > 3 and call.arguments[3] != _NO_DEADLINE


def _is_private(call: BlockingCall | None) -> bool:
    return call is not None and call.name == "futex" and len(call.arguments) > 1 and bool(call.arguments[1] & _PRIVATE)


def _by_call(call: BlockingCall, frames: Sequence[StackFrame]) -> tuple[str, str] | None:
    name, target = call.name, call.target
    if is_gpu(target):
        return GPU, f"waits in the GPU's driver ({name} of {target})"
    if name == "futex":
        lock = frames and _LOCKS.search(frames[0].code)
        others = "for another thread" if _is_private(call) else "another thread or another process"
        return "LOCK", "waits for a lock" if lock else f"waits for a lock or {others}"
    if name in _SIGNALS:
        return "EVENTS", "waits for a signal"
    if name in ("semtimedop", "msgrcv"):
        return "LOCK", "waits for a semaphore or a message from another process"
    if name in SLEEPS and frames and _QUERIES.search(frames[0].code):
        return "SLEEP", "sleeps, as SQLite does while another connection locks its database"
    if name in SLEEPS or (name in ("select", "pselect6") and not call.arguments[0]):
        return "SLEEP", "sleeps"
    if name in ("wait4", "waitid"):
        child = call.arguments[0] if name == "wait4" else call.arguments[1] if call.arguments[0] == _P_PID else 0
        which = f"process {child}" if 0 < child < 1 << 31 else "a child process"
        return "PROCESS", f"waits for {which} to end"
    if name in _CREATES:
        return "PROCESS", "waits for a new process to execute its program"
    if name in _POLLS:
        return "EVENTS", "waits for events" if "epoll" in name else "waits until a file or a socket is ready"
    if name in _OPENS:
        return "FILE", "opens or looks up a file"
    if name == "flock" or (name == "fcntl" and call.arguments[1] in _FILE_LOCKS):
        return "FILE", f"waits for the lock on {target or 'a file'}"
    if name in ("accept", "accept4"):
        return "NETWORK", f"waits for a connection to {target or 'a socket'}"
    if name == "connect":
        return "NETWORK", "waits for a connection to another process or host"
    if name.startswith(("recv", "send")) or _is_peer(target):
        does = "to send data to" if "send" in name or "write" in name else "for data from"
        return "NETWORK", f"waits {does} {target or 'a socket'}"
    if "read" in name and (target or frames):  # a kernel thread seems to read, too
        return "FILE", f"reads {target or 'a file'}"
    if ("write" in name or name.endswith("sync")) and (target or frames):
        return "FILE", f"writes {target or 'a file'}"
    return None


def _is_peer(target: str) -> bool:
    return target == "a socket" or "Unix socket" in target or re.fullmatch(r"(port |[\d.]+:|\[)\S*", target) is not None
