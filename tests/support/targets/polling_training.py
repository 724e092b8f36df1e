"""A small training whose libkineto polls: `python polling_training.py [steps|no-steps] [SECONDS]`.

It prints "importing" before it imports torch, waits for a line if it is told to be slow, and "training" when it trains.
"""

import sys
import time

PAUSE_S = 0.01


def main(how: str) -> None:
    """Trains until it is killed."""
    print("importing", flush=True)
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    print("training", flush=True)
    while True:
        loss = model(torch.randn(8, 32)).sum()
        optimizer.zero_grad()
        loss.backward()
        if how == "steps":
            optimizer.step()
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "steps")
