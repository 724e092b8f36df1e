"""What programs of `later` do inside their process: signals, threads, hooks, surroundings, first imports."""

import gc
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from pathlib import Path
from typing import Any, ClassVar, List, Optional, Tuple

from campaign.attach_targets.later import KEPT, action, descriptors, fork, square, status_of, work


@action()
def handle_signals() -> None:
    seen: List[int] = []
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGPROF, signal.SIGVTALRM):
        print(signal.signal(number, lambda number, _frame: seen.append(number)))
        os.kill(os.getpid(), number)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    while len(seen) < 6:
        signal.pause()
    print(seen)


@action()
def wait_for_a_signal() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    os.kill(os.getpid(), signal.SIGUSR1)
    print(int(signal.sigwait([signal.SIGUSR1])), signal.pthread_sigmask(signal.SIG_BLOCK, []))


@action()
def wake_by_a_descriptor() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    print(signal.set_wakeup_fd(writer))
    signal.signal(signal.SIGUSR1, lambda *_: None)
    os.kill(os.getpid(), signal.SIGUSR1)
    print(os.read(reader, 10) == bytes([signal.SIGUSR1]))


@action()
def threads() -> None:
    import threading

    started = [threading.Thread(target=work) for _ in range(16)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    print(
        threading.active_count(), threading.current_thread() is threading.main_thread(), threading.enumerate()[0].name
    )


@action()
def thread_that_fails() -> None:
    import threading

    thread = threading.Thread(target=square, args=("x",), name="failing")
    thread.start()
    thread.join()


@action()
def executor_of_threads() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        print(list(pool.map(square, range(5))))


@action()
def profile_and_trace_functions() -> None:
    events: List[str] = []
    print(sys.getprofile(), sys.gettrace())
    sys.setprofile(lambda _frame, event, _argument: events.append(event))
    work()
    sys.setprofile(None)
    sys.settrace(lambda _frame, event, _argument: events.append(event))
    work()
    sys.settrace(None)
    print(events)


@action()
def c_profile() -> None:
    import cProfile

    profile = cProfile.Profile()
    print(profile.runcall(square, 5), sorted(entry.callcount for entry in profile.getstats()))


@action()
def monitoring() -> None:
    tool = getattr(sys, "monitoring", None)
    if tool is None:
        return
    print([tool.get_tool(number) for number in range(6)])
    tool.use_tool_id(2, "own")
    seen: List[str] = []
    tool.register_callback(2, tool.events.PY_START, lambda code, _offset: seen.append(code.co_name))
    tool.set_events(2, tool.events.PY_START)
    square(5)
    tool.set_events(2, 0)
    tool.free_tool_id(2)
    print(seen)


@action()
def audit_hook() -> None:
    seen: List[str] = []
    sys.addaudithook(lambda event, _arguments: seen.append(event))
    time.sleep(0.3)  # what others do meanwhile counts, too
    with open(os.devnull, "rb"):  # noqa: PTH123 - one event
        pass
    print(seen[:5], len(seen) < 10)


@action()
def trace_memory() -> None:
    import tracemalloc

    tracemalloc.start()
    KEPT.append(bytearray(1 << 20))
    time.sleep(0.3)
    print(tracemalloc.get_traced_memory()[0] >> 20)
    tracemalloc.stop()


@action()
def warn() -> None:
    before = len(warnings.filters)
    warnings.simplefilter("always")
    warnings.warn("told", stacklevel=1)
    print(len(warnings.filters) - before, bool(warnings.showwarning))


@action()
def fork_with_warnings_as_errors() -> None:
    warnings.simplefilter("error")
    fork()


@action()
def import_hooks() -> None:
    class Finder:
        """Counts what is looked for."""

        seen: ClassVar[List[str]] = []

        def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> None:
            self.seen.append(name)

    sys.meta_path.insert(0, Finder())
    time.sleep(0.3)
    import colorsys

    print(colorsys.rgb_to_hsv(0, 0, 0), Finder.seen)


@action()
def import_much() -> None:
    for name in ("asyncio", "decimal", "sqlite3", "ssl", "ctypes", "xml.dom.minidom", "http.client", "unittest.mock"):
        importlib.import_module(name)
    print(sorted(name for name in sys.modules if "kineto" in name))


@action()
def load_a_library() -> None:
    import ctypes

    print(ctypes.CDLL("libm.so.6").abs(-4))


@action()
def event_loop() -> None:
    import asyncio

    async def main() -> Tuple[bytes, Optional[int]]:
        process = await asyncio.create_subprocess_exec("echo", "hello", stdout=subprocess.PIPE)
        output, _ = await process.communicate()
        await asyncio.sleep(0.01)
        return output, process.returncode

    print(asyncio.run(main()))


@action()
def collect_garbage() -> None:
    unraisable: List[Any] = []
    sys.unraisablehook = unraisable.append
    for _ in range(5):
        gc.collect()
    print(gc.isenabled(), gc.get_threshold()[0] > 0, unraisable, len(gc.callbacks), gc.garbage)


@action()
def recurse() -> None:
    def deeper(depth: int) -> int:
        return deeper(depth + 1)

    try:
        deeper(0)
    except RecursionError as error:
        print(error)
    print(sys.getrecursionlimit(), sys.getswitchinterval())


# ---------------------------------------------------------------- surroundings


@action()
def close_all_descriptors() -> None:
    os.closerange(3, 4096)
    time.sleep(0.3)
    print(os.open(os.devnull, os.O_RDONLY))


@action()
def no_more_descriptors() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (len(descriptors()), 4096))
    time.sleep(0.3)
    print("goes on")


@action()
def another_user() -> None:
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    time.sleep(0.3)
    print("goes on")


@action()
def another_root_folder() -> None:
    if os.geteuid() == 0:
        with tempfile.TemporaryDirectory() as folder:
            os.chroot(folder)
            os.chdir("/")
            time.sleep(0.3)
            print(os.listdir("/"))  # noqa: PTH208
            sys.stdout.flush()
            os._exit(0)  # the folder is gone with the harness's own


@action()
def new_session() -> None:
    child = os.fork()
    if child == 0:
        os.setsid()
        os.umask(0o77)
        os.chdir("/")
        os._exit(2)
    print(status_of(child))


@action()
def little_stack() -> None:
    import threading

    threading.stack_size(256 << 10)
    threads()


# ---------------------------------------------------------------- frameworks that are not installed


def _stand_in(name: str, text: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / name
        made.mkdir()
        (made / "__init__.py").write_text(textwrap.dedent(text))
        sys.path.insert(0, folder)
        try:
            return importlib.import_module(name)
        finally:
            sys.path.remove(folder)


@action()
def import_jax() -> None:
    print(_stand_in("jax", "__version__ = '0.6.0'\ndef jit(function): return function\n").jit(square)(5))


@action()
def import_cupy() -> None:
    print(_stand_in("cupy", "__version__ = '13.0'\nclass cuda: pass\n").__version__)


@action()
def import_triton() -> None:
    print(_stand_in("triton", "__version__ = '3.0'\ndef jit(function): return function\n").jit(square)(5))


@action()
def import_torch_that_fails() -> None:
    try:
        _stand_in("torch", "raise ImportError('libcudart.so.12: no such file')")
    except ImportError as error:
        print(error, "torch" in sys.modules)
