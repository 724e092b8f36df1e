"""`python -m support.counters.gpu_work`: a process that does what its standard input says on a GPU. Needs torch.

Each line is a phase, which is a method of _Work, and its seconds: "matmul 1.5" or "profile 0". The answer is one line
of JSON: begin_ns and end_ns (Unix), and what the phase counted.
"""

import json
import select
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

SIZE = 8192
STEP_LAUNCHES = 20
WIDTH, LAYERS, BATCH, LENGTH = 1024, 6, 64, 512  # of the transformer that is trained


def _repeated(seconds: float, at_once: int, call: Callable[[], Any]) -> dict[str, float]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(at_once):
            call()
        torch.cuda.synchronize()
    return {}


def _steps(seconds: float, step: Callable[[], None]) -> dict[str, Any]:
    """The ends of all steps (Unix ns). The next line ends it early."""
    ends = [time.time_ns()]
    while ends[-1] - ends[0] < seconds * 1e9 and not select.select([0], [], [], 0)[0]:
        step()
        torch.cuda.synchronize()
        ends.append(time.time_ns())
    return {"ends_ns": ends}


def _training() -> Callable[[], None]:
    layer = torch.nn.TransformerEncoderLayer(WIDTH, 16, 4 * WIDTH, batch_first=True, dropout=0.0)
    model = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = torch.randn(BATCH, LENGTH, WIDTH, device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = (model(data) - data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(5):
        step()
    return step


class _Work:
    def __init__(self) -> None:
        self.a = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
        self.b = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
        self.c = torch.empty(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
        self.small = torch.randn(256, 256, device="cuda")
        self.source = torch.empty(1 << 29, device="cuda", dtype=torch.uint8)
        self.sink = torch.empty_like(self.source)
        self.rows = torch.randn(65536, 1024, device="cuda")
        self.heads = [torch.randn(8, 16, 4096, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        self.training: Callable[[], None] | None = None
        for _ in range(3):
            torch.matmul(self.a, self.b, out=self.c)
            self.sink.copy_(self.source)
            torch.nn.functional.scaled_dot_product_attention(*self.heads)
        torch.cuda.synchronize()

    def matmul(self, seconds: float) -> dict[str, float]:
        return _repeated(seconds, 10, lambda: torch.matmul(self.a, self.b, out=self.c))

    def copy(self, seconds: float) -> dict[str, float]:
        return _repeated(seconds, 50, lambda: self.sink.copy_(self.source))

    def add(self, seconds: float) -> dict[str, float]:
        """y = x + y in 32-bit floats, out of the memory."""
        x, y = self.source.view(torch.float32), self.sink.view(torch.float32)
        return _repeated(seconds, 50, lambda: torch.add(x, y, out=y))

    def softmax(self, seconds: float) -> dict[str, float]:
        return _repeated(seconds, 50, lambda: torch.softmax(self.rows, dim=1))

    def attention(self, seconds: float) -> dict[str, float]:
        return _repeated(seconds, 10, lambda: torch.nn.functional.scaled_dot_product_attention(*self.heads))

    def sleep(self, seconds: float) -> dict[str, float]:
        time.sleep(seconds)  # a phase without work, not a synchronisation
        return {}

    def end(self, _seconds: float) -> dict[str, float]:
        """Ends steps."""
        return {}

    def launches(self, seconds: float) -> dict[str, Any]:
        """Steps of small kernels, bound by their launches."""

        def step() -> None:
            for _ in range(10 * STEP_LAUNCHES):
                self.small = self.small * 1.0001

        return _steps(seconds, step)

    def steps(self, seconds: float) -> dict[str, Any]:
        """Steps bound by the GPU's power."""

        def step() -> None:
            for _ in range(STEP_LAUNCHES):
                self.small = self.small * 1.0001
            torch.matmul(self.a, self.b, out=self.c)

        return _steps(seconds, step)

    def train(self, seconds: float) -> dict[str, Any]:
        """Steps of training a transformer, forward, backward and AdamW."""
        if self.training is None:
            self.training = _training()
        return _steps(seconds, self.training)

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
