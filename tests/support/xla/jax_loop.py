"""A JAX training loop that nobody prepared. It trains until its standard input ends, and does as it is told.

    python jax_loop.py [--profile-all-the-time]

Commands, one a line, each answered by a line of JSON:

    profile     take a trace of its own of STEPS steps: {"train": how many steps are in it, "operations": likewise,
                "device": events of devices, "names": [module and name of each HLO operation], "open_ns", "close_ns":
                between these (Unix) its session is surely open}
    server      start a profiler server: {"port"}
    fork        fork a child that trains nothing and ends: {"status"}
    exit        end as a script does

With --profile-all-the-time it profiles itself in a row and prints such a line for each of its traces. Its last line is
{"steps": …}.
"""

from __future__ import annotations

import gzip
import json
import os
import socket
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

STEPS = 5
PAUSE_S = 0.05  # between two traces of its own
commands: list[str] = []


def listen() -> None:
    """Note commands; "end" comes with the end of the input."""
    for line in sys.stdin:
        commands.append(line.strip())
    commands.append("end")


class Training:
    """Three layers: some twenty HLO operations a step."""

    def __init__(self) -> None:
        self._weights = {name: jnp.full((64, 64), 0.01) for name in "abc"}
        self._batch = jnp.ones((32, 64))
        self._update = jax.jit(train_step)
        self.steps = 0

    def step(self) -> None:
        """Train one step."""
        with jax.profiler.StepTraceAnnotation("train", step_num=self.steps):
            self._weights = jax.block_until_ready(self._update(self._weights, self._batch))
        self.steps += 1


def train_step(weights: Any, batch: Any) -> Any:
    """One step of gradient descent."""

    def loss(weights: Any) -> Any:
        found = batch
        for name in "abc":
            found = jnp.tanh(found @ weights[name])
        return (found**2).mean()

    return jax.tree_util.tree_map(lambda weight, slope: weight - 0.01 * slope, weights, jax.grad(loss)(weights))


def own_trace(training: Training) -> dict[str, Any]:
    """What a trace of its own has. Raises what jax.profiler raises."""
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder)
        open_ns = time.time_ns()
        for _ in range(STEPS):
            training.step()
        close_ns = time.time_ns()
        jax.profiler.stop_trace()
        (path,) = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
    rows = [event for event in events if event.get("ph") == "X"]
    operations = [event["args"] for event in rows if "hlo_op" in event.get("args", {})]
    return {
        "train": sum(event["name"] == "train" and "device" not in processes[event["pid"]] for event in rows),
        "operations": len(operations),
        "device": sum("/device:" in processes[event["pid"]] for event in rows),
        "names": sorted({(args.get("hlo_module", ""), args["hlo_op"]) for args in operations}),
        "open_ns": open_ns,
        "close_ns": close_ns,
    }


def do(command: str, training: Training) -> dict[str, Any]:
    """Carry out a command."""
    if command == "profile":
        return own_trace(training)
    if command == "server":
        with socket.socket() as found:
            found.bind(("localhost", 0))
            port = int(found.getsockname()[1])
        jax.profiler.start_server(port)
        return {"port": port}
    if command == "fork":
        child = os.fork()
        if child == 0:
            os._exit(0)
        return {"status": os.waitpid(child, 0)[1]}
    if command == "exit":
        sys.exit(0)
    raise ValueError(command)


def main() -> None:
    """Train until the input ends."""
    warnings.simplefilter("ignore")  # of forks
    always = "--profile-all-the-time" in sys.argv
    threading.Thread(target=listen, daemon=True).start()
    training = Training()
    for _ in range(2):  # the second one compiles anew, for weights that come from a step
        training.step()
    print("ready", flush=True)
    next_trace = time.monotonic()
    while "end" not in commands:
        training.step()
        time.sleep(0.001)
        while commands and commands[0] != "end":
            print(json.dumps(do(commands.pop(0), training)), flush=True)
        if always and time.monotonic() >= next_trace:
            print(json.dumps(own_trace(training)), flush=True)
            next_trace = time.monotonic() + PAUSE_S
    print(json.dumps({"steps": training.steps}), flush=True)


if __name__ == "__main__":
    main()
