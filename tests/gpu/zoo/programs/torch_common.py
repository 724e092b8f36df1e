"""What the torch programs share: a torch that computes the same bits every time, data, models, digests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from gpu.zoo.life import Life, Skip, digest_of, need

BATCHES = 16


def torch_of(life: Life, *, graphs: bool = False) -> Any:
    """torch, seeded and deterministic. graphs: the program makes no sense without a GPU."""
    torch = need("torch")
    if life.device == "cuda" and not torch.cuda.is_available():
        raise Skip("torch sees no CUDA device")
    if graphs and life.device != "cuda":
        raise Skip("CUDA graphs need a GPU")
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
    if life.device == "cpu":
        torch.set_num_threads(1)
    return torch


def sync(torch: Any, life: Life) -> None:
    """Wait for the GPU."""
    if life.device == "cuda":
        torch.cuda.synchronize()


def batches(torch: Any, life: Life, *shape: int) -> list[Any]:
    """Random tensors, the same in every run."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*shape, generator=generator).to(life.device) for _ in range(BATCHES)]


def mlp(torch: Any, life: Life, width: int = 256) -> Any:
    """A small network, width in and out."""
    nn = torch.nn
    layers = [nn.Linear(width, 2 * width), nn.GELU(), nn.LayerNorm(2 * width), nn.Linear(2 * width, width)]
    return nn.Sequential(*layers).to(life.device)


def bits(torch: Any, tensors: Iterable[Any]) -> str:
    """Digest of the exact contents."""
    parts = []
    for tensor in tensors:
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        parts.append(whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest_of(parts)


def train(torch: Any, life: Life, model: Any, optimizer: Any, data: list[Any], every: int = 100) -> None:
    """Regression of the data onto itself until the end; the digest is that of the weights."""

    def loss_of(number: int) -> Any:
        batch = data[number % len(data)]
        return (model(batch) - batch).square().mean()

    descend(torch, life, model.parameters, optimizer, loss_of, every)


def descend(
    torch: Any,
    life: Life,
    state: Callable[[], Iterable[Any]],
    optimizer: Any,
    loss_of: Callable[[int], Any],
    every: int = 100,
) -> None:
    """Train until the end by the loss of each iteration; the digest is that of the state."""
    for number in life.loop(lambda: bits(torch, state()), every):
        loss = loss_of(number)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        life.check(bool(torch.isfinite(loss)), "the loss is not finite")


def same(torch: Any, life: Life, found: Any, golden: Any, what: str) -> None:
    """Whether a result has the very bits that it had at first."""
    life.check(bool(torch.equal(found, golden)), f"{what} is not what it was at first")
