"""`python hanging.py KIND`: says so, and then hangs in the function `hangs`, in the way of KIND."""

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
    print("hangs", flush=True)


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
