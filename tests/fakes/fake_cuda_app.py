"""A small "training" program that needs no GPU: it loads the fake libcupti and libcuda and launches kernels.

Each step copies a batch to the device, launches kernels from every thread, clears a gradient and waits for
the device. It calls `kineto_agent.step()` where there is such a function.

    python fake_cuda_app.py --steps 100 --kernels-per-step 50
    python fake_cuda_app.py --forever

It prints one line of JSON, {"ready": true, "pid": …, "cupti": …}, after its first step. Every line on its
standard input is answered: "counts" by one line with what the fake has written and dropped so far, "profile" (one
step under a profiler of its own) by the number of kernels in its profile; "KEY VALUE" programs a fault of the fake;
"stop" ends the loop. At the end a last line with the counts is printed. With
--gate FIFO every wait of the fake ends once somebody has opened that to write.
"""

import argparse
import ctypes
import json
import os
import queue
import select
import sys
import threading
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.machine.native import FakeCuda, fake_cuda

KINDS = {"kernel": 10, "gpu_memcpy": 1, "gpu_memset": 2, "cuda_runtime": 5, "cuda_driver": 4, "cuda_sync": 38}
KERNEL_NAMES = ("void gemm<float, 128, 64>(float const*, float const*, float*)", "softmax_warp_forward", "layer_norm")
BATCH_BYTES = 1 << 20


class Launcher(threading.Thread):
    """One thread that launches kernels on its own stream when told."""

    def __init__(self, cuda: FakeCuda, stream: int, kernels: int, duration_ns: int) -> None:
        super().__init__(name=f"launcher-{stream}", daemon=True)
        self.orders: queue.SimpleQueue[threading.Semaphore | None] = queue.SimpleQueue()
        self._cuda, self._stream, self._kernels, self._duration_ns = cuda, stream, kernels, duration_ns

    def run(self) -> None:
        """Serve until told to end."""
        while (done := self.orders.get()) is not None:
            for i in range(self._kernels):
                name = KERNEL_NAMES[i % len(KERNEL_NAMES)]
                self._cuda.launch(name, duration_ns=self._duration_ns, stream=self._stream)
            done.release()


def counts(cuda: FakeCuda, steps: int) -> dict[str, int]:
    """What was recorded so far, by Kineto's activity types."""
    recorded = {name: cuda.written(kind) for name, kind in KINDS.items()}
    return {"steps": steps, **recorded, "dropped": cuda.dropped, "finalized": cuda.finalized, "misused": cuda.misused}


def agent_step() -> Callable[[], object]:
    """kineto_agent.step where it exists."""
    try:
        import kineto_agent
    except ImportError:
        return lambda: None
    step: Callable[[], object] = getattr(kineto_agent, "step", lambda: None)
    return step


class App:
    """The loop and its standard input."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.cuda = FakeCuda()
        self.libcuda = ctypes.CDLL(str(fake_cuda()))
        self.options = options
        self.steps = 0
        duration = options.kernel_us * 1000
        per_thread = max(1, options.kernels_per_step // options.threads)
        self.launchers = [Launcher(self.cuda, i, per_thread, duration) for i in range(options.threads)]
        self.input_open = True
        self.unread = ""

    def step(self) -> None:
        """One training step."""
        self.cuda.memcpy(BATCH_BYTES)
        done = threading.Semaphore(0)
        for launcher in self.launchers:
            launcher.orders.put(done)
        for _ in self.launchers:
            done.acquire()
        self.cuda.memset()
        for stream in range(len(self.launchers)):
            self.cuda.sync(stream)
        self.steps += 1

    def say(self, **values: object) -> None:
        """One line of JSON."""
        sys.stdout.write(json.dumps(values) + "\n")
        sys.stdout.flush()

    def read_input(self) -> list[str]:
        """The whole lines that came on standard input since the last step."""
        while self.input_open and select.select([0], [], [], 0)[0]:
            data = os.read(0, 4096)
            self.input_open = bool(data)
            self.unread += data.decode()
        *lines, self.unread = self.unread.split("\n")
        return lines

    def told_to_stop(self) -> bool:
        """Answer standard input."""
        for line in self.read_input():
            if line == "counts":
                self.say(**counts(self.cuda, self.steps))
            elif line == "profile":
                self.cuda.kineto_begin()
                self.step()
                self.say(kernels=self.cuda.kineto_end())
            elif " " in line:
                key, value = line.split()
                self.cuda.set(key, int(value))
                self.say(set=key)
            elif line == "stop":
                return True
        return False

    def run(self) -> None:
        """Until the steps are done or "stop" comes."""
        step = agent_step()
        for launcher in self.launchers:
            launcher.start()
        while not self.options.steps or self.steps < self.options.steps:
            self.step()
            step()
            if self.steps == 1:
                self.say(ready=True, pid=os.getpid(), cupti=str(self.cuda.path))
            if self.told_to_stop():
                break
        for launcher in self.launchers:
            launcher.orders.put(None)
        self.say(**counts(self.cuda, self.steps))


def end_waits(cuda: FakeCuda, gate: str) -> None:
    """On a thread of its own: the main one may stand in the fake."""
    Path(gate).read_bytes()
    for key in ("finalize_delay_ms", "subscribe_delay_ms"):
        cuda.set(key, 0)


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, default=0, help="how many steps (0, the default: until told to stop)")
    length.add_argument("--forever", dest="steps", action="store_const", const=0)
    parser.add_argument("--kernels-per-step", type=int, default=30)
    parser.add_argument("--kernel-us", type=int, default=20, help="simulated duration of a kernel in µs")
    parser.add_argument("--threads", type=int, default=1, help="threads that launch, each on its own stream")
    parser.add_argument("--gate", help="a FIFO: once it is opened to write, the fake's waits end")
    options = parser.parse_args()
    app = App(options)
    if options.gate:
        threading.Thread(target=end_waits, args=(app.cuda, options.gate), daemon=True).start()
    app.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
