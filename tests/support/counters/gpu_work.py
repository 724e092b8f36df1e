"""`python -m support.counters.gpu_work`: a process that does what its standard input says on a GPU. Needs torch.

Each line is a phase and its seconds, "matmul 1.5", "copy 1.5", "sleep 1", "steps 0.4" or "profile 0"; the answer is one
line of JSON: begin_ns and end_ns (Unix), and what the phase counted.
"""

import json
import sys
import time

import torch

SIZE = 8192
STEP_LAUNCHES = 20


class _Work:
    def __init__(self) -> None:
        self.a = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
        self.b = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
        self.c = torch.empty(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
        self.small = torch.randn(256, 256, device="cuda")
        self.source = torch.empty(1 << 29, device="cuda", dtype=torch.uint8)
        self.sink = torch.empty_like(self.source)
        for _ in range(3):
            torch.matmul(self.a, self.b, out=self.c)
            self.sink.copy_(self.source)
        torch.cuda.synchronize()

    def matmul(self, seconds: float) -> dict[str, float]:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for _ in range(10):
                torch.matmul(self.a, self.b, out=self.c)
            torch.cuda.synchronize()
        return {}

    def copy(self, seconds: float) -> dict[str, float]:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for _ in range(50):
                self.sink.copy_(self.source)
            torch.cuda.synchronize()
        return {}

    def sleep(self, seconds: float) -> dict[str, float]:
        time.sleep(seconds)  # a phase without work, not a synchronisation
        return {}

    def steps(self, seconds: float) -> dict[str, float]:
        """Launch-bound steps; their mean length in ms."""
        count, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            for _ in range(STEP_LAUNCHES):
                self.small = self.small * 1.0001
            torch.matmul(self.a, self.b, out=self.c)
            torch.cuda.synchronize()
            count += 1
        return {"step_ms": (time.perf_counter() - begin) * 1000 / count}

    def profile(self, _seconds: float) -> dict[str, float]:
        """torch.profiler of the program's own: the kernels that it saw, of 500."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as own:
            for _ in range(500):
                self.small = self.small * 1.0001
            torch.cuda.synchronize()
        kernels = sum("elementwise" in event.name for event in own.events())
        return {"kernels": kernels}


def main() -> None:
    work = _Work()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        name, seconds = line.split()
        begin_ns = time.time_ns()
        counted = getattr(work, name)(float(seconds))
        print(json.dumps({"begin_ns": begin_ns, "end_ns": time.time_ns(), **counted}), flush=True)


if __name__ == "__main__":
    main()
