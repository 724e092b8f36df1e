"""Python processes of our own: the one command line that starts them, and a pool of them.

Theory of operation
    Users who may write into the working directory must not choose what our processes import. So `python` tells the
    interpreter to leave that folder out, and no process is started in another way: multiprocessing is not used (its
    children import from the working directory before any code of ours runs).

    The processes of a pool share the free memory, and none takes more than its part.

    A pool has a thread for each process, which gives it one call after the other and waits for the answer: pickles,
    over pipes. A process that dies takes its call along and no other. It ends by itself once its pipe is closed.
"""

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, TypeVar

from kineto_trace.base.quantities import held_to_free_memory
from kineto_trace.base.without_pandas import go_without_pandas

T = TypeVar("T")
_ORDINARY = frozenset({"PATH", "HOME", "LANG", "TZ", "TMPDIR", "VIRTUAL_ENV"})
_ORDINARY_PREFIXES = ("LC_", "LD_", "PYTHON")
# prctl(PR_SET_PDEATHSIG, SIGTERM), which exec keeps; the parent may have died before
_TIED = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.getppid() == int(sys.argv[1]) or sys.exit(1); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
)


def python(module: str, *arguments: str) -> tuple[str, ...]:
    """Returns the command that runs one of our modules; it imports nothing from the working directory."""
    return (sys.executable, "-P", "-m", module, *arguments)


def tied_python(module: str, *arguments: str) -> tuple[str, ...]:
    """Returns `python`'s command such that the kernel sends SIGTERM when the thread that starts it ends."""
    program, *rest = python(module, *arguments)
    return (program, "-P", "-c", _TIED, str(os.getpid()), *rest)


def safe_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variables for a process that hostile data may take over: no credentials, and no settings."""
    return {n: value for n, value in environ.items() if n in _ORDINARY or n.startswith(_ORDINARY_PREFIXES)}


class ProcessPool(Executor):
    """Executes calls in this many processes, which are started on demand."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="process-pool")
        self._mine = threading.local()
        self._processes: list[subprocess.Popen[bytes]] = []

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":
        """Runs the call. The future raises BrokenProcessPool if the process dies."""
        return self._threads.submit(self._call, fn, args, kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the processes; with `wait`, after the submitted calls."""
        self._threads.shutdown(wait=wait, cancel_futures=cancel_futures)
        for process in self._processes:
            process.kill()  # it is idle, or nobody waits for it
            process.communicate()

    def _call(self, fn: Callable[..., T], args: Any, kwargs: Any) -> T:
        process = getattr(self._mine, "process", None)
        if process is None or process.poll() is not None:
            command = python(__name__, str(self._count))
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._mine.process = process
            self._processes.append(process)
        assert process.stdin is not None and process.stdout is not None
        try:
            pickle.dump((fn, args, kwargs), process.stdin)
            process.stdin.flush()
            value, error = pickle.load(process.stdout)  # noqa: S301  # of our own process
        except (OSError, EOFError, pickle.UnpicklingError) as exc:
            from concurrent.futures.process import BrokenProcessPool  # brings multiprocessing

            process.kill()
            process.wait()
            raise BrokenProcessPool(f"the process ended with status {process.returncode}") from exc
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]


def main(count: int) -> None:
    """Serves calls until the pipe is closed, as one of `count`. What they print goes to standard error."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the caller says it
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    go_without_pandas()
    with held_to_free_memory(1 / count):
        while True:
            try:
                fn, args, kwargs = pickle.load(calls)  # noqa: S301  # of the process that started this one
            except EOFError:
                return
            answers.write(_answer(fn, args, kwargs))
            answers.flush()


def _answer(fn: Callable[..., Any], args: Any, kwargs: Any) -> bytes:
    try:
        return pickle.dumps((fn(*args, **kwargs), None))
    except Exception as exc:  # noqa: BLE001  # the caller's, as of any executor
        try:
            return pickle.dumps((None, exc))
        except Exception:  # noqa: BLE001  # an error that cannot travel
            return pickle.dumps((None, RuntimeError(f"{type(exc).__name__}: {exc}")))


if __name__ == "__main__":
    main(int(sys.argv[1]))
