"""A convolutional network on images that workers augment; the planted causes lie in its input and its settings."""

import os
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from rootcause.programs.clock import Clock
from rootcause.programs.gpu.devices import prepared

WORKERS = 12
FEW = 3  # workers, or cores, that are too few


class Photographs(Dataset[Any]):
    """Images of bytes in memory, each made different whenever it is read."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.pixels = np.random.default_rng(7).integers(0, 255, (64, size + 16, size + 16, 3), np.uint8)

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.augment(self.pixels[index % len(self.pixels)]), index % 100

    def augment(self, image: Any) -> Tensor:
        """Cuts, flips and colours an image."""
        top, left = random.randint(0, 16), random.randint(0, 16)
        part = image[top : top + self.size, left : left + self.size].astype(np.float32)
        if random.random() < 0.5:
            part = part[:, ::-1]
        part = (part - part.mean()) * random.uniform(0.8, 1.2) + random.uniform(-10, 10)
        return torch.from_numpy(np.ascontiguousarray((part / 64).transpose(2, 0, 1)))


class Bottleneck(nn.Module):
    """Three convolutions around which the values go."""

    def __init__(self, given: int, inner: int, stride: int, groups: int) -> None:
        super().__init__()
        out = 4 * inner
        self.way = nn.Sequential(
            *(nn.Conv2d(given, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True)),
            nn.Conv2d(inner, inner, 3, stride, 1, groups=groups, bias=False),
            *(nn.BatchNorm2d(inner), nn.ReLU(inplace=True)),
            *(nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out)),
        )
        same = given == out and stride == 1
        self.around = nn.Identity() if same else nn.Conv2d(given, out, 1, stride, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        """The values after the block."""
        return nn.functional.relu(self.way(values) + self.around(values), inplace=True)


def make_model(depths: tuple[int, ...], first: int) -> nn.Module:
    """A residual network, the later stages with grouped convolutions."""
    layers: list[nn.Module] = [nn.Conv2d(3, first, 7, 2, 3, bias=False), nn.BatchNorm2d(first), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    given = first
    for stage, depth in enumerate(depths):
        inner = first << stage
        for place in range(depth):
            stride = 2 if stage and not place else 1
            layers.append(Bottleneck(given, inner, stride, 8 if stage >= 2 else 1))
            given = 4 * inner
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(given, 100))


def loader_of(planted: str, size: int, batch: int, most: int, device: str) -> Any:
    """The batches."""
    workers = {"no_workers": 0, "too_few_workers": FEW}.get(planted, most)
    pinned = device == "cuda" and planted != "pageable_copies"
    return DataLoader(Photographs(size), batch, num_workers=workers, pin_memory=pinned, persistent_workers=workers > 0)


def main(planted: str, device: str) -> None:
    full = prepared(device)
    if planted == "few_cores":
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:FEW])
    torch.backends.cudnn.benchmark = planted != "cudnn_benchmark_off"
    layout = torch.contiguous_format if planted == "no_channels_last" else torch.channels_last
    size, batch, workers = (160, 512, WORKERS) if full else (32, 4, 2)
    model: Any = make_model((3, 4, 6, 3) if full else (1, 1, 1, 1), 64 if full else 8)
    model = model.to(device, memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, fused=True)
    clock = Clock()
    for images, labels in loader_of(planted, size, batch, workers, device):
        ahead = planted != "pageable_copies"
        images = images.to(device, non_blocking=ahead, memory_format=layout)
        labels = labels.to(device, non_blocking=ahead)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if clock.over():
            break
