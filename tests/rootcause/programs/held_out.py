"""A trainer in the style of a framework, with hooks, callbacks and an optimizer's closure; causes that were kept aside.

They were written after the rules that find causes, to check them.
"""

import csv
import functools
import http.client
import http.server
import inspect
import os
import random
import sqlite3
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from rootcause.programs.clock import Clock

WIDTH = 192
BATCH = 64


class Callback:
    """What a user may do around a step."""

    def on_batch_end(self, module: "Regression", step: int) -> None:
        """Called after each batch."""


class Regression(nn.Module):
    """What a framework calls a module: the network, its loss and its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.SiLU()) for _ in range(24)]
        self.net = nn.Sequential(*layers)

    def training_step(self, batch: Tensor) -> Tensor:
        """The loss of a batch."""
        self.last = self.net(batch)
        return nn.functional.smooth_l1_loss(self.last, batch)

    def configure_optimizers(self) -> Any:
        """The optimizer of the network."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class Fitter:
    """The framework's loop."""

    def __init__(self, callbacks: list[Callback]) -> None:
        self.callbacks = callbacks

    def fit(self, module: Regression, loader: Any, clock: Clock) -> None:
        """Trains until the clock says that it is over."""
        optimizer, step = module.configure_optimizers(), 0
        while True:
            for batch in loader:
                step += 1
                optimizer.step(functools.partial(self.closure, module, optimizer, batch))
                self.call("on_batch_end", module, step)
                if clock.over():
                    return

    def closure(self, module: Regression, optimizer: Any, batch: Tensor) -> Tensor:
        """Forward and backward of a batch."""
        optimizer.zero_grad()
        loss = module.training_step(batch)
        loss.backward()
        return loss

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a hook of all callbacks."""
        for callback in self.callbacks:
            getattr(callback, name)(*arguments)


class Records(IterableDataset[Tensor]):
    """Records, packed or not."""

    def __init__(self, packed: bool) -> None:
        values = torch.randn(BATCH, WIDTH)
        raw = zlib.compress(values.numpy().tobytes() * 12, 1)
        self.values, self.raw = values, raw if packed else None

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            for number in range(BATCH):
                if self.raw is not None and number % 16 == 0:
                    yield self.unpack(number)
                else:
                    yield self.values[number]

    def unpack(self, number: int) -> Tensor:
        """A record out of its packed form."""
        assert self.raw is not None
        numbers = torch.frombuffer(bytearray(zlib.decompress(self.raw)), dtype=torch.float32)
        return numbers[: BATCH * WIDTH].view(BATCH, WIDTH)[number]


class MovingAverage(Callback):
    """An average of the weights, kept by hand."""

    def __init__(self) -> None:
        self.shadow: dict[str, Tensor] = {}

    def on_batch_end(self, module: Regression, step: int) -> None:
        for name, value in module.state_dict().items():
            old = self.shadow.setdefault(name, value.clone())
            for part, new in zip(old.view(-1).chunk(8), value.view(-1).chunk(8), strict=True):
                part.mul_(0.999).add_(new * 0.001)


class Ledger(Callback):
    """Each step in a data base, safe on disk."""

    def __init__(self) -> None:
        folder = tempfile.mkdtemp(prefix="rootcause-")
        self.base = sqlite3.connect(Path(folder, "steps.db"))
        self.base.execute("CREATE TABLE steps (step INTEGER, name TEXT, value REAL)")

    def on_batch_end(self, module: Regression, step: int) -> None:
        for name, value in list(module.named_parameters())[:6]:
            self.base.execute("INSERT INTO steps VALUES (?, ?, ?)", (step, name, float(value.view(-1)[0])))
            self.base.commit()
        time.sleep(0.004)  # the disk of a cloud


class Tracker(Callback):
    """Reports each step to a server."""

    def __init__(self) -> None:
        class Answer(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                time.sleep(0.01)
                self.send_response(204)
                self.end_headers()

            def log_message(self, *arguments: Any) -> None:
                """Nothing."""

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        threading.Thread(target=server.serve_forever, name="server", daemon=True).start()
        self.port = server.server_port

    def on_batch_end(self, module: Regression, step: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request("POST", "/", body=str(step))
        connection.getresponse().read()
        connection.close()


class WhoCalls(Callback):
    """Notes from where it is called."""

    def on_batch_end(self, module: Regression, step: int) -> None:
        self.seen = [frame.function for _ in range(2) for frame in inspect.stack(context=3)]


class Histogram(Callback):
    """Counts outputs by their first digits."""

    def on_batch_end(self, module: Regression, step: int) -> None:
        self.counts = Counter(round(value, 1) for row in module.last.tolist() for value in row)


class Table(Callback):
    """A line for each step, synced."""

    def __init__(self) -> None:
        self.file = Path(tempfile.mkdtemp(prefix="rootcause-"), "log.csv").open("w", newline="")  # noqa: SIM115
        self.writer = csv.writer(self.file)

    def on_batch_end(self, module: Regression, step: int) -> None:
        for row in module.last[:24].tolist():
            self.writer.writerow([step, *row])
        self.file.flush()
        os.fsync(self.file.fileno())


def retried(times: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Calls a function again after a pause if it fails."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            for attempt in range(times):
                try:
                    return function(*arguments)
                except OSError:
                    time.sleep(0.004 * (attempt + 1))
            return None

        return call

    return decorate


class Sync(Callback):
    """Hands each step to a service that often fails."""

    def on_batch_end(self, module: Regression, step: int) -> None:
        self.send(step)

    @retried(3)
    def send(self, step: int) -> None:
        if random.random() < 0.8:
            raise ConnectionError(step)


def watch(module: Regression) -> None:
    """Figures of every layer's output, each time it is computed."""
    figures: dict[int, tuple[float, ...]] = {}

    def note(layer: nn.Module, _given: Any, out: Tensor) -> None:
        values = out.detach()
        figures[id(layer)] = (values.std().item(), values.abs().max().item(), float(values.quantile(0.5)))

    for layer in module.net:
        layer.register_forward_hook(note)


CALLBACKS: dict[str, Callable[[], Callback]] = {
    "moving_average": MovingAverage,
    "ledger": Ledger,
    "tracker": Tracker,
    "who_calls": WhoCalls,
    "histogram": Histogram,
    "table": Table,
    "retries": Sync,
}


def main(planted: str) -> None:
    module = Regression()
    if planted == "layer_hooks":
        watch(module)
    callbacks = [CALLBACKS[planted]()] if planted in CALLBACKS else []
    loader = DataLoader(Records(planted == "unpacking"), BATCH)
    Fitter(callbacks).fit(module, loader, Clock())
