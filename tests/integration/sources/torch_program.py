"""Program: works on a command from standard input: training steps in several threads, with and without a profiler.

    python torch_program.py      commands: work | profile FILE | end; answers each with a line

One `work` is: in the main thread a loader, a forward and a backward pass with an operator of the program's own, and
an optimizer; in a second thread the same; and a forward pass of the main thread whose backward pass a third one does.
"""

import json
import sys
import threading
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset


class Doubled(torch.autograd.Function):  # type: ignore[misc]  # torch has no types for it
    """An operator of the program's own."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 2


class Trainer:
    """A small model and all that trains it."""

    def __init__(self) -> None:
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
        self.optimizer = torch.optim.SGD(self.layers.parameters(), 0.1)
        self.loader = DataLoader(TensorDataset(torch.randn(8, 8)), batch_size=4)

    def loss(self, values: torch.Tensor) -> torch.Tensor:
        apply: Any = Doubled.apply
        loss: torch.Tensor = torch.cat([apply(self.layers(values)), values.narrow(1, 0, 4)]).clamp(-0.5, 1e12).sum()
        return loss

    def epoch(self) -> None:
        for (batch,) in self.loader:
            with record_function("forward"):
                loss = self.loss(batch)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def in_thread(function: Any) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def work(first: Trainer, second: Trainer) -> None:
    first.epoch()
    in_thread(second.epoch)
    loss = first.loss(torch.ones(4, 8))
    in_thread(loss.backward)


def main() -> None:
    torch.set_num_threads(1)
    trainers = Trainer(), Trainer()
    work(*trainers)
    print("ready", flush=True)
    for line in sys.stdin:
        verb, _, path = line.strip().partition(" ")
        if verb == "end":
            break
        if verb == "profile":
            config = _ExperimentalConfig(profile_all_threads=True)
            with profile(
                activities=[ProfilerActivity.CPU], record_shapes=True, experimental_config=config, acc_events=True
            ) as profiler:
                work(*trainers)
            profiler.export_chrome_trace(path)
        else:
            work(*trainers)
        print(json.dumps({"did": verb}), flush=True)


if __name__ == "__main__":
    main()
