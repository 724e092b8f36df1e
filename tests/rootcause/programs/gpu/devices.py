"""What the programs for a GPU share: where they compute, how batches get there, and how to wait for the device."""

from collections.abc import Sequence

import torch
from torch import Tensor


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


class Prefetched:
    """Batches in pinned memory, over and over; each is copied on a stream of its own while the one before is used."""

    def __init__(self, batches: Sequence[tuple[Tensor, ...]], device: str) -> None:
        self._cuda = device == "cuda"
        self._batches = [tuple(part.pin_memory() if self._cuda else part for part in batch) for batch in batches]
        self._stream = torch.cuda.Stream() if self._cuda else None
        self._given = 0
        self._ahead = self._copied()

    def _copied(self) -> tuple[Tensor, ...]:
        """Begins to copy the next batch."""
        batch = self._batches[self._given % len(self._batches)]
        self._given += 1
        if self._stream is None:
            return batch
        with torch.cuda.stream(self._stream):
            return tuple(part.to("cuda", non_blocking=True) for part in batch)

    def take(self) -> tuple[Tensor, ...]:
        """The next batch, on the device; the stream that asks waits for its copies, and the host does not."""
        batch = self._ahead
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
            for part in batch:
                part.record_stream(torch.cuda.current_stream())
        self._ahead = self._copied()
        return batch
