"""`python -m gpu.collective_work RANK RANKS PORT`: one rank of a job that all-reduces. Needs NCCL.

Rank N works on GPU N until its standard input ends. It prints a line once it has begun.
"""

import json
import os
import select
import sys

BYTES = 256 << 20
AT_ONCE = 20


def main() -> None:
    import torch
    import torch.distributed as dist

    rank, ranks, port = (int(each) for each in sys.argv[1:])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=torch.device("cuda", rank))
    data, going = torch.zeros(BYTES // 4, device="cuda"), torch.ones(1, device="cuda")
    print(json.dumps({"ready": True}), flush=True)
    while True:
        for _ in range(AT_ONCE):
            dist.all_reduce(data)
        going.fill_(0 if select.select([0], [], [], 0)[0] else 1)
        dist.all_reduce(going, op=dist.ReduceOp.MIN)  # all ranks end together
        if not going.item():
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
