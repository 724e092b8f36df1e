"""One rank of a training of two: sharded (fsdp), data parallel (ddp), or of a deep and narrow network (deep).

With a GPU for each rank it runs on GPUs with NCCL, otherwise on the CPU with gloo. The planted cause is named behind
the program, as in `ddp/sleep`. What one rank alone does makes the other one wait for it.
"""

import json
import os
import select
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

RANKS = 2
WARM_UP_STEPS = 12
WARM_UP_S = 1.0
STEPS_TO_STOP = 8  # no rank is so far ahead of another one
LOG_EVERY = 4  # steps: then the program waits for the GPU, so it is no further ahead
ALONE_EVERY = 4  # steps between what one rank does alone
SLEEP_S = 0.015
FOLDER = "ROOTCAUSE_FOLDER"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A network and its batch. extra: matrix products that one rank has more."""

    depth: int
    width: int
    batch: int
    extra: int


SIZES = {
    ("fsdp", "cuda"): Size(depth=24, width=4096, batch=16384, extra=0),
    ("fsdp", "cpu"): Size(depth=8, width=256, batch=512, extra=0),
    ("ddp", "cuda"): Size(depth=12, width=4096, batch=16384, extra=12),
    ("ddp", "cpu"): Size(depth=6, width=256, batch=512, extra=8),
    ("deep", "cuda"): Size(depth=48, width=1024, batch=16384, extra=0),
    ("deep", "cpu"): Size(depth=32, width=64, batch=128, extra=0),
}


class JointClock:
    """Called by the loop at the end of each step; all ranks end after the same one, which the first rank names."""

    def __init__(self, rank: int, folder: Path) -> None:
        self._rank, self._stop = rank, folder / "stop"
        self._begun = time.monotonic()
        self._starts: list[int] = []
        self._ready = False

    def over(self) -> bool:
        """Notes the end of a step, and tells whether the program should end."""
        self._starts.append(time.time_ns())
        count = len(self._starts)
        if not self._ready and count >= WARM_UP_STEPS and time.monotonic() - self._begun >= WARM_UP_S:
            self._ready = True
            sys.stdout.write("ready\n")
            sys.stdout.flush()
        if self._rank == 0 and self._ready and not self._stop.exists() and select.select([sys.stdin], [], [], 0)[0]:
            written = self._stop.with_suffix(".new")
            written.write_text(str(count + STEPS_TO_STOP))
            written.rename(self._stop)
        return self._stop.exists() and count >= int(self._stop.read_text())

    def tell(self) -> None:
        """Writes when the steps ended."""
        sys.stdout.write(json.dumps({"starts": self._starts}) + "\n")
        sys.stdout.flush()


class Rows(Dataset[Tensor]):
    """The numbers of the rows of each batch; packed: they have to be unpacked first."""

    def __init__(self, count: int, packed: bool) -> None:
        self.numbers = torch.arange(count) % ROWS
        self.packed = zlib.compress(self.numbers.numpy().tobytes() * max(1, 1_000_000 // count), 1) if packed else None

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, number: int) -> Tensor:
        if self.packed is not None:
            return self.unpack()
        return self.numbers

    def unpack(self) -> Tensor:
        """The numbers out of their packed form."""
        assert self.packed is not None
        values = torch.frombuffer(bytearray(zlib.decompress(self.packed)), dtype=torch.int64)
        return values[: len(self.numbers)]


ROWS = 1024


class Block(nn.Module):
    """A layer around which the input goes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, values: Tensor) -> Tensor:
        """The input and what the layer adds."""
        out: Tensor = values + nn.functional.gelu(self.layer(self.norm(values)))
        return out


def wait_for_license() -> None:
    """Sleeps, as a client of some service may."""
    time.sleep(SLEEP_S)


def auxiliary_task(values: Tensor, weight: Tensor, count: int) -> None:
    """Products that no other rank has."""
    with torch.no_grad():
        for _ in range(count):
            torch.mm(values, weight)


def evaluate(model: nn.Module, values: Tensor) -> float:
    """The loss without training."""
    with torch.no_grad():
        return sum(float(model(values).float().square().mean()) for _ in range(4))


def save(model: nn.Module, folder: Path) -> None:
    """A checkpoint of the first layers."""
    torch.save(dict(list(model.state_dict().items())[:16]), folder / "checkpoint.pt")


def log_metrics(loss: Tensor) -> float:
    """Several means over all ranks, read one by one."""
    total = 0.0
    for _ in range(12):
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        total += mean.item()
    return total


def reduce_gradients(model: nn.Module) -> None:
    """The mean of each gradient, one after the other."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(RANKS)


def reduce_statistics(model: nn.Module, group: Any) -> Tensor:
    """The mean of some gradients over a group that is made for the CPU."""
    statistics = next(p.grad for p in model.parameters() if p.grad is not None and p.dim() > 1).float().cpu()
    dist.all_reduce(statistics, group=group)
    return statistics


def _batches(loader: DataLoader[Tensor], table: Tensor) -> Iterator[Tensor]:
    for numbers in loader:
        yield table[numbers.to(table.device)]


def _wrapped(program: str, planted: str, model: nn.Module, rank: int) -> nn.Module:
    if program == "fsdp":
        for layer in model.children():
            fully_shard(layer)
        fully_shard(model)
        return model
    if planted == "unoverlapped":
        return model
    devices = [rank] if next(model.parameters()).is_cuda else None
    return DistributedDataParallel(
        model,
        device_ids=devices,
        bucket_cap_mb=0.001 if planted == "small_buckets" else 25,
        gradient_as_bucket_view=True,
    )


def _join(rank: int, folder: Path) -> torch.device:
    """Joins the process group, of NCCL if each rank has a GPU. Returns the device of this rank."""
    on_gpu = torch.cuda.device_count() >= RANKS
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=RANKS,
        device_id=device if on_gpu else None,
    )
    return device


def main(planted: str) -> None:
    program, _, cause = planted.partition("/")
    rank, folder = int(os.environ["RANK"]), Path(os.environ[FOLDER])
    device = _join(rank, folder)
    size = SIZES[program, device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    plain = nn.Sequential(*(Block(size.width) for _ in range(size.depth))).to(device, dtype)
    model = _wrapped(program, cause, plain, rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    table = torch.randn(ROWS, size.width, device=device, dtype=dtype)
    count = size.batch * 8 // 5 if cause == "imbalance" and rank == 1 else size.batch
    batches = _batches(DataLoader(Rows(count, cause == "slow_input" and rank == 1), batch_size=None), table)
    weight = torch.randn(size.width, size.width, device=device, dtype=dtype)
    group = dist.new_group(backend="gloo") if cause == "host_group" else None
    alone: Callable[[Tensor], Any] | None = None
    if rank == 0 and cause == "evaluation":
        alone = lambda values: evaluate(plain, values)  # noqa: E731
    if rank == 0 and cause == "checkpoint":
        alone = lambda _values: save(plain, folder)  # noqa: E731
    clock, step = JointClock(rank, folder), 0
    while True:
        step += 1
        values = next(batches)
        if rank == 1 and cause == "sleep":
            wait_for_license()
        if rank == 1 and cause == "compute":
            auxiliary_task(values, weight, size.extra)
        optimizer.zero_grad()
        loss = model(values).float().square().mean()
        loss.backward()
        if cause == "unoverlapped":
            reduce_gradients(model)
        if group is not None:
            reduce_statistics(model, group)
        optimizer.step()
        if cause == "metrics":
            log_metrics(loss)
        if alone is not None and step % ALONE_EVERY == 0:
            alone(values)
        if program != "deep" or step % LOG_EVERY == 0:
            loss.item()
        if clock.over():
            break
    clock.tell()
    os._exit(0)  # torch's gloo group, while it is destroyed with the GIL, may wait for a thread that wants the GIL
