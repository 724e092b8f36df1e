"""What the programs for a GPU share: where they compute, and how they leave the last few steps in flight."""

import torch


def prepared(device: str) -> bool:
    """Sets torch up for the device. Returns whether it is a GPU: without one, sizes are small."""
    torch.manual_seed(7)
    torch.set_num_threads(1)  # as torchrun does
    if device != "cuda":
        return False
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU")
    return True


def synchronize(device: str) -> None:
    """Waits until the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()
