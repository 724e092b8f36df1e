"""Programs that capture CUDA graphs all the time, in every iteration, and count the captures that they lose.

A lost capture (an error, or a result that is not the expected one) is an event `lost`; the program goes on.
"""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from gpu.zoo.catalog import Program, add, program
from gpu.zoo.life import Life, Skip, Wrong, digest_of, need
from gpu.zoo.programs import jax_programs, other_python
from gpu.zoo.programs.torch_common import batches, bits, mlp, torch_of
from gpu.zoo.programs.torch_graphs import chain, warm_up

MODES = ("global", "thread_local", "relaxed")
STREAMS = ("own", "given", "urgent", "raw")  # own: torch's; raw: capture_begin on a given one, without torch's clean-up
WORKS = ("chain", "training", "memory")
MOST_LOST_IN_A_ROW = 20
FAKE = "KINETO_ZOO_FAKE"  # set: try the logic on the CPU, with a torch.cuda that does nothing


def graphs_torch(life: Life) -> Any:
    """torch, with a GPU or what stands in for one."""
    return torch_of(life, graphs=FAKE not in os.environ)


def counting(life: Life, once: Callable[[], bool], digest: Callable[[], str], every: int = 50) -> None:
    """Calls `once` until the end; whatever it raises, or False, is a lost capture."""
    in_a_row = 0
    for number in life.loop(digest, every):
        what = ""
        try:
            if not once():
                what = "another result"
        except Exception as error:
            what = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        in_a_row = in_a_row + 1 if what else 0
        if what:
            life.event("lost", what=what[:300], iteration=number)
        if in_a_row >= MOST_LOST_IN_A_ROW:
            raise Wrong(f"{in_a_row} captures in a row were lost: {what[:200]}")


def work_of(torch: Any, life: Life, name: str) -> Callable[[], Any]:
    """What is captured: returns the same bits whenever it is run."""
    data = batches(torch, life, 64, 256)
    weight = batches(torch, life, 256, 256)[1] / 16
    if name == "chain":
        return lambda: chain(torch, data[0], weight, 6)
    if name == "memory":  # many allocations of many sizes while it is captured
        return lambda: sum((torch.cat([data[0]] * (1 + k)).tanh().sum(0) for k in range(8)), start=data[1].sum(0))
    model = mlp(torch, life)

    def gradients() -> Any:
        for parameter in model.parameters():
            parameter.grad = None
        (model(data[0]) - data[0]).square().mean().backward()
        return model[0].weight.grad

    return gradients


def capture_again_and_again(life: Life, mode: str, stream_kind: str, work_kind: str) -> None:
    """A new graph in every iteration, replayed once, its result compared with that of the same work without a graph."""
    torch = graphs_torch(life)
    work = work_of(torch, life, work_kind)
    warm_up(torch, work)
    golden = work().clone()
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream(priority=-1 if stream_kind == "urgent" else 0)
    kept: list[tuple[Any, Any]] = []  # the pool lives as long as a graph of it

    def raw(graph: Any) -> Any:
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode=mode)
            try:
                return work()
            finally:
                graph.capture_end()

    def whole(graph: Any) -> Any:
        chosen = None if stream_kind == "own" else stream
        with torch.cuda.graph(graph, pool=pool, stream=chosen, capture_error_mode=mode):
            return work()

    def once() -> bool:
        graph = torch.cuda.CUDAGraph()
        result = raw(graph) if stream_kind == "raw" else whole(graph)
        kept[:] = [*kept[-1:], (graph, result)]
        graph.replay()
        torch.cuda.synchronize()
        return bool(torch.equal(result, golden))

    counting(life, once, lambda: bits(torch, [golden]))


for each_mode, each_stream, each_work in itertools.product(MODES, STREAMS, WORKS):
    add(
        Program(
            name=f"capture_{each_mode}_{each_stream}_{each_work}", graphs=True, by_name=True,
            run=partial(capture_again_and_again, mode=each_mode, stream_kind=each_stream, work_kind=each_work),
        )
    )  # fmt: skip


def beside_a_thread(life: Life, mode: str) -> None:
    """Captures on one thread while another one launches eagerly on a stream of its own."""
    import threading

    torch = graphs_torch(life)
    work = work_of(torch, life, "chain")
    warm_up(torch, work)
    golden, pool, ended = work().clone(), torch.cuda.graph_pool_handle(), threading.Event()
    kept: list[tuple[Any, Any]] = []
    eager, weight = batches(torch, life, 64, 256)[2], batches(torch, life, 256, 256)[3] / 16
    # Made once: torch hands 32 streams out in turn, and the same one must not come to both threads.
    aside, stream = torch.cuda.Stream(), torch.cuda.Stream()

    def launch() -> None:
        with torch.cuda.stream(aside):
            while not ended.is_set():
                chain(torch, eager, weight, 4)

    def once() -> bool:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode=mode)
            try:
                result = work()
            finally:
                graph.capture_end()
            graph.replay()
        stream.synchronize()
        kept[:] = [*kept[-1:], (graph, result)]
        return bool(torch.equal(result, golden))

    thread = threading.Thread(target=launch)
    thread.start()
    try:
        counting(life, once, lambda: bits(torch, [golden]))
    finally:
        ended.set()
        thread.join()


for each_mode in ("thread_local", "relaxed"):
    add(
        Program(
            name=f"capture_{each_mode}_beside_a_thread", graphs=True, by_name=True, deterministic=False,
            run=partial(beside_a_thread, mode=each_mode),
        )
    )  # fmt: skip


@program(graphs=True, by_name=True)
def capture_graphed_callables(life: Life) -> None:
    """make_graphed_callables anew in every iteration: three warm-ups, a forward and a backward graph."""
    torch = graphs_torch(life)
    batch = batches(torch, life, 64, 256)[0]
    model = mlp(torch, life)
    golden = model(batch).detach().clone()
    gc.freeze()
    gc.disable()  # a graph that is freed while another one is captured ends that capture, untouched as well

    def once() -> bool:
        gc.collect()
        graphed = torch.cuda.make_graphed_callables(lambda data: model(data), (batch.clone().requires_grad_(),))
        result = graphed(batch.clone().requires_grad_())
        result.sum().backward()
        model.zero_grad(set_to_none=True)
        return bool(torch.allclose(result, golden, rtol=1e-3, atol=1e-3))

    counting(life, once, lambda: bits(torch, [golden]))


def recompiled(life: Life, every: int, **options: Any) -> None:
    """A small function, compiled anew for a new shape every so many iterations."""
    torch = graphs_torch(life)
    data = [torch.ones(8 * (1 + k), 64, device=life.device) for k in range(8)]
    golden = [torch.tanh(each * 0.5).sum(1) for each in data]
    made: list[Any] = []
    count = itertools.count()

    def once() -> bool:
        number = next(count)
        if number % (8 * every) == 0:
            torch._dynamo.reset()
            made[:] = [torch.compile(lambda value: torch.tanh(value * 0.5).sum(1), dynamic=False, **options)]
        which = number // every % 8
        torch.compiler.cudagraph_mark_step_begin()
        return bool(torch.allclose(made[0](data[which]), golden[which], atol=1e-4))

    counting(life, once, lambda: bits(torch, golden))


add(
    Program(
        name="capture_recompiled", graphs=True, by_name=True, run=partial(recompiled, every=10, mode="reduce-overhead")
    )
)
add(
    Program(
        name="capture_recompiled_cudagraphs",
        graphs=True,
        by_name=True,
        run=partial(recompiled, every=5, backend="cudagraphs"),
    )
)


def captured_by_cupy(life: Life, mode: str) -> None:
    """CuPy captures ten launches in every iteration."""
    cupy, kernel = other_python.cupy_of(life)
    runtime = cupy.cuda.runtime
    modes = {
        "global": runtime.streamCaptureModeGlobal, "thread_local": runtime.streamCaptureModeThreadLocal,
        "relaxed": runtime.streamCaptureModeRelaxed,
    }  # fmt: skip
    stream = cupy.cuda.Stream(non_blocking=True)
    size = other_python.COUNT
    values = cupy.zeros(size, dtype=cupy.uint32)
    cupy.cuda.Device().synchronize()
    expected = other_python.after(0, 10)

    def once() -> bool:
        with stream:
            values.fill(0)
            stream.begin_capture(modes[mode])
            try:
                for _ in range(10):
                    kernel((size // 256,), (256,), (values, cupy.int32(size)))
            finally:
                graph = stream.end_capture()
            graph.launch(stream)
            stream.synchronize()
            return int(values[0]) == expected

    counting(life, once, lambda: digest_of([str(expected).encode()]))


for each_mode in MODES:
    add(
        Program(
            name=f"capture_cupy_{each_mode}", graphs=True, by_name=True, run=partial(captured_by_cupy, mode=each_mode)
        )
    )


def captured_by_jax(life: Life, shapes: int) -> None:
    """New executables, whose command buffers XLA captures, all the time; small ones, so that they compile soon."""
    jax = jax_programs.jax_of(life)
    numpy = need("numpy")
    count = itertools.count()
    made: list[Any] = []

    def function(value: Any) -> Any:
        return jax.numpy.tanh(value @ value.T).sum(1) * 2

    def once() -> bool:
        number = next(count)
        if number % (4 * shapes) == 0:
            jax.clear_caches()
            made[:] = [jax.jit(function)]
        value = numpy.full((16 * (1 + number // 4 % shapes), 16), 0.25, dtype=numpy.float32)
        found = numpy.asarray(made[0](value))
        return bool(numpy.allclose(found, 2 * value.shape[0] * numpy.tanh(1.0), rtol=1e-3))

    counting(life, once, lambda: digest_of([b"jax"]))


COMMAND_BUFFERS = {
    **jax_programs.ENVIRON,
    "XLA_FLAGS": jax_programs.ENVIRON["XLA_FLAGS"]
    + " --xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1",
}
for each_count in (2, 8):
    add(
        Program(
            name=f"capture_jax_{each_count}_shapes", graphs=True, by_name=True, environ=COMMAND_BUFFERS,
            run=partial(captured_by_jax, shapes=each_count),
        )
    )  # fmt: skip
for each_mode in MODES:
    add(Program(name=f"capture_cu_{each_mode}", source="captures", arguments=(each_mode,), graphs=True, by_name=True))


@program(graphs=True, by_name=True)
def capture_triton(life: Life) -> None:
    """A kernel of inductor's, compiled once, in a graph that is captured anew in every iteration."""
    torch = graphs_torch(life)
    if FAKE in os.environ:
        raise Skip("needs a compiler for the GPU")
    data = batches(torch, life, 64, 256)[0]
    compiled = torch.compile(lambda value: torch.tanh(value * 2) + 1)
    warm_up(torch, lambda: compiled(data))
    golden, pool = compiled(data).clone(), torch.cuda.graph_pool_handle()
    kept: list[tuple[Any, Any]] = []

    def once() -> bool:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            result = compiled(data)
        kept[:] = [*kept[-1:], (graph, result)]
        graph.replay()
        torch.cuda.synchronize()
        return bool(torch.equal(result, golden))

    counting(life, once, lambda: bits(torch, [golden]))
