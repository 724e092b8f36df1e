"""A model of Keras that computes with torch, with callbacks. Needs packages that the project does not depend on."""

import os
import sys
import tempfile
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import keras
from torch.utils.data import DataLoader, TensorDataset

from rootcause.programs.clock import Clock
from rootcause.programs.loops.parts import BATCH, CLASSES, SIDE, histogram, pictures


class Steps(keras.callbacks.Callback):
    """Ends the training when the clock says so."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_training = self.clock.over() or self.model.stop_training


class Weights(keras.callbacks.Callback):
    """Histograms of the weights for a board."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        histogram([value.value for value in self.model.trainable_variables if value.value.numel() > 100])


def main(planted: str) -> None:
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((3, SIDE, SIDE)),
            layers.Conv2D(16, 3, activation="relu", data_format="channels_first"),
            layers.Conv2D(16, 3, activation="relu", data_format="channels_first"),
            layers.Flatten(),
            layers.Dense(512, activation="relu"),
            layers.Dense(CLASSES),
        ]
    )
    model.compile(optimizer="adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    callbacks: list[keras.callbacks.Callback] = [Steps()]
    sys.stdout = sys.stderr  # what the library prints is not for those who count steps
    if planted == "keras_saves":
        folder = tempfile.mkdtemp(prefix="rootcause-")
        callbacks.append(keras.callbacks.ModelCheckpoint(folder + "/model.keras", save_freq=2))
    if planted == "keras_callback":
        callbacks.append(Weights())
    held_back = DataLoader(TensorDataset(*pictures(2 * BATCH)), BATCH)
    model.fit(
        DataLoader(TensorDataset(*pictures(4 * BATCH)), BATCH, shuffle=True),
        validation_data=held_back if planted == "keras_evaluates" else None,
        epochs=100_000,
        verbose=0,
        callbacks=callbacks,
    )
