"""What else happens in the life of a process that uses the GPU: forks, signals, exceptions, own profilers, its end."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from gpu.zoo.catalog import program
from gpu.zoo.life import Life, Skip
from gpu.zoo.programs.torch_common import batches, bits, mlp, same, sync, torch_of, train

STACK_GROWTH = 512 << 10  # bytes that the main stack may still take
MAP_NORESERVE, MAP_FIXED_NOREPLACE = 0x4000, 0x100000


def product(torch: Any, life: Life) -> tuple[Any, Any, Any]:
    """Two factors and their product."""
    data = batches(torch, life, 128, 128)
    golden = data[0] @ data[1]
    sync(torch, life)
    return data[0], data[1], golden


@program()
def forks_without_exec(life: Life) -> None:
    """Children of a process with a CUDA context compute on the CPU and leave."""
    torch = torch_of(life)
    left, right, golden = product(torch, life)
    for number in life.loop(lambda: bits(torch, [golden]), 500):
        same(torch, life, left @ right, golden, "the product")
        if number % 50 == 0:
            child = os.fork()
            if child == 0:
                os._exit(0 if sum(range(100_000)) == 4_999_950_000 else 1)
            life.check(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "a forked child came to another sum")


@program(end="term")
def sigterm_handler_uses_the_gpu(life: Life) -> None:
    torch = torch_of(life)
    left, right, golden = product(torch, life)

    def end(number: int, frame: object) -> None:
        same(torch, life, left @ right, golden, "the product in the handler")
        life.event("handler", value=bits(torch, [left @ right]))
        life.close()
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    for _ in life.loop(lambda: bits(torch, [golden]), 500):
        same(torch, life, left @ right, golden, "the product")


@program(status=1)
def exception_hook_uses_the_gpu(life: Life) -> None:
    """Every iteration handles an exception on the GPU; the program ends by one that nobody handles."""
    torch = torch_of(life)
    left, right, golden = product(torch, life)

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        same(torch, life, left @ right, golden, "the product in the hook")
        life.close()
        sys.stderr.write(f"expected: {kind.__name__}: {value}\n")

    sys.excepthook = hook
    for _ in life.loop(lambda: bits(torch, [golden]), 500):
        try:
            raise ValueError("handled")
        except ValueError:
            same(torch, life, left @ right, golden, "the product")
    raise RuntimeError("the end of this program")


@program(end="self")
def exits_during_captures(life: Life) -> None:
    """Ends by itself after some seconds, in the middle of whatever capture there is."""
    torch = torch_of(life)
    model = mlp(torch, life)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = batches(torch, life, 64, 256)
    begin = time.monotonic()
    for number in life.loop(lambda: bits(torch, model.parameters())):
        batch = data[number % len(data)]
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        life.check(bool(torch.isfinite(loss)), "the loss is not finite")
        if time.monotonic() - begin > 4:
            break


@program(end="self", graphs=True)
def exits_with_graphs(life: Life) -> None:
    """The same with a graph that is replayed until the very end."""
    torch = torch_of(life, graphs=True)
    left, right, golden = product(torch, life)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = left @ right
    begin = time.monotonic()
    for _ in life.loop(lambda: bits(torch, [golden]), 500):
        graph.replay()
        same(torch, life, found, golden, "the product")
        if time.monotonic() - begin > 4:
            break
    graph.replay()


@program(deterministic=False)
def torch_profiler_user(life: Life) -> None:
    """Profiles three steps of its own again and again; every profile must hold the same number of kernels."""
    torch = torch_of(life)
    profiler = torch.profiler
    activities = [profiler.ProfilerActivity.CPU]
    if life.device == "cuda":
        activities.append(profiler.ProfilerActivity.CUDA)
    left, right, golden = product(torch, life)
    counted = -1
    for number in life.loop(every=10):
        same(torch, life, left @ right, golden, "the product")
        if number % 200:
            continue
        with profiler.profile(activities=activities) as own:
            for _ in range(3):
                left @ right
            sync(torch, life)
        kind = "CUDA" if life.device == "cuda" else "CPU"
        events = [event for event in own.events() if kind in str(event.device_type)]
        found = sum("Memset" not in event.name and "Activity" not in event.name for event in events)
        life.event("own", count=found)
        counted = found if counted < 0 else counted
        life.check(found == counted, f"its own profile has {found} kernels, the first had {counted}")


def take_addresses_near(library: str, reach: int = 2 << 30) -> int:
    """Map what is free within `reach` bytes of a loaded library, without access; returns how many bytes."""
    ranges: list[tuple[int, int, str]] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_words, name = f"{line} ".split(" ", 5)
        begin, end = (int(address, 16) for address in span.split("-"))
        ranges.append((begin, end, name.strip()))
    near = [begin for begin, _end, name in ranges if library in name]
    if not near:
        raise Skip(f"{library} is not loaded")
    libc, taken = ctypes.CDLL(None, use_errno=True), 0
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 4]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE
    last = near[0] - reach
    for begin, end, name in ranges:
        free_end = min(begin - (STACK_GROWTH if name == "[stack]" else 0), near[0] + reach)
        if last < free_end and libc.mmap(last, free_end - last, 0, flags, -1, 0) == last:
            taken += free_end - last
        last = max(last, end)
    return taken


@program(deterministic=False)
def profiler_user_without_free_addresses(life: Life) -> None:
    """torch_profiler_user where no address within reach of libcupti is free, so that gates go into the library."""
    torch_of(life)
    life.event("taken", bytes=take_addresses_near("libcupti"))
    torch_profiler_user(life)


@program(twin=False)
def mps_client(life: Life) -> None:
    """A client of CUDA's multi-process service."""
    folder = tempfile.mkdtemp(prefix="mps-")
    environ = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    os.environ.update(environ)
    try:
        nobody = subprocess.DEVNULL  # a pipe would stay open in the service
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True, stdout=nobody, stderr=nobody, timeout=30)
    except (OSError, subprocess.SubprocessError) as exc:
        raise Skip(f"MPS does not start: {exc}") from exc
    try:
        torch = torch_of(life)
        model = mlp(torch, life)
        train(torch, life, model, torch.optim.SGD(model.parameters(), lr=1e-3), batches(torch, life, 64, 256))
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input=b"quit -t 5\n", check=False, timeout=60, capture_output=True)


@program()
def threads_come_and_go(life: Life) -> None:
    """Threads come and go, each with some GPU work."""
    torch = torch_of(life)
    left, right, golden = product(torch, life)
    wrong: list[str] = []

    def work() -> None:
        if not torch.equal(left @ right, golden):
            wrong.append("a thread")

    for _ in life.loop(lambda: bits(torch, [golden]), 200):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        life.check(not wrong, "the product in a thread is not what it was at first")
