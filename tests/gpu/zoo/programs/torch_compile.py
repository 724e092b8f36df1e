"""torch.compile in its modes."""

from __future__ import annotations

from typing import Any

from gpu.zoo.catalog import program
from gpu.zoo.life import Life
from gpu.zoo.programs.torch_common import batches, bits, mlp, same, sync, torch_of, train


def mark(torch: Any) -> None:
    """A new run of cudagraph trees: results of the last one may be overwritten."""
    torch.compiler.cudagraph_mark_step_begin()


@program()
def compile_default(life: Life) -> None:
    torch = torch_of(life)
    model = mlp(torch, life)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    train_compiled(torch, life, model, torch.compile(model), optimizer)


@program(graphs=True)
def compile_reduce_overhead(life: Life) -> None:
    torch = torch_of(life)
    model = mlp(torch, life)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    train_compiled(torch, life, model, torch.compile(model, mode="reduce-overhead"), optimizer)


@program(graphs=True)
def compile_whole_step(life: Life) -> None:
    """Forward, backward and optimizer compiled with CUDA graphs."""
    torch = torch_of(life)
    model = mlp(torch, life)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=torch.tensor(1e-4, device=life.device), capturable=life.device == "cuda"
    )
    step = torch.compile(optimizer.step, mode="reduce-overhead")

    class Stepped:
        """The optimizer with its compiled step."""

        def __init__(self) -> None:
            self.zero_grad, self.step = optimizer.zero_grad, step

    train_compiled(torch, life, model, torch.compile(model, mode="reduce-overhead"), Stepped())


def train_compiled(torch: Any, life: Life, model: Any, compiled: Any, optimizer: Any) -> None:
    """As `train`, with a compiled forward; warm before it says that it is ready."""
    data = batches(torch, life, 64, 256)
    for number in range(6):
        one_step(torch, compiled, optimizer, data[number])
    sync(torch, life)
    for number in life.loop(lambda: bits(torch, model.parameters()), 200):
        loss = one_step(torch, compiled, optimizer, data[number % len(data)])
        life.check(bool(torch.isfinite(loss)), "the loss is not finite")


def one_step(torch: Any, compiled: Any, optimizer: Any, batch: Any) -> Any:
    """One training step."""
    optimizer.zero_grad(set_to_none=True)
    mark(torch)
    loss = (compiled(batch) - batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


@program(graphs=True, deterministic=False)
def compile_max_autotune(life: Life) -> None:
    """Inference; which kernels are chosen may differ from process to process, the results of one process may not."""
    torch = torch_of(life)
    model = mlp(torch, life, 128)
    compiled = torch.compile(model, mode="max-autotune")
    golden_loop(torch, life, compiled, batches(torch, life, 64, 128)[:1])


@program(graphs=True)
def trees_shapes(life: Life) -> None:
    """cudagraph trees with a graph for each of four shapes."""
    torch = torch_of(life)
    compiled = torch.compile(mlp(torch, life), mode="reduce-overhead", dynamic=False)
    golden_loop(torch, life, compiled, [batches(torch, life, rows, 256)[0] for rows in (4, 8, 12, 16)])


@program(graphs=True)
def trees_branches(life: Life) -> None:
    """cudagraph trees whose second graph depends on a branch in Python."""
    torch = torch_of(life)
    first, left, right = (mlp(torch, life) for _ in range(3))
    head = torch.compile(first, mode="reduce-overhead")
    tails = [torch.compile(tail, mode="reduce-overhead") for tail in (left, right)]

    def run(batch: Any) -> Any:
        return tails[int(batch[0, 0] > 0)](head(batch))

    golden_loop(torch, life, run, batches(torch, life, 16, 256)[:6])


def golden_loop(torch: Any, life: Life, compiled: Any, inputs: list[Any]) -> None:
    """Inference of the inputs in turn; every result must have the bits of the first."""
    golden: list[Any] = []
    with torch.no_grad():
        for _ in range(4):
            golden = []
            for one in inputs:
                mark(torch)
                golden.append(compiled(one).clone())
        sync(torch, life)
        for number in life.loop(lambda: bits(torch, golden), 500):
            mark(torch)
            found = compiled(inputs[number % len(inputs)])
            same(torch, life, found, golden[number % len(inputs)], "the result")


@program()
def compile_attention(life: Life) -> None:
    """A compiled training of a transformer layer."""
    torch = torch_of(life)
    layer = torch.nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0, batch_first=True)
    model = torch.nn.Sequential(layer, torch.nn.Linear(64, 64)).to(life.device)
    compiled = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = batches(torch, life, 4, 16, 64)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        one_step(torch, compiled, optimizer, data[0])
        train(torch, life, compiled, optimizer, data)
