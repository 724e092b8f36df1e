"""A program that profiles its own GPU work again and again, with another tool than torch.profiler's schedule.

    python self_profiling.py jax | ctypes | torch | fake  SESSIONS

An agent runs in it. Each session of its own is one line of JSON on standard output: {"events": GPU events of its own
trace, "expected": how many a session has if nobody is in the way, 0 if that is not known}. Between two sessions it
works on for 0.3 s without a profiler. `fake` is the ctypes user with the fake libcupti.
"""

from __future__ import annotations

import ctypes
import gzip
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[3] / "agent"))

import kineto_agent

STEPS = 40
PAUSE_S = 0.3
KERNEL = 10
BUFFER_BYTES = 1 << 20


class Count:
    """The GPU events of one session."""

    events = 0


Profile = Callable[[], AbstractContextManager[Count]]


def jax_program() -> tuple[Callable[[], None], Profile]:
    """Plain jit training, and jax.profiler, whose trace is read from the file that it writes."""
    jax: Any = importlib.import_module("jax")
    jnp: Any = importlib.import_module("jax.numpy")

    def loss(weights: Any, data: Any) -> Any:
        for _ in range(6):
            data = jnp.tanh(data @ weights)
        return (data * data).mean()

    update = jax.jit(lambda weights, data: weights - 1e-3 * jax.grad(loss)(weights, data))
    state = {"weights": jnp.ones((512, 512)) / 512, "data": jnp.ones((256, 512))}

    def step() -> None:
        state["weights"] = update(state["weights"], state["data"])
        state["weights"].block_until_ready()

    @contextmanager
    def profile() -> Iterator[Count]:
        count = Count()
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                yield count
            (path,) = Path(folder).rglob("*.trace.json.gz")
            events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        gpus = {row["pid"] for row in events if row.get("name") == "process_name" and "GPU" in str(row["args"])}
        count.events = sum(row.get("ph") == "X" and row["pid"] in gpus for row in events)

    return step, profile


def torch_program() -> tuple[Callable[[], None], Profile]:
    """Matrix products, and torch.profiler."""
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    data = torch.randn(256, 256, device="cuda")

    def step() -> None:
        for _ in range(6):
            torch.tanh(data @ data)
        torch.cuda.synchronize()

    @contextmanager
    def profile() -> Iterator[Count]:
        count = Count()
        with torch_profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as own:
            yield count
        kinds = torch.autograd.DeviceType
        count.events = sum(event.device_type == kinds.CUDA for event in own.events())

    return step, profile


class Listener:
    """A user of CUPTI's activities through ctypes, without a subscriber."""

    def __init__(self, path: str) -> None:
        self._cupti: Any = ctypes.CDLL(path)
        self._buffer = ctypes.create_string_buffer(BUFFER_BYTES + 8)
        self._lent = False
        self.kernels = 0
        size_p = ctypes.POINTER(ctypes.c_size_t)
        requested = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_void_p), size_p, size_p)
        size = ctypes.c_size_t
        completed = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, size, size)
        self._callbacks = requested(self._requested), completed(self._completed)

    def _requested(self, buffer: Any, size: Any, records: Any) -> None:
        address = ctypes.addressof(self._buffer)
        buffer[0] = None if self._lent else address + -address % 8
        size[0] = 0 if self._lent else BUFFER_BYTES
        records[0] = 0
        self._lent = True

    def _completed(self, _context: Any, _stream: int, buffer: int, _size: int, valid: int) -> None:
        record = ctypes.c_void_p()
        while (
            self._cupti.cuptiActivityGetNextRecord(
                ctypes.c_void_p(buffer), ctypes.c_size_t(valid), ctypes.byref(record)
            )
            == 0
        ):
            self.kernels += ctypes.c_uint32.from_address(record.value or 0).value == KERNEL
        self._lent = False

    @contextmanager
    def profile(self) -> Iterator[Count]:
        """Records one session."""
        count = Count()
        self.kernels = 0
        self._cupti.cuptiActivityRegisterCallbacks(*self._callbacks)
        self._cupti.cuptiActivityEnable(KERNEL)
        yield count
        self._cupti.cuptiActivityDisable(KERNEL)
        self._cupti.cuptiActivityFlushAll(1)
        count.events = self.kernels


def ctypes_program() -> tuple[Callable[[], None], Profile]:
    """Torch's work, and the listener on torch's libcupti."""
    from kineto_agent.sources.cupti import libcupti

    step, _ = torch_program()
    step()
    return step, Listener(libcupti.find() or "libcupti.so").profile


def fake_program() -> tuple[Callable[[], None], Profile]:
    """The fake library's kernels, and the listener on it."""
    from support.machine.native import FakeCuda

    cuda = FakeCuda()

    def step() -> None:
        cuda.launch(count=6)
        time.sleep(0.002)

    return step, Listener(str(cuda.path)).profile


PROGRAMS = {"jax": jax_program, "torch": torch_program, "ctypes": ctypes_program, "fake": fake_program}
EXPECTED = {"fake": 6 * STEPS}


def main() -> None:
    """Profiles as many times as the command line says."""
    mode, sessions = sys.argv[1], int(sys.argv[2])
    step, profile = PROGRAMS[mode]()
    step()
    kineto_agent.start()
    for _ in range(sessions):
        with profile() as count:
            for _ in range(STEPS):
                step()
        sys.stdout.write(json.dumps({"events": count.events, "expected": EXPECTED.get(mode, 0)}) + "\n")
        sys.stdout.flush()
        until = time.monotonic() + PAUSE_S
        while time.monotonic() < until:
            step()


if __name__ == "__main__":
    main()
