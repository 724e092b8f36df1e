"""`python hanging.py KIND [PATH]`: says so, with its pid, and then hangs in the function `hangs`, in the way of KIND.

PATH: a file that is never read, for those that need one.
"""

import asyncio
import ctypes
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing import connection
from pathlib import Path


def said() -> None:
    """Tells whoever started this that what comes next hangs."""
    print("hangs", os.getpid(), flush=True)


def lock() -> None:
    held = threading.Lock()
    held.acquire()

    def hangs() -> None:
        said()
        held.acquire()

    hangs()


def crossed_locks() -> None:
    first, second, both = threading.Lock(), threading.Lock(), threading.Barrier(2)

    def other() -> None:
        with second:
            both.wait()
            first.acquire()

    threading.Thread(target=other, daemon=True).start()

    def hangs() -> None:
        with first:
            both.wait()
            said()
            second.acquire()

    hangs()


def condition() -> None:
    def hangs() -> None:
        said()
        threading.Event().wait()

    hangs()


def gil_in_c() -> None:
    """The main thread waits for the GIL, which a call of C holds."""

    def holds_it() -> None:
        ctypes.PyDLL(None).sleep(1000)

    def hangs() -> None:
        said()
        threading.Thread(target=holds_it, daemon=True).start()
        total = 0
        while True:
            total += 1

    hangs()


def pipe() -> None:
    reader, _writer = os.pipe()

    def hangs() -> None:
        said()
        os.read(reader, 1)

    hangs()


def full_queue() -> None:
    full: queue.Queue[int] = queue.Queue(1)
    full.put(1)

    def hangs() -> None:
        said()
        full.put(2)

    hangs()


def child() -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:

        def hangs() -> None:
            said()
            process.wait()

        hangs()


def waitpid() -> None:
    pid = os.fork()
    if pid == 0:
        signal.pause()

    def hangs() -> None:
        said()
        os.waitpid(pid, 0)

    hangs()


def network() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())

    def hangs() -> None:
        said()
        client.recv(1)

    hangs()


def process_queue() -> None:
    mine, _other = connection.Pipe()

    def hangs() -> None:
        said()
        mine.recv()

    hangs()


def event_loop() -> None:
    async def never() -> None:
        said()
        await asyncio.get_running_loop().create_future()

    def hangs() -> None:
        asyncio.run(never())

    hangs()


def thread() -> None:
    worker = threading.Thread(target=time.sleep, args=(1000,), daemon=True)
    worker.start()

    def hangs() -> None:
        said()
        worker.join()

    hangs()


def sleep() -> None:
    def hangs() -> None:
        said()
        time.sleep(1000)

    hangs()


def importing() -> None:
    """Two threads import each other's module."""
    folder = Path(tempfile.mkdtemp())
    (folder / "slow_module.py").write_text("import time\ntime.sleep(1000)\n")
    sys.path.insert(0, str(folder))
    threading.Thread(target=__import__, args=("slow_module",), daemon=True).start()
    while "slow_module" not in sys.modules:
        time.sleep(0.001)

    def hangs() -> None:
        said()
        __import__("slow_module")

    hangs()


def file_lock() -> None:
    import fcntl

    with tempfile.NamedTemporaryFile() as file, Path(file.name).open("rb") as again:
        fcntl.flock(file, fcntl.LOCK_EX)

        def hangs() -> None:
            said()
            fcntl.flock(again, fcntl.LOCK_EX)

        hangs()


def stopped() -> None:
    def hangs() -> None:
        said()
        os.kill(os.getpid(), signal.SIGSTOP)

    hangs()


def fork() -> None:
    """A lock that another thread has held during a fork is never released in the child."""
    held = threading.Lock()
    held.acquire()
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()

    def hangs() -> None:
        said()
        held.acquire()

    if os.fork():
        os.wait()
    hangs()


def fork_in_c() -> None:
    """A child of which Python has not been told, as those of uWSGI."""
    if ctypes.PyDLL(None).fork():
        os.wait()
    lock()


def many_threads() -> None:
    """The main thread and a hundred more wait for a lock; one that sleeps has it."""
    held, taken = threading.Lock(), threading.Event()

    def holds_it() -> None:
        with held:
            taken.set()
            time.sleep(1000)

    def waits_for_it() -> None:
        with held:
            pass

    for target in (holds_it, *[waits_for_it] * 100):
        threading.Thread(target=target, daemon=True).start()
        taken.wait()

    def hangs() -> None:
        said()
        with held:
            pass

    hangs()


def c_with_gil() -> None:
    """A call of C that holds the GIL, for which another thread waits."""

    def computes() -> None:
        while True:
            pass

    threading.Thread(target=computes, daemon=True).start()

    def hangs() -> None:
        said()
        ctypes.PyDLL(None).sleep(1000)

    hangs()


def queue_at_exit() -> None:
    """A queue between processes whose items nobody takes, at the end of the program."""
    import multiprocessing

    items: multiprocessing.Queue[bytes] = multiprocessing.Queue()
    items.put(bytes(1 << 20))
    said()


def thread_at_exit() -> None:
    threading.Thread(target=time.sleep, args=(1000,)).start()
    said()


def full_pipe() -> None:
    """A child that writes more than a pipe takes, and that is waited for before it is read."""
    with subprocess.Popen(["yes"], stdout=subprocess.PIPE) as process:

        def hangs() -> None:
            said()
            process.wait()

        hangs()


def communicate() -> None:
    """A child that has ended, and left its output to one of its own."""
    with subprocess.Popen(["sh", "-c", "sleep 1000 & exit"], stdout=subprocess.PIPE) as process:

        def hangs() -> None:
            said()
            process.communicate()

        hangs()


def before_exec() -> None:
    """A child that hangs before it becomes another program."""

    def hangs() -> None:
        said()
        subprocess.Popen(["true"], preexec_fn=signal.pause)

    hangs()


def spawn() -> None:
    """The same after vfork: the thread that has called it is in state D."""
    with tempfile.TemporaryDirectory() as folder:
        fifo = Path(folder, "fifo")
        os.mkfifo(fifo)

        def hangs() -> None:
            said()
            os.posix_spawn(
                "/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, str(fifo), os.O_RDONLY, 0)]
            )

        hangs()


def process_lock() -> None:
    """A lock that another process has."""
    import multiprocessing

    held = multiprocessing.get_context("fork").Lock()
    held.acquire()

    def hangs() -> None:
        said()
        with held:
            pass

    hangs()


def signals() -> None:
    def hangs() -> None:
        said()
        signal.sigwait({signal.SIGUSR1})

    hangs()


def logging_lock() -> None:
    """A handler's lock, which a thread has that hangs in the same handler."""
    import logging

    emits = threading.Event()

    class Stuck(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            emits.set()
            time.sleep(1000)

    logging.getLogger().addHandler(Stuck())
    threading.Thread(target=logging.error, args=("first",), daemon=True).start()
    emits.wait()

    def hangs() -> None:
        said()
        logging.error("second")

    hangs()


def signal_handler() -> None:
    """A signal's handler that waits for a lock of the code that it interrupts."""
    held = threading.Lock()

    def hangs(*_signal: object) -> None:
        said()
        held.acquire()

    signal.signal(signal.SIGUSR1, hangs)
    with held:
        os.kill(os.getpid(), signal.SIGUSR1)


def terminal() -> None:
    import pty

    _master, slave = pty.openpty()

    def hangs() -> None:
        said()
        os.read(slave, 1)

    hangs()


def selects() -> None:
    import select

    listener = socket.create_server(("127.0.0.1", 0))

    def hangs() -> None:
        said()
        select.select([listener], [], [])

    hangs()


def selector() -> None:
    import selectors

    chosen = selectors.DefaultSelector()
    chosen.register(socket.create_server(("127.0.0.1", 0)), selectors.EVENT_READ)

    def hangs() -> None:
        said()
        chosen.select()

    hangs()


def database() -> None:
    """A database that another connection has locked."""
    import sqlite3

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "data.sqlite")
        first, second = sqlite3.connect(path), sqlite3.connect(path, timeout=1000)
        first.execute("begin exclusive")

        def hangs() -> None:
            said()
            second.execute("begin exclusive")

        hangs()


def retries() -> None:
    missing = Path(tempfile.mkdtemp(), "ready")

    def hangs() -> None:
        said()
        while not missing.exists():
            time.sleep(0.01)

    hangs()


def read_file() -> None:
    with Path(sys.argv[2]).open("rb", buffering=0) as file:

        def hangs() -> None:
            said()
            file.read(1)

        hangs()


def mapped_file() -> None:
    """A page of a file that does not come."""
    import mmap

    with Path(sys.argv[2]).open("rb") as file, mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ) as mapped:

        def hangs() -> None:
            said()
            mapped[0]

        hangs()


def gloo() -> None:
    """An all-reduce to which the other rank does not come."""
    import torch
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        rank = int(os.fork() == 0)
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
        if rank:
            signal.pause()

        def hangs() -> None:
            said()
            dist.all_reduce(torch.ones(1))

        hangs()


def loader() -> None:
    """A DataLoader whose worker hangs."""
    from torch.utils.data import DataLoader

    class Never:
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> int:
            signal.pause()
            return index

    batches = iter(DataLoader(Never(), num_workers=1))

    def hangs() -> None:
        said()
        next(batches)

    hangs()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
