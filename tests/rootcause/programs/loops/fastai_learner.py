"""A learner of fastai with callbacks. Needs packages that the project does not depend on."""

import tempfile
from functools import partial
from typing import Any

import torch
from fastai.callback.core import Callback, CancelFitException
from fastai.callback.tracker import SaveModelCallback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.optimizer import OptimWrapper
from torch.utils.data import DataLoader, TensorDataset

from rootcause.programs.clock import Clock
from rootcause.programs.loops.parts import BATCH, histogram, network, pictures

OFTEN, SELDOM = 4, 64  # batches of an epoch, after which fastai evaluates and saves


class Steps(Callback):
    """Ends the training when the clock says so."""

    def before_fit(self) -> None:
        self.clock = Clock()

    def after_batch(self) -> None:
        if self.training and self.clock.over():
            raise CancelFitException


class Weights(Callback):
    """Histograms of the weights for a board."""

    def after_batch(self) -> None:
        histogram([value for value in self.model.parameters() if value.numel() > 100])


def main(planted: str) -> None:
    rows = BATCH * (OFTEN if planted in ("fastai_saves", "fastai_evaluates") else SELDOM)
    held_back = BATCH * (OFTEN if planted == "fastai_evaluates" else 1)
    loaders = (
        DataLoader(TensorDataset(*pictures(rows)), BATCH, shuffle=True),
        DataLoader(TensorDataset(*pictures(held_back)), BATCH),
    )
    callbacks: list[Any] = [Steps()]
    folder = tempfile.mkdtemp(prefix="rootcause-")
    if planted == "fastai_saves":
        callbacks.append(SaveModelCallback(every_epoch=True, with_opt=True))
    if planted == "fastai_callback":
        callbacks.append(Weights())
    learner = Learner(
        DataLoaders(*loaders),
        network(),
        loss_func=torch.nn.CrossEntropyLoss(),
        opt_func=partial(OptimWrapper, opt=partial(torch.optim.SGD, momentum=0.9, foreach=True)),
        cbs=callbacks,
        path=folder,
    )
    with learner.no_bar(), learner.no_logging():
        learner.fit(100_000, lr=1e-4)
