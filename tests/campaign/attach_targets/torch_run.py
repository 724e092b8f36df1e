"""A target that trains with torch on the CPU: after the same number of laps its weights are always the same."""

import hashlib
from typing import Any, Callable, Dict

import torch
from campaign.attach_targets.control import Target

BATCH, WIDTH, LAYERS = 32, 128, 6


class Training(Target):
    """Dropout draws from the seeded generator; Adam keeps state."""

    def __init__(self) -> None:
        torch.manual_seed(20)
        torch.set_num_threads(1)
        layers: Any = []
        for _ in range(LAYERS):
            layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Dropout(0.1)]
        self._model = torch.nn.Sequential(*layers)
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=1e-3)

    def lap(self) -> None:
        data = torch.randn(BATCH, WIDTH)
        self._optimizer.zero_grad()
        (self._model(data) - data.flip(1)).square().mean().backward()
        self._optimizer.step()

    def result(self) -> str:
        digest = hashlib.sha256()
        for weights in self._model.parameters():
            digest.update(weights.detach().numpy().tobytes())
        return digest.hexdigest()


KINDS: Dict[str, Callable[[], Target]] = {"torch": Training}
