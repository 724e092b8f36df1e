"""Sessions of JAX's profiler as the agent has them, in a process of its own, with a daemon's side that copies.

Run with "python -m support.xla.jax_session PLAN", where PLAN is Python text that uses what is here.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from kineto_agent.protocol.records import PART_HEAD
from kineto_agent.sources.interface import SourceError, SourceRequest
from kineto_agent.sources.jax.xla_session import JaxSource

from support.agent.copied_session import CopiedSession

TYPES = frozenset(("cpu_op", "user_annotation"))


class Recording(CopiedSession):
    """A session of JAX's profiler."""

    def __init__(self, limit_bytes: int = 128 << 20) -> None:
        super().__init__(lambda: JaxSource().prepare(SourceRequest(TYPES, limit_bytes, {})))


def refusal() -> str:
    """Why no session can begin now; "" if one can."""
    try:
        Recording().stop()
    except SourceError as error:
        return f"{error.reason_code}: {error.reason}"
    return ""


def pieces(data: bytes) -> list[bytes]:
    """The serialised profiles of a recording."""
    found = []
    while data:
        (size,) = PART_HEAD.unpack_from(data)
        found.append(data[PART_HEAD.size : PART_HEAD.size + size])
        data = data[PART_HEAD.size + size :]
    return found


class Model:
    """Three layers that are trained: some twenty HLO operations a step."""

    def __init__(self) -> None:
        self._weights = {name: jnp.full((32, 32), 0.01) for name in "abc"}
        self._batch = jnp.ones((16, 32))
        self._update = jax.jit(_update)
        self.steps = 0
        self.step()

    def step(self) -> None:
        """Train one iteration."""
        with jax.profiler.StepTraceAnnotation("train", step_num=self.steps):
            self._weights = jax.block_until_ready(self._update(self._weights, self._batch))
        self.steps += 1

    def step_for(self, seconds: float) -> None:
        """Train for so long, one iteration at least."""
        end = time.monotonic() + seconds
        self.step()
        while time.monotonic() < end:
            self.step()


def _update(weights: Any, batch: Any) -> Any:
    def loss(weights: Any) -> Any:
        found = batch
        for name in "abc":
            found = jnp.tanh(found @ weights[name])
        return (found**2).mean()

    return jax.tree_util.tree_map(lambda weight, slope: weight - 0.01 * slope, weights, jax.grad(loss)(weights))


def own_trace(model: Model, steps: int = 5) -> dict[str, int]:
    """The program's own trace of so many steps: how many events of each name jax.profiler wrote."""
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder)
        for _ in range(steps):
            model.step()
        jax.profiler.stop_trace()
        return names_in(Path(folder))


def names_in(folder: Path) -> dict[str, int]:
    """How many events of each name are in the trace that jax.profiler has written below the folder."""
    found: dict[str, int] = {}
    for path in folder.rglob("*.trace.json.gz"):
        for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]:
            if event.get("ph") == "X":
                found[event["name"]] = found.get(event["name"], 0) + 1
    return found


if __name__ == "__main__":
    exec(compile(sys.argv[1], "<plan>", "exec"))
