"""A small training loop for `kinetoctl demo`: with torch if it is installed, in plain Python otherwise.

An iteration accumulates the gradients of as many batches as take about ITERATION_S on this machine, and then updates
the weights. The process prints "ready" after the first iteration and ends by itself after LIFETIME_S.
"""

import importlib
import importlib.util
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

LIFETIME_S = 300.0
ITERATION_S = 0.02
TIMED_BATCHES = 5
FEATURES = 48
BATCH = 16
RATE = 0.05
TORCH_WIDTH = 512
TORCH_BATCH = 64

Row = list[float]
Step = Callable[[], None]


def report_iteration() -> Step:
    """How the loop tells the agent that an iteration has ended; nothing if there is no agent."""
    if importlib.util.find_spec("kineto_agent") is None:
        return lambda: None
    step: Step = importlib.import_module("kineto_agent").step  # by name: this is no dependency of kinetoctl
    return step


def batches_per_iteration(run_batch: Callable[[], None]) -> int:
    """How many batches take about ITERATION_S. The first one is not timed: libraries initialize themselves in it."""
    run_batch()
    start = time.perf_counter()
    for _ in range(TIMED_BATCHES):
        run_batch()
    return max(1, round(ITERATION_S * TIMED_BATCHES / (time.perf_counter() - start)))


def load_batch(source: random.Random) -> tuple[list[Row], Row]:
    """Rows of features and their targets."""
    rows, targets = [], []
    for _ in range(BATCH):
        row = []
        for _ in range(FEATURES):
            row.append(source.random() - 0.5)
        rows.append(row)
        targets.append(sum(row))
    return rows, targets


def forward(weights: Row, rows: list[Row]) -> Row:
    """The predictions of a linear model."""
    predictions = []
    for row in rows:
        total = 0.0
        for weight, value in zip(weights, row, strict=True):
            total += weight * value
        predictions.append(total)
    return predictions


def backward(rows: list[Row], predictions: Row, targets: Row, gradient: Row) -> None:
    """Add the gradient of the squared error."""
    for row, prediction, target in zip(rows, predictions, targets, strict=True):
        error = 2.0 * (prediction - target) / BATCH
        for i, value in enumerate(row):
            gradient[i] += error * value


def optimizer_step(weights: Row, gradient: Row, rate: float) -> None:
    """One step of gradient descent, in place; the gradient is zero again."""
    for i, value in enumerate(gradient):
        weights[i] -= rate * value
        gradient[i] = 0.0


def plain_iterations() -> Iterator[None]:
    """Train a linear model without any library."""
    source = random.Random(0)  # noqa: S311  # data of a demo, not a secret
    weights, gradient = [0.0] * FEATURES, [0.0] * FEATURES
    step = report_iteration()

    def run_batch() -> None:
        rows, targets = load_batch(source)
        backward(rows, forward(weights, rows), targets, gradient)

    batches = batches_per_iteration(run_batch)
    while True:
        for _ in range(batches):
            run_batch()
        optimizer_step(weights, gradient, RATE / batches)
        step()
        yield


def torch_iterations() -> Iterator[None]:
    """Train a small network with torch, on the GPU if there is one. The agent counts its optimizer steps."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers = [torch.nn.Linear(TORCH_WIDTH, TORCH_WIDTH), torch.nn.GELU(), torch.nn.Linear(TORCH_WIDTH, TORCH_WIDTH)]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def run_batch() -> None:
        batch = torch.randn(TORCH_BATCH, TORCH_WIDTH).to(device)
        loss: Any = torch.nn.functional.mse_loss(model(batch), batch)
        loss.backward()
        loss.item()  # waits for the GPU

    batches = batches_per_iteration(run_batch)
    while True:
        for _ in range(batches):
            run_batch()
        optimizer.step()
        optimizer.zero_grad()
        yield


def main() -> None:
    """Train until LIFETIME_S is over."""
    end = time.monotonic() + LIFETIME_S
    iterations = torch_iterations() if importlib.util.find_spec("torch") else plain_iterations()
    next(iterations)
    print("ready", flush=True)  # noqa: T201  # the demo waits for this line
    while time.monotonic() < end:
        next(iterations)


if __name__ == "__main__":
    main()
