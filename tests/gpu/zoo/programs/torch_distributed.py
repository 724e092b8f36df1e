"""torch.distributed: mostly worlds of one, whose collectives run nevertheless; of two where there are two GPUs."""

from __future__ import annotations

import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

from gpu.zoo.catalog import program
from gpu.zoo.life import Life, Skip
from gpu.zoo.programs.holding import run_beside
from gpu.zoo.programs.torch_common import batches, bits, mlp, torch_of, train

CHILD = Path(__file__).parents[1] / "child.py"


def join(torch: Any, life: Life, backend: str, size: int = 1) -> Any:
    """torch.distributed with a process group that rendezvous through a file."""
    distributed = torch.distributed
    if not distributed.is_available():
        raise Skip("this torch has no torch.distributed")
    if life.device == "cpu":
        backend = "gloo"
    if backend == "nccl" and not distributed.is_nccl_available():
        raise Skip("this torch has no NCCL")
    if life.device == "cuda":
        torch.cuda.set_device(life.rank)
    distributed.init_process_group(
        backend, init_method=f"file://{life.folder}/rendezvous", rank=life.rank, world_size=size
    )
    return distributed


def data_parallel(life: Life, backend: str) -> None:
    """DDP in a world of one."""
    torch = torch_of(life)
    distributed = join(torch, life, backend)
    model = torch.nn.parallel.DistributedDataParallel(mlp(torch, life))
    train(torch, life, model, torch.optim.AdamW(model.parameters(), lr=1e-4), batches(torch, life, 64, 256))
    distributed.destroy_process_group()


@program()
def ddp_nccl(life: Life) -> None:
    data_parallel(life, "nccl")


@program()
def ddp_gloo(life: Life) -> None:
    data_parallel(life, "gloo")


@program()
def fsdp2(life: Life) -> None:
    torch = torch_of(life)
    distributed = join(torch, life, "nccl")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(life.device, (1,))
    model = torch.nn.Sequential(*(mlp(torch, life) for _ in range(3)))
    for part in model:
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(torch, life, model, torch.optim.AdamW(model.parameters(), lr=1e-4), batches(torch, life, 64, 256))
    distributed.destroy_process_group()


@program(graphs=True)
def nccl_in_a_graph(life: Life) -> None:
    """All-reduces of a world of one inside a CUDA graph."""
    torch = torch_of(life, graphs=True)
    distributed = join(torch, life, "nccl")
    value = batches(torch, life, 1024)[0]
    total = torch.zeros_like(value)

    def step() -> None:
        total.copy_(value)
        for _ in range(4):
            distributed.all_reduce(total)
            total.add_(1)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    expected = value + 1 + 1 + 1 + 1
    for _ in life.loop(lambda: bits(torch, [total]), 200):
        for _ in range(5):
            graph.replay()
        life.check(bool(torch.equal(total, expected)), "the sum over the only rank is not its value")
    graph.reset()
    distributed.destroy_process_group()


@program(twin=False)
def ddp_two_gpus(life: Life) -> None:
    """Two ranks on two GPUs; the first one says when both end."""
    torch = torch_of(life)
    if life.device == "cuda" and torch.cuda.device_count() < 2:
        raise Skip("one GPU")
    other = None
    if life.rank == 0:
        command = [sys.executable, str(CHILD), "ddp_two_gpus", str(life.folder), "--rank", "1"]
        other = subprocess.Popen([*command, "--device", life.device])
    distributed = join(torch, life, "nccl", 2)
    model = mlp(torch, life)
    if life.device == "cuda":
        model = torch.nn.parallel.DistributedDataParallel(model.to(life.rank), device_ids=[life.rank])
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = [batch.to(next(model.parameters()).device) for batch in batches(torch, life, 64, 256)]
    going = torch.ones(1, device=data[0].device)
    if other is not None:
        life.ready(other.pid)
    number = 0
    while bool(going):
        batch = data[(number + life.rank) % len(data)]
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        number += 1
        if life.rank == 0:
            going.fill_(float(life.tick(lambda: bits(torch, model.parameters()))))
        distributed.broadcast(going, 0)
    distributed.destroy_process_group()
    if other is not None:
        life.check(other.wait(60) == 0, "the second rank did not end well")


class AllReduceOfASlowRank:
    """An all-reduce, on NCCL's own stream, to which the other rank does not come before it is released."""

    def __init__(self, torch: Any, distributed: Any) -> None:
        self._distributed, self._value = distributed, torch.ones(1 << 20, device="cuda")
        self._work: Any = None

    def begin(self) -> None:
        """Enqueues it; nothing waits for it."""
        self._work = self._distributed.all_reduce(self._value, async_op=True)

    def top_up(self) -> None:
        """Nothing."""

    def release(self) -> None:
        """Nothing: the other rank sees for itself that the file `hold` is gone."""


@program(by_name=True, twin=False)
def hold_all_reduce(life: Life) -> None:
    """The first rank's loop launches ahead while its all-reduce waits for the second rank. Needs two GPUs."""
    torch = torch_of(life)
    if life.device != "cuda" or torch.cuda.device_count() < 2:
        raise Skip("needs two GPUs")
    if life.rank == 0:
        command = [sys.executable, str(CHILD), "hold_all_reduce", str(life.folder), "--rank", "1"]
        other = subprocess.Popen(command)
    distributed = join(torch, life, "nccl", 2)
    distributed.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    if life.rank == 0:
        run_beside(life, partial(AllReduceOfASlowRank, distributed=distributed))
        distributed.destroy_process_group()
        life.check(other.wait(60) == 0, "the second rank did not end well")
        return
    value, pause = torch.ones(1 << 20, device="cuda"), threading.Event()
    while not life.ended():
        if life.held():
            while life.held():
                pause.wait(0.01)
            distributed.all_reduce(value)
            torch.cuda.synchronize()
        pause.wait(0.01)
    distributed.destroy_process_group()
