"""A network in JAX; the planted causes lie in what its step does on the host, and how often it is compiled."""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from rootcause.programs.clock import Clock

EVERY = 10  # steps
AHEAD = 2  # steps that may be in flight


def host_weights(values: Any) -> Any:
    """The weight of each sample, computed with NumPy."""
    middle = np.median(np.asarray(values), axis=1)
    return (1 / (1 + np.abs(middle))).astype(np.float32)


def make_update(jax: Any, rows: int, calls_host: bool) -> Callable[..., Any]:
    """One step of gradient descent, not yet compiled."""
    numpy = jax.numpy

    def loss_of(weights: list[Any], batch: Any) -> Any:
        found = batch
        for weight in weights:
            found = numpy.tanh(found @ weight)
        errors = numpy.square(found[:rows] - batch[:rows]).mean(axis=1)
        if calls_host:
            shape = jax.ShapeDtypeStruct((rows,), numpy.float32)
            errors = errors * jax.pure_callback(host_weights, shape, jax.lax.stop_gradient(found[:rows, :256]))
        return errors.mean() + 1e-3 * numpy.square(found - batch).mean()

    def update(weights: list[Any], batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(weights, batch)
        return loss, [weight - 1e-2 * gradient for weight, gradient in zip(weights, gradients, strict=True)]

    return update


def norms(jax: Any, weights: list[Any]) -> Any:
    """The norm of all weights, by a function that is compiled anew each time."""
    return jax.jit(lambda given: sum(jax.numpy.square(weight).sum() for weight in given))(weights)


def main(planted: str, device: str) -> None:
    jax: Any = importlib.import_module("jax")
    jax.config.update("jax_default_device", jax.devices("gpu" if device == "cuda" else "cpu")[0])
    width, batch, layers = (2048, 8192, 8) if device == "cuda" else (32, 64, 2)
    keys = jax.random.split(jax.random.PRNGKey(0), layers + 1)
    weights = [jax.random.normal(key, (width, width)) / width**0.5 for key in keys[1:]]
    data = jax.random.normal(keys[0], (batch, width))
    update = jax.jit(make_update(jax, min(batch, 1024), planted == "host_callback"))
    clock, step, flying = Clock(), 0, []
    while not clock.over():
        step += 1
        loss, weights = update(weights, data)
        if planted == "jit_in_the_loop" and step % EVERY == 0:
            norms(jax, weights)
        flying.append(loss)
        if len(flying) > AHEAD:
            flying.pop(0).block_until_ready()
