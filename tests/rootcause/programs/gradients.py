"""A deep narrow network; the planted causes have to do with gradients, the optimizer and the graph."""

from typing import Any

import torch
from torch import Tensor, nn

from rootcause.programs.clock import Clock

LAYERS = 40
WIDTH = 128
BATCH = 128


def clip_gradients(model: nn.Module, limit: float) -> None:
    """Clips each parameter's gradient by itself."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            norm = parameter.grad.norm().item()
            if norm > limit:
                parameter.grad.mul_(limit / norm)
            parameter.grad.clamp_(-limit, limit)
            parameter.grad[parameter.grad.isnan()] = 0


def check_finite(named: Any) -> None:
    """Ends the training at the first number that is none."""
    for name, value in named:
        if torch.isnan(value).any() or torch.isinf(value).any():
            raise ValueError(f"{name} is not finite")


def penalty(model: nn.Module, data: Tensor) -> Tensor:
    """A loss that is made sample by sample, and value by value."""
    out = model(data)
    total = out.new_zeros(())
    for row, wanted in zip(out, data, strict=True):
        total = total + ((row - wanted) ** 2).mean() + 0.01 * row.abs().mean()
    return total / len(out)


def plain_loss(model: nn.Module, data: Tensor) -> Tensor:
    out = model(data)
    return (out - data).square().mean() + 0.01 * out.abs().mean()


def log_norms(loss: Tensor, model: nn.Module) -> float:
    """The norm of the gradients, for a plot."""
    gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    return float(torch.stack([gradient.norm() for gradient in gradients]).norm())


def validate(model: nn.Module, data: Tensor) -> float:
    """The loss on data that is not trained on."""
    model.eval()
    with torch.no_grad():
        total = sum(float(plain_loss(model, data)) for _ in range(3))
    model.train()
    return total


def main(planted: str) -> None:
    clock = Clock()
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    model = nn.Sequential(*blocks)
    if planted == "unfused_optimizer":
        extra = nn.ParameterList(nn.Parameter(torch.randn(24)) for _ in range(400))
        optimizer: Any = torch.optim.AdamW([*model.parameters(), *extra], lr=1e-4, foreach=False)
    elif planted == "":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if planted == "anomaly_mode":
        torch.autograd.set_detect_anomaly(True)
    make_loss = penalty if planted == "tiny_operators" else plain_loss
    data = torch.randn(BATCH, WIDTH)
    while True:
        optimizer.zero_grad()
        loss = make_loss(model, data)
        if planted == "double_backward":
            log_norms(loss, model)
        loss.backward()
        if planted == "unfused_optimizer":
            for parameter in extra:
                parameter.grad = torch.ones_like(parameter)
        if planted == "clip_in_python":
            clip_gradients(model, 1.0)
        if planted == "finite_checks":
            check_finite([*model.named_parameters(), *((f"d{n}", p.grad) for n, p in model.named_parameters())])
        optimizer.step()
        if planted == "evaluation":
            validate(model, data)
        if clock.over():
            return
