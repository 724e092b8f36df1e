"""Plain torch: eager training and inference."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from typing import Any

from gpu.zoo.catalog import program
from gpu.zoo.life import Life
from gpu.zoo.programs.torch_common import batches, bits, descend, mlp, same, sync, torch_of, train


@program()
def eager_mlp(life: Life) -> None:
    torch = torch_of(life)
    model = mlp(torch, life)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    train(torch, life, model, optimizer, batches(torch, life, 64, 256))


@program()
def eager_conv(life: Life) -> None:
    torch = torch_of(life)
    nn = torch.nn
    layers = [nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.BatchNorm2d(64)]
    model = nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(64 * 8 * 8, 10)).to(life.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    images = batches(torch, life, 32, 3, 32, 32)
    labels = torch.arange(32, device=life.device) % 10

    def loss_of(number: int) -> Any:
        return nn.functional.cross_entropy(model(images[number % len(images)]), labels)

    descend(torch, life, lambda: model.state_dict().values(), optimizer, loss_of)


@program()
def amp_scaler(life: Life) -> None:
    torch = torch_of(life)
    model = mlp(torch, life)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5, foreach=True)
    half = torch.float16 if life.device == "cuda" else torch.bfloat16
    scaler = torch.amp.GradScaler(life.device, enabled=life.device == "cuda")
    data = batches(torch, life, 64, 256)
    for number in life.loop(lambda: bits(torch, model.parameters())):
        batch = data[number % len(data)]
        with torch.autocast(life.device, dtype=half):
            loss = (model(batch).float() - batch).square().mean()
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        sync(torch, life)
        life.check(bool(torch.isfinite(loss)), "the loss is not finite")


@program()
def inference_four_streams(life: Life) -> None:
    torch = torch_of(life)
    models = [mlp(torch, life) for _ in range(4)]
    inputs = batches(torch, life, 64, 256)[:4]
    streams: list[Any] = [torch.cuda.Stream() if life.device == "cuda" else None for _ in range(4)]
    golden: list[Any] = []
    sync(torch, life)

    def infer(number: int) -> Any:
        with torch.no_grad(), torch.cuda.stream(streams[number]):
            found = inputs[number]
            for _ in range(5):
                found = models[number](found)
            if streams[number] is not None:
                streams[number].synchronize()
            if golden:
                same(torch, life, found, golden[number], f"the result of thread {number}")
            return found

    with ThreadPoolExecutor(4) as pool:
        golden += list(pool.map(infer, range(4)))
        for _ in life.loop(lambda: bits(torch, golden), 200):
            list(pool.map(infer, range(4)))


@program()
def data_loader_workers(life: Life) -> None:
    torch = torch_of(life)
    model = mlp(torch, life)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sync(torch, life)
    data = torch.utils.data.TensorDataset(torch.cat([batch.cpu() for batch in batches(torch, life, 64, 256)]))
    loader = torch.utils.data.DataLoader(
        data, batch_size=32, num_workers=2, persistent_workers=True, pin_memory=life.device == "cuda"
    )
    stream = (batch for epoch in cycle([0]) for (batch,) in loader)
    for _ in life.loop(lambda: bits(torch, model.parameters())):
        batch = next(stream).to(life.device, non_blocking=True)
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        life.check(bool(torch.isfinite(loss)), "the loss is not finite")


@program()
def launch_bound_transformer(life: Life) -> None:
    """Some thousand kernels a step, as the loop of tests/bench has."""
    torch = torch_of(life)
    layer = torch.nn.TransformerEncoderLayer(128, 4, 256, dropout=0.1, batch_first=True, norm_first=True)
    model = torch.nn.TransformerEncoder(layer, 8, enable_nested_tensor=False).to(life.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=False)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        train(torch, life, model, optimizer, batches(torch, life, 4, 32, 128), 50)


@program()
def allocator_churn(life: Life) -> None:
    """Memory is taken from and given back to the driver all the time."""
    torch = torch_of(life)
    weights = batches(torch, life, 256, 256)
    golden = None
    for number in life.loop(every=50):
        parts = [torch.ones(1 << (14 + (number + k) % 6), device=life.device) for k in range(4)]
        found = torch.linalg.vector_norm(weights[0] @ weights[1]) + sum(part[0] for part in parts)
        golden = found if golden is None else golden
        same(torch, life, found, golden, "the norm")
        del parts
        if life.device == "cuda" and number % 10 == 0:
            torch.cuda.empty_cache()
