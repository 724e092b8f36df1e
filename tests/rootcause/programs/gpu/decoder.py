"""A small language model in bfloat16 whose gradients are accumulated; the planted causes lie in its training step."""

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rootcause.programs.clock import Clock
from rootcause.programs.gpu.devices import prepared

MICRO_STEPS = 2
SHOWN = 32  # places of each text that the progress bar looks at
GROUPS = 6  # of each parameter, that are clipped by themselves


class Block(nn.Module):
    """Causal attention and a feed-forward part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(width // 128, 1)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, values: Tensor) -> Tensor:
        """The values and what the block adds to them."""
        batch, length, width = values.shape
        parts = self.projections(self.first(values)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        values = values + self.merge(attended.transpose(1, 2).reshape(batch, length, width))
        return values + self.down(functional.gelu(self.up(self.second(values))))


class Decoder(nn.Module):
    """Predicts the next token. precise: with the last product in float32."""

    def __init__(self, vocabulary: int, width: int, layers: int, precise: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head, self.precise = nn.LayerNorm(width), nn.Linear(width, vocabulary), precise

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of all tokens, at each place."""
        values = self.norm(self.blocks(self.embedding(tokens)))
        if self.precise:
            with torch.autocast(tokens.device.type, enabled=False):
                return self.head(values.float())
        scores: Tensor = self.head(values)
        return scores


class Progress:
    """Means for a progress bar."""

    def __init__(self) -> None:
        self.loss = self.guessed = self.sure = 0.0

    def note(self, loss: Tensor, scores: Tensor, wanted: Tensor) -> None:
        """Adds the loss of a micro-step, and for each text whether its last tokens were guessed, and how surely."""
        self.loss = 0.9 * self.loss + 0.1 * loss.item()
        for own, tokens in zip(scores[:, -SHOWN:], wanted[:, -SHOWN:], strict=True):
            for chances, token in zip(own, tokens, strict=True):
                self.guessed = 0.9 * self.guessed + 0.1 * (chances.argmax() == token).item()
                self.sure = 0.9 * self.sure + 0.1 * chances.max().item()


def clip_each(model: nn.Module, limit: float) -> None:
    """Clips groups of each parameter's gradient by themselves."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            for group in parameter.grad.chunk(GROUPS):
                if group.norm().item() > limit:
                    group.mul_(limit / group.norm().item())


def show(scores: Tensor, model: Decoder, out: Any) -> None:
    print(scores[:, -1], model.head.weight.grad, file=out)
    for name, parameter in model.named_parameters():
        print(name, parameter.grad, file=out)


class Trainer:
    """The model, its optimizer and its data."""

    def __init__(self, planted: str, device: str) -> None:
        full = prepared(device)
        self.planted, self.device = planted, device
        vocabulary, width, layers = (16384, 4096, 3) if full else (256, 64, 2)
        self.model = Decoder(vocabulary, width, layers, planted == "float32_head").to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tokens = torch.randint(0, vocabulary, (8, 8, 512) if full else (8, 2, 16), device=device)
        self.progress, self.out = Progress(), tempfile.TemporaryFile("w")  # noqa: SIM115

    def loss(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of a micro-step, and the scores."""
        with torch.autocast(self.device, dtype=torch.bfloat16):
            scores = self.model(tokens[:, :-1])
            loss = functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
        return loss, scores

    def micro_step(self, tokens: Tensor) -> Tensor:
        """Adds the gradients of some samples."""
        loss, scores = self.loss(tokens)
        (loss / MICRO_STEPS).backward()
        if self.planted == "empty_cache":
            torch.cuda.empty_cache()
        if self.planted == "item_each_micro_step":
            self.progress.note(loss.detach(), scores.detach(), tokens[:, 1:])
        return scores.detach()

    def validate(self) -> Tensor:
        """The loss on data that is not trained on."""
        self.model.eval()
        with torch.no_grad():
            total = sum((self.loss(self.tokens[number])[0] for number in range(3)), torch.zeros((), device=self.device))
        self.model.train()
        return total

    def step(self, number: int) -> None:
        """One step of training."""
        for part in range(MICRO_STEPS):
            scores = self.micro_step(self.tokens[(number * MICRO_STEPS + part) % len(self.tokens)])
        if self.planted == "clip_with_item":
            clip_each(self.model, 0.01)
        if self.planted == "print_cuda_tensor":
            show(scores, self.model, self.out)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.planted == "evaluation":
            self.validate()


def main(planted: str, device: str) -> None:
    trainer, clock, number = Trainer(planted, device), Clock(), 0
    while not clock.over():
        trainer.step(number)
        number += 1
