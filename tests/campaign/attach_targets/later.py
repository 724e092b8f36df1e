"""A program that does something for the first time after a trace: `python -m campaign.attach_targets.later P NAMES S`.

It computes until its main thread has used S seconds of processor time, works lap by lap until it is told to stop, and
then does what NAMES (with + in between) say, one after the other. Its output, exit status and warnings are the same in
every run; the page P says how long the one took that waited for longest (TOOK) and how much processor time the main
thread used for it (USED), both in ns. Runs wherever the agent runs.
"""

import atexit
import importlib
import os
import signal
import subprocess
import sys
import time
from typing import Any, Callable, Dict, List, Tuple

from campaign.attach_targets.control import TOOK, USED, Control

Action = Callable[[], object]
ACTIONS: Dict[str, Action] = {}
NEEDS: Dict[str, str] = {}  # the package that an action needs
BEFORE: Dict[str, Tuple[str, ...]] = {}  # what the program imports before it is traced


def action(needs: str = "sys", before: Tuple[str, ...] = ()) -> Callable[[Action], Action]:
    """Enters a function into the list by its name."""

    def enter(function: Action) -> Action:
        ACTIONS[function.__name__] = function
        NEEDS[function.__name__] = needs
        BEFORE[function.__name__] = before
        return function

    return enter


def load(name: str = "") -> Dict[str, Action]:
    """All actions by name. With a name: at least this one."""
    if name not in ACTIONS:
        for module in ("later_inside", "later_torch"):
            importlib.import_module("campaign.attach_targets." + module)
    return ACTIONS


def work() -> int:
    """A millisecond of work, or less."""
    total = 0
    for each in range(5000):
        total = (total * 31 + each) % 1000003
    return total


def status_of(pid: int) -> int:
    """Exit status of a child; negative: the signal that ended it."""
    status = os.waitpid(pid, 0)[1]
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)


def descriptors() -> List[int]:
    """Open descriptors of this process, without the one that reads them."""
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - no more descriptors than this one
        try:
            os.fstat(int(name))
            found.append(int(name))
        except OSError:
            pass
    return sorted(found)


# ---------------------------------------------------------------- processes


@action()
def fork() -> None:
    child = os.fork()
    if child == 0:
        work()
        os._exit(3)
    print(status_of(child))


@action()
def fork_that_exits() -> None:
    atexit.register(print, "at exit", flush=True)
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        sys.exit(4)
    print(status_of(child))


@action()
def fork_twice() -> None:
    child = os.fork()
    if child == 0:
        os._exit(status_of(os.fork() or os._exit(5)))
    print(status_of(child))


@action()
def fork_in_a_thread() -> None:
    import threading

    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()


@action()
def descriptors_of_a_fork() -> None:
    before, (reader, writer) = descriptors(), os.pipe()
    if os.fork() == 0:
        os.write(writer, str([each for each in descriptors() if each not in before]).encode())
        os._exit(0)
    print(len(eval(os.read(reader, 4096))), os.wait()[1])


@action()
def threads_of_a_fork() -> None:
    child = os.fork()
    if child == 0:
        import threading

        os._exit(10 * len(os.listdir("/proc/self/task")) + threading.active_count())  # noqa: PTH208
    print(status_of(child))


@action()
def run_a_program() -> None:
    code = "import os; print('inside', sorted(map(int, os.listdir('/proc/self/fd')))[:-1])"
    print(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout)


@action()
def run_a_program_that_inherits() -> None:
    code = "import os; print('inside', len(os.listdir('/proc/self/fd')))"
    print(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, close_fds=False).stdout)


@action()
def run_by_shell() -> None:
    sys.stdout.flush()
    print(os.system("exit 6") >> 8, os.popen("echo popen").read().strip())


@action()
def posix_spawn() -> None:
    print(status_of(os.posix_spawn(sys.executable, [sys.executable, "-c", "raise SystemExit(9)"], os.environ)))


@action()
def become_another_program() -> None:
    sys.stdout.flush()
    code = "import os, sys; print(len(os.listdir('/proc/self/task')), len(os.listdir('/proc/self/fd'))); sys.exit(5)"
    os.execv(sys.executable, [sys.executable, "-c", code])


def square(value: int) -> int:
    """Runs in the workers."""
    return value * value


def _pool(method: str) -> None:
    import multiprocessing

    with multiprocessing.get_context(method).Pool(2) as pool:
        print(pool.map(square, range(5)))


@action()
def pool_by_fork() -> None:
    _pool("fork")


@action()
def pool_by_spawn() -> None:
    _pool("spawn")


@action()
def pool_by_forkserver() -> None:
    _pool("forkserver")


@action()
def executor_of_processes() -> None:
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(2) as pool:
        print(list(pool.map(square, range(5))))


@action()
def shared_memory() -> None:
    from multiprocessing import shared_memory as shared

    block = shared.SharedMemory(create=True, size=4096)
    assert block.buf is not None
    block.buf[:3] = b"abc"
    print(bytes(block.buf[:3]))
    block.close()
    block.unlink()


# ---------------------------------------------------------------- ends


@action()
def end_with_a_status() -> None:
    sys.exit(7)


@action()
def end_with_words() -> None:
    sys.exit("last words")


@action()
def end_at_once() -> None:
    sys.stdout.flush()
    os._exit(8)


@action()
def end_by_an_error() -> None:
    raise ValueError("not handled")


@action()
def end_by_abort() -> None:
    sys.stdout.flush()
    os.abort()


@action()
def end_by_sigterm() -> None:
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


@action()
def end_by_sigint() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)


@action()
def end_by_sigkill() -> None:
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


@action()
def end_in_a_handler() -> None:
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


@action()
def exit_handlers() -> None:
    for name in ("first", "second", "third"):
        atexit.register(print, name)


@action()
def exit_handler_that_fails() -> None:
    atexit.register(int, "x")
    atexit.register(print, "before it")


@action()
def exit_handler_that_forks() -> None:
    atexit.register(fork)


@action()
def daemon_thread_at_exit() -> None:
    import threading

    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()


@action()
def thread_that_outlives_main() -> None:
    import threading

    def outlive() -> None:
        threading.main_thread().join()
        print("the thread ends", status_of(os.fork() or os._exit(3)))

    threading.Thread(target=outlive).start()


class Late:
    """Prints when it is finalized."""

    def __del__(self) -> None:
        os.write(1, b"finalized\n")


KEPT: List[Any] = []


@action()
def finalizers_at_exit() -> None:
    sys.stdout.flush()
    KEPT.append(Late())


def do(name: str, control: Control) -> None:
    """Raises SystemExit, or whatever the action raises."""
    used, begin = time.thread_time_ns(), time.monotonic_ns()
    try:
        ACTIONS[name]()
        print(name, "done")
    finally:
        took, used = time.monotonic_ns() - begin, time.thread_time_ns() - used
        if took - used >= control.words[TOOK] - control.words[USED]:
            control.words[TOOK], control.words[USED] = took, used


def main() -> None:
    """Raises SystemExit, or whatever an action raises."""
    control, names, used_s = Control(sys.argv[1]), sys.argv[2].split("+"), float(sys.argv[3])
    for name in names:
        load(name)
        for module in BEFORE[name]:
            importlib.import_module(module)
    while time.thread_time() < used_s:
        work()
    control.ready()
    while control.running():
        work()
    for name in names:
        do(name, control)


if __name__ == "__main__":
    sys.modules["campaign.attach_targets.later"] = sys.modules["__main__"]
    main()
