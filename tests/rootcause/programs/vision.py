"""A small convolutional network on images, trained by functions; causes lie in its data set and its loop."""

import logging
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from rootcause.programs.clock import Clock
from rootcause.programs.slow_files import SlowFile

BATCH = 64
IMAGES = 640
BYTES = 3 * 32 * 32


class Images(Dataset[Any]):
    """Images in memory, or on slow storage, or with augmentation."""

    def __init__(self, planted: str) -> None:
        self.planted = planted
        self.pixels = torch.randn(IMAGES, 3, 32, 32)
        self.labels = torch.randint(0, 10, (IMAGES,))
        self.file = SlowFile(0.012, BYTES * BATCH) if planted == "slow_storage" else None

    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, index: int) -> Any:
        if self.planted == "augmentation":
            return self.augment(self.pixels[index].numpy()), self.labels[index]
        if self.file is not None and index % BATCH == 0:
            return self.read_shard(index), self.labels[index]
        return self.pixels[index], self.labels[index]

    def read_shard(self, index: int) -> Tensor:
        """The image at `index`, out of a file that holds a batch."""
        assert self.file is not None
        with self.file.path.open("rb") as stream:
            raw = np.frombuffer(stream.read(), np.uint8)
        image = raw[:BYTES].reshape(3, 32, 32)
        return torch.from_numpy(image.astype(np.float32))

    def augment(self, image: Any) -> Tensor:
        """Shifts, flips and blurs an image."""
        image = np.roll(image, random.randint(-4, 4), axis=1)
        if random.random() < 0.5:
            image = image[:, :, ::-1]
        padded = np.pad(image, ((0, 0), (2, 2), (2, 2)), mode="reflect")
        blurred = np.zeros_like(image)
        for row in range(5):
            for column in range(5):
                blurred += padded[:, row : row + 32, column : column + 32] / 25
        noise = np.random.default_rng(7).normal(0, 0.1, image.shape)
        return torch.from_numpy((blurred + noise).astype(np.float32))


def slow_collate(items: list[Any]) -> Any:
    """A batch, made number by number."""
    rows = [[float(value) for value in item[0].flatten()[:400].tolist()] for item in items]
    means = [sum(row) / len(row) for row in rows]
    scaled = [[(value - mean) * 1.0 for value in row] for row, mean in zip(rows, means, strict=True)]
    images, labels = default_collate(items)
    images.view(len(items), -1)[:, :400] = torch.tensor(scaled)
    return images, labels


class SyncingHandler(logging.FileHandler):
    """A log that is on the disk before the program goes on."""

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        assert self.stream is not None
        os.fsync(self.stream.fileno())
        time.sleep(0.0002)  # a disk that is not the fastest


def make_model(double: bool) -> nn.Module:
    model = nn.Sequential(
        *(nn.Conv2d(3, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(24, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(48 * 64, 10)),
    )
    return model.double() if double else model


def histogram_of(model: nn.Module) -> None:
    """What some dashboards want: the distribution of every weight."""
    log = logging.getLogger("weights")
    for name, weight in model.named_parameters():
        for place in range(1):
            log.info("%s %d %.4f", name, place, float(weight.detach().flatten()[place % weight.numel()]))


def show(images: Tensor, logits: Tensor, out: Any) -> None:
    print(images[:1, :1, :8], logits[:12], file=out)


def train_one_epoch(model: nn.Module, loader: Any, optimizer: Any, clock: Clock, planted: str, out: Any) -> bool:
    dtype = torch.float64 if planted == "float64" else torch.float32
    layout = torch.contiguous_format if planted == "no_channels_last" else torch.channels_last
    for images, labels in loader:
        images = images.to(dtype=dtype, memory_format=layout)
        optimizer.zero_grad()
        logits = model(images)
        loss = nn.functional.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        if planted == "print_tensor":
            show(images, logits, out)
        if planted == "synchronous_logging":
            histogram_of(model)
        if clock.over():
            return False
    return True


def main(planted: str) -> None:
    clock = Clock()
    data = Images(planted)
    loader = DataLoader(data, BATCH, collate_fn=slow_collate if planted == "slow_collate" else None)
    layout = torch.contiguous_format if planted == "no_channels_last" else torch.channels_last
    model = make_model(planted == "float64").to(memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    with tempfile.TemporaryDirectory() as folder, Path(folder, "out.txt").open("w") as out:
        handler = SyncingHandler(Path(folder, "log.txt"))
        logging.getLogger().addHandler(handler)
        logging.getLogger().setLevel(logging.INFO)
        while train_one_epoch(model, loader, optimizer, clock, planted, out):
            pass
        handler.close()
    if data.file is not None:
        data.file.close()
