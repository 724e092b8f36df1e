"""CUDA graphs made by hand with torch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gpu.zoo.catalog import program
from gpu.zoo.life import Life
from gpu.zoo.programs.torch_common import batches, bits, mlp, same, torch_of


def warm_up(torch: Any, work: Any) -> None:
    """Three times on a stream of its own, as torch's documentation wants it before a capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()


def chain(torch: Any, found: Any, weight: Any, length: int = 10) -> Any:
    """Matrix products and tanh in turn."""
    for _ in range(length):
        found = torch.tanh(found @ weight)
    return found


def captured(torch: Any, work: Any, pool: Any = None) -> tuple[Any, Any]:
    """A graph of `work` and what it returned."""
    warm_up(torch, work)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = work()
    return graph, result


@program(graphs=True)
def graph_step(life: Life) -> None:
    """A whole training step in one graph."""
    torch = torch_of(life, graphs=True)
    model = mlp(torch, life)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=True)
    data = batches(torch, life, 64, 256)
    static = data[0].clone()

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        loss = (model(static) - static).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    graph, loss = captured(torch, step)
    for number in life.loop(lambda: bits(torch, model.parameters()), 200):
        static.copy_(data[number % len(data)])
        graph.replay()
        life.check(bool(torch.isfinite(loss)), "the loss is not finite")


@program(graphs=True)
def graphs_eight(life: Life) -> None:
    """Eight graphs in turn."""
    torch = torch_of(life, graphs=True)
    data = batches(torch, life, 256, 256)
    weights = [data[number] / 16 for number in range(8)]  # the graphs read them for as long as they are replayed
    pairs = []
    for number, weight in enumerate(weights):
        start = data[number + 8]
        pairs.append(captured(torch, lambda w=weight, s=start, n=number: chain(torch, s, w, 4 + n)))
    golden = []
    for graph, result in pairs:
        graph.replay()
        golden.append(result.clone())
    for number in life.loop(lambda: bits(torch, golden), 500):
        graph, result = pairs[number % 8]
        for _ in range(4):
            graph.replay()
        same(torch, life, result, golden[number % 8], f"the result of graph {number % 8}")


@program(graphs=True)
def graph_small(life: Life) -> None:
    """Ten times matmul + tanh."""
    torch = torch_of(life, graphs=True)
    data = batches(torch, life, 128, 128)
    graph, result = captured(torch, lambda: chain(torch, data[0], data[1] / 12))
    graph.replay()
    golden = result.clone()
    for _ in life.loop(lambda: bits(torch, [golden]), 500):
        for _ in range(10):
            graph.replay()
        same(torch, life, result, golden, "the result")


@program(graphs=True)
def graphed_callables(life: Life) -> None:
    torch = torch_of(life, graphs=True)
    data = batches(torch, life, 64, 256)
    model = torch.cuda.make_graphed_callables(mlp(torch, life), (data[0].clone().requires_grad_(),))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for number in life.loop(lambda: bits(torch, model.parameters()), 200):
        batch = data[number % len(data)].clone().requires_grad_()
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        life.check(bool(torch.isfinite(loss)), "the loss is not finite")


@program(graphs=True)
def graph_eager_optimizer(life: Life) -> None:
    """Forward and backward in a graph, clipping and the optimizer eager."""
    torch = torch_of(life, graphs=True)
    model = mlp(torch, life)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = batches(torch, life, 64, 256)
    static = data[0].clone()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def gradients() -> Any:
        for parameter in model.parameters():
            parameter.grad.zero_()
        loss = (model(static) - static).square().mean()
        loss.backward()
        return loss

    graph, loss = captured(torch, gradients)
    for number in life.loop(lambda: bits(torch, model.parameters()), 200):
        static.copy_(data[number % len(data)])
        graph.replay()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        life.check(bool(torch.isfinite(loss)), "the loss is not finite")


@program(graphs=True)
def graphs_churn(life: Life) -> None:
    """Graphs are made and destroyed all the time."""
    torch = torch_of(life, graphs=True)
    data = batches(torch, life, 128, 128)
    weight = data[1] / 12
    golden = chain(torch, data[0], weight)
    torch.cuda.synchronize()
    kept: list[tuple[Any, Any]] = []
    for _ in life.loop(lambda: bits(torch, [golden]), 50):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = chain(torch, data[0], weight)
        kept = [*kept[-3:], (graph, result)]
        for graph, result in kept:
            graph.replay()
            same(torch, life, result, golden, "the result of a graph")


@program(graphs=True)
def graph_recaptured(life: Life) -> None:
    """One graph object, captured anew every fifty iterations."""
    torch = torch_of(life, graphs=True)
    data = batches(torch, life, 128, 128)
    weight, graph = data[1] / 12, torch.cuda.CUDAGraph()
    golden = [chain(torch, data[0], weight, 2 + length) for length in range(8)]
    torch.cuda.synchronize()
    result = None
    for number in life.loop(lambda: bits(torch, golden), 500):
        length = number // 50 % 8
        if number % 50 == 0:
            result = None
            graph.reset()
            with torch.cuda.graph(graph):
                result = chain(torch, data[0], weight, 2 + length)
        for _ in range(5):
            graph.replay()
        same(torch, life, result, golden[length], "the result")


@program(graphs=True)
def graphs_two_threads(life: Life) -> None:
    """Two threads replay their graphs on streams of their own, and eager work goes on beside them."""
    torch = torch_of(life, graphs=True)
    data = batches(torch, life, 128, 128)
    pairs = [captured(torch, lambda k=k: chain(torch, data[k], data[k + 4] / 12)) for k in range(2)]
    streams = [torch.cuda.Stream() for _ in pairs]
    golden: list[Any] = []
    eager = chain(torch, data[2], data[6] / 12)

    def replay(number: int) -> Any:
        graph, result = pairs[number]
        with torch.cuda.stream(streams[number]):
            for _ in range(5):
                graph.replay()
            streams[number].synchronize()
            if golden:
                same(torch, life, result, golden[number], f"the result of thread {number}")
            return result.clone()

    with ThreadPoolExecutor(2) as pool:
        golden += list(pool.map(replay, range(2)))
        torch.cuda.synchronize()
        for _ in life.loop(lambda: bits(torch, golden), 200):
            both = pool.map(replay, range(2))
            same(torch, life, chain(torch, data[2], data[6] / 12), eager, "the eager result")
            list(both)


@program(graphs=True)
def graphs_shared_pool(life: Life) -> None:
    """Three graphs that share memory, replayed in their order."""
    torch = torch_of(life, graphs=True)
    data = batches(torch, life, 128, 128)
    pool = torch.cuda.graph_pool_handle()
    static = data[0].clone()
    first, middle = captured(torch, lambda: chain(torch, static, data[1] / 12), pool)
    second, nearly = captured(torch, lambda: chain(torch, middle, data[2] / 12), pool)
    third, result = captured(torch, lambda: chain(torch, nearly, data[3] / 12), pool)

    def replay() -> None:
        for graph in (first, second, third):
            graph.replay()

    replay()
    golden = result.clone()
    for _ in life.loop(lambda: bits(torch, [golden]), 500):
        replay()
        same(torch, life, result, golden, "the result of the three")
