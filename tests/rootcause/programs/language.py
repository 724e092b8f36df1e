"""A small transformer on text, trained by a class; the planted causes lie in methods, lambdas and library calls."""

import base64
import copy
import hashlib
import json
import os
import pickle
import re
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rootcause.programs.clock import Clock

WORDS = re.compile(r"(?:[A-Z]?[a-z]+(?:'[a-z]+)?|\d+(?:\.\d+)?|[^\w\s])")
TEXT = (
    "The loss fell from 3.25 to 2.75 while the model's weights, all 12000 of them, didn't move; it wasn't a bug!" * 40
)
VOCABULARY = 512
LENGTH = 48
BATCH = 16


class Transformer(nn.Module):
    """Two layers over embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True, dropout=0.0)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(128, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token."""
        out: Tensor = self.head(self.layers(self.embed(tokens)))
        return out


class Trainer:
    """Trains, and does after each step what the planted cause wants."""

    def __init__(self, planted: str) -> None:
        self.planted = planted
        self.model = Transformer()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.average: Any = None
        self.kept = Path(tempfile.gettempdir(), f"rootcause-{os.getpid()}.pt")
        self.known: dict[str, int] = {}
        self.examples = torch.randint(0, VOCABULARY, (8, BATCH, LENGTH + 1))
        self.after: Callable[[], object] = {
            "deepcopy": lambda: setattr(self, "average", [copy.deepcopy(self.model) for _ in range(6)]),
            "json": lambda: self.publish(),
            "pickle": lambda: self.hand_over(),
            "checkpoint": lambda: torch.save(
                {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, self.kept
            ),
            "hashing": lambda: self.fingerprint(),
            "compression": lambda: zlib.compress(self.model.head.weight.detach().numpy().tobytes()[:200_000], 6),
            "metric": lambda: self.word_error(),
        }.get(planted, lambda: None)

    def publish(self) -> str:
        """The state of the training for a dashboard."""
        weights = self.model.head.weight.detach()[:64]
        return json.dumps({"step": 1, "weights": weights.tolist()}, indent=1)

    def hand_over(self) -> int:
        """Packs the optimizer's state for another process."""
        state = {name: value.tolist() for name, value in list(self.model.state_dict().items())[2:5]}
        return len(base64.b64encode(pickle.dumps(state, protocol=0)))

    def fingerprint(self) -> str:
        """A digest of the weights, to find out which replica went astray."""
        digest = hashlib.sha256()
        for _ in range(6):
            for value in self.model.state_dict().values():
                digest.update(value.numpy().tobytes())
        return digest.hexdigest()

    def word_error(self) -> float:
        """Share of wrong tokens, token by token."""
        wrong = 0
        for row, expected in zip(self.guessed, self.expected, strict=True):
            for guess, truth in zip(row, expected, strict=True):
                if guess != truth:
                    wrong += 1
        return wrong / (BATCH * LENGTH)

    def batches(self) -> Iterator[Tensor]:
        """Batches of tokens without end."""
        number = 0
        while True:
            if self.planted == "tokenisation":
                yield torch.tensor([self.tokens_of(TEXT) for _ in range(BATCH)])
            else:
                yield self.examples[number % 8]
            number += 1

    def tokens_of(self, text: str) -> list[int]:
        """The tokens of a text."""
        return [self.known.setdefault(word, len(self.known)) for word in WORDS.findall(text)][: LENGTH + 1]

    def step(self, tokens: Tensor) -> None:
        """One step of training."""
        logits = self.model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.guessed, self.expected = logits.detach().argmax(-1), tokens[:, 1:]

    def fit(self, clock: Clock) -> None:
        """Trains until the clock says that it is over."""
        for tokens in self.batches():
            self.step(tokens)
            self.after()
            if clock.over():
                return


def main(planted: str) -> None:
    trainer = Trainer(planted)
    trainer.fit(Clock())
    trainer.kept.unlink(missing_ok=True)
