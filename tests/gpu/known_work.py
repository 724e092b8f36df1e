"""`python -m gpu.known_work`: GPU work of known bytes and operations, until standard input says a line.

Needs torch with CUDA. The cases run in an irregular order, each about as long as the others, inside of annotations of
their names. The first line of output is "ready"; the second, at the end, how many runs there were.
"""

import random
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

MI = 1 << 20
CHUNK_S = 0.0004  # of one case: shorter than a sample
AHEAD = 64  # chunks that are launched before the GPU is waited for


@dataclass(frozen=True, kw_only=True)
class KnownCase:
    """bytes, flop: of one call. precision: of the flop."""

    name: str
    bytes: float
    flop: float = 0.0
    precision: str = "bf16"


def product(m: int, n: int, k: int) -> KnownCase:
    """A product of bf16 matrices; each operand moves once."""
    return KnownCase(name=f"gemm {m}x{n}x{k}", bytes=2.0 * (m * k + k * n + m * n), flop=2.0 * m * n * k)


PRODUCTS = ((8192, 8192, 8192), (4096, 4096, 4096), (16384, 2048, 2048), (8, 16384, 16384))
LATENCY = KnownCase(name="many steps of a small scan", bytes=2.0 * 4 * 4096)
CASES = (
    KnownCase(name="stream copy", bytes=2.0 * 256 * MI),
    KnownCase(name="stream add", bytes=3.0 * 128 * MI),
    KnownCase(name="stream triad", bytes=3.0 * 128 * MI),
    *(product(*sizes) for sizes in PRODUCTS),
    KnownCase(name="softmax", bytes=2.0 * 4 * 65536 * 1024),
    KnownCase(name="softmax of long rows", bytes=2.0 * 4 * 8192 * 8192),
    KnownCase(name="gather", bytes=2.0 * 4 * 1024 * 65536),
    LATENCY,
)


def work() -> dict[str, Callable[[], Any]]:
    """What each case calls."""
    import torch

    def tensor(*sizes: int, kind: Any = torch.float32) -> Any:
        return torch.randn(*sizes, device="cuda", dtype=kind)

    source, sink = tensor(64 * MI), tensor(64 * MI)
    a, b, c = tensor(32 * MI), tensor(32 * MI), tensor(32 * MI)
    rows, long_rows = tensor(65536, 1024), tensor(8192, 8192)
    table, index = tensor(262144, 1024), torch.randint(0, 262144, (65536,), device="cuda")
    found = tensor(65536, 1024)
    one_row = tensor(1, 4096)
    calls: dict[str, Callable[[], Any]] = {
        "stream copy": lambda: sink.copy_(source),
        "stream add": lambda: torch.add(a, b, out=c),
        "stream triad": lambda: torch.add(a, b, alpha=3.0, out=c),
        "softmax": lambda: torch.softmax(rows, dim=1),
        "softmax of long rows": lambda: torch.softmax(long_rows, dim=1),
        "gather": lambda: torch.index_select(table, 0, index, out=found),
        # One block, whose steps wait for each other.
        LATENCY.name: lambda: torch.cumsum(one_row, dim=1),
    }
    for m, n, k in PRODUCTS:
        left, right = tensor(m, k, kind=torch.bfloat16), tensor(k, n, kind=torch.bfloat16)
        out = tensor(m, n, kind=torch.bfloat16)
        calls[product(m, n, k).name] = partial(torch.matmul, left, right, out=out)
    assert set(calls) == {case.name for case in CASES}
    return calls


def repeats(calls: dict[str, Callable[[], Any]]) -> dict[str, int]:
    """How often each case is called in a chunk."""
    import torch

    found = {}
    for name, call in calls.items():
        for _ in range(5):
            call()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(20):
            call()
        end.record()
        torch.cuda.synchronize()
        found[name] = max(1, round(CHUNK_S * 1000 / (begin.elapsed_time(end) / 20)))
    return found


def main() -> None:
    """Runs until a line comes."""
    import kineto_agent
    import torch

    calls, stopped, runs = work(), threading.Event(), 0
    count, draw = repeats(calls), random.Random(1)

    def read() -> None:
        sys.stdin.readline()
        stopped.set()

    threading.Thread(target=read, daemon=True).start()
    kineto_agent.start()
    print("ready", flush=True)
    while not stopped.is_set():
        for _ in range(AHEAD):
            name = draw.choice(list(calls))
            with torch.profiler.record_function(name):
                for _ in range(count[name]):
                    calls[name]()
            runs += 1
        torch.cuda.synchronize()
    print(runs, flush=True)


if __name__ == "__main__":
    main()
