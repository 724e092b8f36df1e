"""A small training whose libkineto polls: `python polling_training.py [steps|no-steps] [PAUSE_S] [DEVICE]`.

It prints "importing" before it imports torch, and "training" when it trains. It imports nothing of kinetod.
"""

import sys
import time


def main(how: str, pause_s: float, device: str) -> None:
    """Trains until it is killed."""
    print("importing", flush=True)
    import torch

    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    print("training", flush=True)
    while True:
        loss = model(torch.randn(8, 32, device=device)).sum()
        optimizer.zero_grad()
        loss.backward()
        if how == "steps":
            optimizer.step()
        time.sleep(pause_s)


if __name__ == "__main__":
    main(
        sys.argv[1] if len(sys.argv) > 1 else "steps",
        float(sys.argv[2]) if len(sys.argv) > 2 else 0.01,
        sys.argv[3] if len(sys.argv) > 3 else "cpu",
    )
