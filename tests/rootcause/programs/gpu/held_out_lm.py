"""A language model of few wide layers in bfloat16; the planted causes were written after the rules, by somebody who had
not read them. As in held_out.py, the host of a step with nothing planted is several steps ahead of the device.
"""

import random
import re
import threading
import time

import torch
from torch import Tensor, nn
from torch.nn import functional

from rootcause.programs.clock import Clock
from rootcause.programs.gpu.devices import Prefetched, prepared

ANSWER_S, PAUSE_S = 0.02, 0.004  # how long the service of metrics takes to answer, and how long it is left alone
SEGMENT = 4  # tokens
KEPT = 0.4  # share of tokens that are the hardest
_WORD = re.compile(r"\w+|[^\w\s]")


def normalised(values: Tensor) -> Tensor:
    """A layer norm without parameters, in the type of its input."""
    with torch.autocast(values.device.type, enabled=False):
        return functional.layer_norm(values, values.shape[-1:])


class Block(nn.Module):
    """Causal attention and a feed-forward part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(width // 128, 1)
        self.projections, self.merge = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        """The values and what the block adds to them."""
        batch, length, width = values.shape
        parts = self.projections(normalised(values)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        values = values + self.merge(attended.transpose(1, 2).reshape(batch, length, width))
        return values + self.down(functional.relu(self.up(normalised(values)), inplace=True))


class Summary(nn.Module):
    """What was said until now, segment by segment. recurrent: as a recurrence, otherwise as a mean."""

    def __init__(self, width: int, recurrent: bool) -> None:
        super().__init__()
        self.gate, self.recurrent = nn.Parameter(torch.full((width,), 0.5)), recurrent

    def forward(self, values: Tensor) -> Tensor:
        """One row for each token."""
        segments = values.unflatten(1, (-1, SEGMENT)).mean(2)
        states = self.recur(segments) if self.recurrent else self.average(segments)
        return states.repeat_interleave(SEGMENT, 1, output_size=values.shape[1])

    def recur(self, segments: Tensor) -> Tensor:
        """The state after each segment."""
        state, states = torch.zeros_like(segments[:, 0]), []
        for segment in segments.unbind(1):
            state = torch.tanh(segment + self.gate.to(segment.dtype) * state)
            states.append(state)
        return torch.stack(states, 1)

    def average(self, segments: Tensor) -> Tensor:
        """The mean until each segment."""
        counts = torch.arange(1, segments.shape[1] + 1, device=segments.device)
        return self.gate.to(segments.dtype) * segments.cumsum(1) / counts.to(segments.dtype)[:, None]


class LanguageModel(nn.Module):
    """Predicts the next token."""

    def __init__(self, vocabulary: int, width: int, layers: int, recurrent: bool) -> None:
        super().__init__()
        self.embedding, self.summary = nn.Embedding(vocabulary, width), Summary(width, recurrent)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of all tokens, at each place."""
        values = self.blocks(self.embedding(tokens).bfloat16())
        scores: Tensor = self.head(normalised(values + 0.1 * self.summary(values)))
        return scores


class Board:
    """Sends the latest figures to a service, from a thread of its own."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.figures: dict[str, float] = {}
        self.sent = 0
        threading.Thread(target=self.send_forever, name="board", daemon=True).start()

    def send_forever(self) -> None:
        """Sends, and holds the lock until the service has answered."""
        while True:
            with self.lock:
                self.sent += len(self.figures)
                time.sleep(ANSWER_S)
            time.sleep(PAUSE_S)

    def publish(self, loss: Tensor) -> None:
        """Notes the loss for the next time that something is sent."""
        figure = loss.item()
        with self.lock:
            self.figures["loss"] = figure


class WordPieces:
    """A tokenizer: words, and their pieces of up to four letters. Its texts are longer than what the model takes."""

    def __init__(self, vocabulary: int, rows: int, length: int) -> None:
        self.vocabulary, self.length = vocabulary, length
        letters, source = "abcdefghijklmnopqrstuvwxyz", random.Random(7)
        words = ["".join(source.choices(letters, k=source.randint(3, 12))) for _ in range(4096)]
        self.texts = [" ".join(source.choices(words, k=2 * length)) for _ in range(rows)]
        self.known = {word[:size]: place for place, word in enumerate(words) for size in range(1, 5)}

    def pieces(self, word: str) -> list[int]:
        """The longest known pieces of a word, from its start to its end."""
        found, start = [], 0
        while start < len(word):
            for size in range(min(4, len(word) - start), 0, -1):
                place = self.known.get(word[start : start + size])
                if place is not None:
                    found.append(place % self.vocabulary)
                    break
            start += size
        return found

    def encode(self, text: str) -> list[int]:
        """As many tokens as the model takes."""
        tokens = [piece for word in _WORD.findall(text.lower()) for piece in self.pieces(word)]
        return tokens[: self.length]


def hardest_tokens(losses: Tensor) -> Tensor:
    """1 where a token or the one before it is among the hardest of its text, otherwise 0."""
    mask = []
    for row in losses.detach().tolist():
        hardest = set(sorted(range(len(row)), key=row.__getitem__, reverse=True)[: int(KEPT * len(row))])
        mask.append([1.0 if place in hardest or place - 1 in hardest else 0.0 for place in range(len(row))])
    return torch.tensor(mask).to(losses.device)


def careful_loss(scores: Tensor, wanted: Tensor) -> Tensor:
    """Cross entropy, a penalty for large sums and one for sure guesses, in a type that cannot overflow."""
    logs = functional.log_softmax(scores.double(), -1)
    sums = torch.logsumexp(scores.double(), -1)
    entropy = -(logs.exp() * logs).sum(-1)
    return functional.nll_loss(logs, wanted) + 1e-4 * sums.square().mean() - 1e-3 * entropy.mean()


class Trainer:
    """The model, its optimizer and its data."""

    def __init__(self, planted: str, device: str) -> None:
        full = prepared(device)
        self.planted, self.device = planted, device
        vocabulary, width, layers, rows, length = (8192, 2048, 4, 16, 1024) if full else (256, 64, 2, 2, 16)
        self.model = LanguageModel(vocabulary, width, layers, planted == "time_loop").to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        texts = [(torch.randint(0, vocabulary, (rows, length + 1)),) for _ in range(8)]
        self.batches = Prefetched(texts, device)
        self.tokenizer = WordPieces(vocabulary, rows, length + 1) if planted == "tokenise_in_step" else None
        self.board = Board() if planted == "metrics_lock" else None

    def next_tokens(self) -> Tensor:
        """The tokens of the next step."""
        if self.tokenizer is None:
            return self.batches.take()[0]
        return torch.tensor([self.tokenizer.encode(text) for text in self.tokenizer.texts]).to(self.device)

    def loss(self, scores: Tensor, wanted: Tensor) -> Tensor:
        """What is made small."""
        flat, places = scores.flatten(0, 1), wanted.flatten()
        if self.planted == "double_loss":
            return careful_loss(flat, places)
        if self.planted == "hard_tokens":
            losses = functional.cross_entropy(flat, places, reduction="none").view(wanted.shape)
            mask = hardest_tokens(losses)
            return (losses * mask).sum() / mask.sum()
        return functional.cross_entropy(flat, places)

    def step(self) -> None:
        """One step of training."""
        tokens = self.next_tokens()
        with torch.autocast(self.device, dtype=torch.bfloat16):
            scores = self.model(tokens[:, :-1])
            loss = self.loss(scores, tokens[:, 1:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.board is not None:
            self.board.publish(loss.detach())


def main(planted: str, device: str) -> None:
    trainer, clock = Trainer(planted, device), Clock()
    while not clock.over():
        trainer.step()
