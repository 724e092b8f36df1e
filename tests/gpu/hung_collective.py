"""`python -m gpu.hung_collective RANK PORT KIND LIMIT_S`: one of two ranks of a job whose second one stops coming.

Rank N works on GPU N and prints a line once it has begun. After STEPS all-reduces the second rank, by KIND, waits for a
`lock` that nobody releases, for a `loader` that reads from a pipe in vain, calls the collective of another group first
(`order`), or dies of SIGKILL (`killed`). The first one then waits in `Tensor.item` until NCCL's watchdog ends it.
"""

import json
import os
import signal
import sys
import threading
from datetime import timedelta
from typing import Any

STEPS = 50


def load_next_batch(kind: str, dist: Any, data: Any, other: Any) -> None:
    """What the second rank does in place of its all-reduce."""
    if kind == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    elif kind == "loader":
        os.read(os.pipe()[0], 1)
    elif kind == "order":
        dist.all_reduce(data, group=other)
        data.sum().item()
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    import torch
    import torch.distributed as dist

    rank, port, kind, limit_s = int(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", rank=rank, world_size=2, device_id=device, timeout=timedelta(seconds=limit_s))
    data, other = torch.ones(1 << 20, device=device), dist.new_group(timeout=timedelta(seconds=limit_s))
    for _ in range(STEPS):
        dist.all_reduce(data, op=dist.ReduceOp.AVG)
        dist.all_reduce(data, op=dist.ReduceOp.AVG, group=other)
        data.sum().item()
    print(json.dumps({"begun": True}), flush=True)
    if rank == 1:
        load_next_batch(kind, dist, data, other)
    else:
        dist.all_reduce(data)
        data.sum().item()


if __name__ == "__main__":
    main()
