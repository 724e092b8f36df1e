"""JAX: XLA puts what it launches into CUDA graphs ("command buffers") of its own accord."""

from __future__ import annotations

import gzip
import json
import shutil
import socket
import threading
import warnings
from collections.abc import Callable
from typing import Any

from gpu.zoo.catalog import program
from gpu.zoo.life import Life, Skip, digest_of, need

ENVIRON = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # others are on the GPU, too
    "XLA_FLAGS": "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0",
}


def jax_of(life: Life) -> Any:
    """jax with the wanted device as its default."""
    jax = need("jax")
    try:
        device = jax.devices("gpu" if life.device == "cuda" else "cpu")[0]
    except RuntimeError as exc:
        raise Skip(f"jax: {str(exc).splitlines()[0]}") from exc
    jax.config.update("jax_default_device", device)
    return jax


def bits(jax: Any, tree: Any) -> str:
    """Digest of the exact contents."""
    numpy = need("numpy")
    return digest_of(numpy.asarray(leaf).tobytes() for leaf in jax.tree_util.tree_leaves(tree))


def weights_and_data(jax: Any) -> tuple[dict[str, Any], list[Any]]:
    """A small network and batches for it."""
    keys = jax.random.split(jax.random.PRNGKey(0), 20)
    weights = {name: jax.random.normal(keys[k], (256, 256)) / 16 for k, name in enumerate(("a", "b", "c"))}
    return weights, [jax.random.normal(key, (64, 256)) for key in keys[4:]]


def update_of(jax: Any) -> Callable[[Any, Any], Any]:
    """One step of gradient descent, not yet compiled."""

    def loss(weights: Any, batch: Any) -> Any:
        found = batch
        for name in ("a", "b", "c"):
            found = jax.numpy.tanh(found @ weights[name])
        return ((found - batch) ** 2).mean()

    def update(weights: Any, batch: Any) -> Any:
        gradients = jax.grad(loss)(weights, batch)
        return jax.tree_util.tree_map(lambda weight, gradient: weight - 1e-2 * gradient, weights, gradients)

    return update


@program(graphs=True, environ=ENVIRON)
def jax_train(life: Life) -> None:
    jax = jax_of(life)
    state, data = weights_and_data(jax)
    update = jax.jit(update_of(jax))
    jax.block_until_ready(update(state, data[0]))
    kept = [state]
    for number in life.loop(lambda: bits(jax, kept[0]), 200):
        kept[0] = jax.block_until_ready(update(kept[0], data[number % len(data)]))
        if number % 200 == 0:
            life.check(bool(jax.numpy.isfinite(kept[0]["a"]).all()), "a weight is not finite")


@program(graphs=True, environ=ENVIRON)
def jax_train_donated(life: Life) -> None:
    """The same with buffers that are given to the step, so that addresses in the graphs change."""
    jax = jax_of(life)
    state, data = weights_and_data(jax)
    update = jax.jit(update_of(jax), donate_argnums=0)
    kept = [jax.block_until_ready(update(state, data[0]))]
    for number in life.loop(lambda: bits(jax, kept[0]), 200):
        kept[0] = jax.block_until_ready(update(kept[0], data[number % len(data)]))


@program(graphs=True, environ=ENVIRON)
def jax_scan(life: Life) -> None:
    jax = jax_of(life)
    state, data = weights_and_data(jax)
    update = update_of(jax)
    many = jax.numpy.stack(data)
    epoch = jax.jit(lambda weights: jax.lax.scan(lambda w, batch: (update(w, batch), None), weights, many)[0])
    kept = [jax.block_until_ready(epoch(state))]
    for _ in life.loop(lambda: bits(jax, kept[0])):
        kept[0] = jax.block_until_ready(epoch(kept[0]))


@program(graphs=True, environ=ENVIRON)
def jax_pmap(life: Life) -> None:
    jax = jax_of(life)
    state, data = weights_and_data(jax)
    update = update_of(jax)
    devices = jax.devices("gpu" if life.device == "cuda" else "cpu")[:1]
    mapped = jax.pmap(
        lambda w, batch: jax.tree_util.tree_map(lambda leaf: jax.lax.pmean(leaf, "i"), update(w, batch)),
        axis_name="i", devices=devices,
    )  # fmt: skip
    kept = [jax.tree_util.tree_map(lambda leaf: leaf[None], state)]
    whole = [batch[None] for batch in data]
    kept[0] = jax.block_until_ready(mapped(kept[0], whole[0]))
    for number in life.loop(lambda: bits(jax, kept[0]), 200):
        kept[0] = jax.block_until_ready(mapped(kept[0], whole[number % len(whole)]))


@program(graphs=True, environ=ENVIRON)
def jax_inference(life: Life) -> None:
    """The same function of the same input: every result must be the first one."""
    jax = jax_of(life)
    state, data = weights_and_data(jax)
    chain = jax.jit(lambda w, batch: jax.numpy.tanh(jax.numpy.tanh(batch @ w["a"]) @ w["b"]) @ w["c"])
    golden = jax.block_until_ready(chain(state, data[0]))
    for _ in life.loop(lambda: bits(jax, golden), 500):
        life.check(bool((chain(state, data[0]) == golden).all()), "the result is not what it was at first")


@program(graphs=True, environ=ENVIRON)
def jax_profiler_user(life: Life) -> None:
    """Takes a trace of twenty of its own steps again and again and counts the GPU's events in it."""
    jax = jax_of(life)
    state, data = weights_and_data(jax)
    update = jax.jit(update_of(jax))
    kept = [jax.block_until_ready(update(state, data[0]))]
    folder = life.folder / "own"
    for number in life.loop(lambda: bits(jax, kept[0]), 200):
        if number % 500 == 250:
            shutil.rmtree(folder, ignore_errors=True)
            jax.profiler.start_trace(str(folder))
        kept[0] = jax.block_until_ready(update(kept[0], data[number % len(data)]))
        if number % 500 == 270:
            jax.profiler.stop_trace()
            life.event("own", count=device_events(folder, life.device))


@program(graphs=True, environ=ENVIRON)
def jax_profiler_server(life: Life) -> None:
    """Is asked for a trace of itself through its own profiler's port again and again, as TensorBoard does."""
    jax, grpc = jax_of(life), need("grpc")
    state, data = weights_and_data(jax)
    update = jax.jit(update_of(jax))
    kept = [jax.block_until_ready(update(state, data[0]))]
    port = free_port()
    jax.profiler.start_server(port)
    ended = threading.Event()
    counts: list[int] = []

    def ask() -> None:
        folder = life.folder / "asked"
        profile = grpc.insecure_channel(f"localhost:{port}").unary_unary("/tensorflow.ProfilerService/Profile")
        while not ended.wait(0.2):
            shutil.rmtree(folder, ignore_errors=True)
            profile(profile_request(folder, duration_ms=200), timeout=60)
            planes = [
                plane
                for path in folder.rglob("*.xplane.pb")
                for plane in jax.profiler.ProfileData.from_file(str(path)).planes
            ]
            wanted = [plane for plane in planes if life.device == "cpu" or plane.name.startswith("/device:GPU")]
            counts.append(sum(1 for plane in wanted for line in plane.lines for _ in line.events))
            life.event("asked", count=counts[-1])  # in a fixed time, so not the same in each

    asking = threading.Thread(target=ask)
    asking.start()
    for number in life.loop(lambda: bits(jax, kept[0]), 200):
        kept[0] = jax.block_until_ready(update(kept[0], data[number % len(data)]))
    ended.set()
    asking.join()
    life.check(all(counts), f"traces through the profiler's port without events: {counts}")


def profile_request(folder: Any, duration_ms: int) -> bytes:
    """A serialised tensorflow.ProfileRequest.

    Its fields: max_events 2, opts 4 (of it host_tracer_level 2, device_tracer_level 3, version 5 and duration_ms 9),
    repository_root 5, session_id 6, host_name 7.
    """

    def number(value: int) -> bytes:
        return bytes([value & 127 | 128]) + number(value >> 7) if value > 127 else bytes([value])

    def part(field: int, content: bytes) -> bytes:
        return number(field << 3 | 2) + number(len(content)) + content

    options = bytes([2 << 3, 2, 3 << 3, 1, 5 << 3, 1, 9 << 3]) + number(duration_ms)
    texts = ((5, str(folder)), (6, "asked"), (7, "local"))
    whole = number(2 << 3) + number(1_000_000) + part(4, options)
    return whole + b"".join(part(field, text.encode()) for field, text in texts)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


PGLE = {"JAX_ENABLE_PGLE": "true", "JAX_PGLE_PROFILING_RUNS": "3"}


@program(graphs=True, environ={**ENVIRON, **PGLE}, deterministic=False)
def jax_auto_pgle(life: Life) -> None:
    """JAX profiles the first runs of every function by itself and compiles it anew by what it saw."""
    jax = jax_of(life)
    state, data = weights_and_data(jax)
    told: list[str] = []
    warnings.showwarning = lambda message, *_: told.append(str(message))
    warnings.simplefilter("always")
    for number in life.loop(lambda: bits(jax, state), 200):
        if number % 200 == 0:
            chain = jax.jit(lambda w, batch, n=number: jax.numpy.tanh(batch @ w["a"]) @ w["b"] + n)
            golden = jax.block_until_ready(chain(state, data[0]))
        found = jax.block_until_ready(chain(state, data[0]))
        life.check(bool(jax.numpy.allclose(found, golden, rtol=1e-5)), "the result is not what it was at first")
    empty = [text for text in told if "empty trace" in text]  # on a CPU it is always empty
    life.check(life.device == "cpu" or not empty, f"{len(empty)} of its own profiles: {empty[:1]}")


def device_events(folder: Any, device: str) -> int:
    """How many events of the device the trace in the folder has; on a CPU all events count."""
    found = 0
    for path in folder.rglob("*.trace.json.gz"):
        events = json.loads(gzip.decompress(path.read_bytes())).get("traceEvents", [])
        names = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
        wanted = {pid for pid, name in names.items() if device == "cpu" or "GPU" in name}
        found += sum(event.get("ph") == "X" and event.get("pid") in wanted for event in events)
    return found
