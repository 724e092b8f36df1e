"""A seeded training run on the CPU that prints its losses, exactly: "ready", then one line of JSON at its end.

python seeded_training.py AT_LEAST_STEPS     runs until its standard input ends and so many steps are done
python seeded_training.py --exactly STEPS
"""

import json
import sys
import threading

import kineto_agent
import torch
from torch import nn


def main() -> int:
    """Trains and prints the losses."""
    exactly = sys.argv[1] == "--exactly"
    wanted = int(sys.argv[-1])
    ended = threading.Event()

    def listen() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=listen, daemon=True).start()
    torch.manual_seed(7)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.1), nn.ReLU(), nn.Linear(64, 32))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    if not exactly:
        kineto_agent.start()
    print("ready", flush=True)
    losses: list[str] = []
    while len(losses) < wanted or not (exactly or ended.is_set()):
        data = torch.randn(16, 32)
        optimizer.zero_grad()
        loss = (model(data) - data).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    print(json.dumps({"losses": losses}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
