"""What people train and serve with: Hugging Face, Lightning, accelerate, timm, a diffusion model."""

from __future__ import annotations

from typing import Any

from gpu.zoo.catalog import program
from gpu.zoo.life import Life, need
from gpu.zoo.programs.torch_common import batches, bits, mlp, same, sync, torch_of


@program()
def hf_trainer(life: Life) -> None:
    torch, transformers = torch_of(life), need("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=256, n_positions=64)
    config._attn_implementation = "eager"
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(0, 256, (64, 64), generator=torch.Generator().manual_seed(2))
    examples = [{"input_ids": row, "labels": row} for row in tokens]

    class Ticks(transformers.TrainerCallback):  # type: ignore[misc,name-defined]  # whatever transformers has
        """Every step is an iteration."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            life.ready()

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            sync(torch, life)
            control.should_training_stop = not life.tick(lambda: bits(torch, model.parameters()), 50)

    arguments = transformers.TrainingArguments(
        output_dir=str(life.folder / "trainer"), max_steps=10_000_000, per_device_train_batch_size=8, report_to=[],
        save_strategy="no", logging_strategy="no", disable_tqdm=True, seed=0, use_cpu=life.device == "cpu",
        learning_rate=1e-5,
    )  # fmt: skip
    transformers.Trainer(model=model, args=arguments, train_dataset=examples, callbacks=[Ticks()]).train()


def llama(life: Life, torch: Any) -> tuple[Any, Any]:
    """A tiny language model and a prompt."""
    transformers = need("transformers")
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(life.device).eval()
    return model, torch.randint(2, 256, (2, 8), generator=torch.Generator().manual_seed(3)).to(life.device)


@program(graphs=True)
def llm_decode_static_cache(life: Life) -> None:
    """Greedy decoding with a static cache, which transformers compiles with CUDA graphs."""
    torch = torch_of(life)
    decode(torch, life, cache_implementation="static")


@program()
def llm_decode_eager(life: Life) -> None:
    torch = torch_of(life)
    decode(torch, life)


def decode(torch: Any, life: Life, **options: Any) -> None:
    """The same answer to the same prompt again and again."""
    model, prompt = llama(life, torch)

    def answer() -> Any:
        return model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, min_new_tokens=24, do_sample=False,
            pad_token_id=0, **options,
        )  # fmt: skip

    for _ in range(3):
        golden = answer()
    for _ in life.loop(lambda: bits(torch, [golden]), 50):
        same(torch, life, answer(), golden, "the answer")


@program(graphs=True)
def llm_decode_own_graph(life: Life) -> None:
    """A decoding loop of matrix products over a cache, each token one replay of a graph."""
    torch = torch_of(life, graphs=True)
    width, length = 128, 32
    weights = [batch / width**0.5 for batch in batches(torch, life, width, width)[:4]]
    keys, values = (torch.zeros(length, width, device=life.device) for _ in range(2))
    state, place = torch.ones(1, width, device=life.device), torch.zeros(1, dtype=torch.long, device=life.device)
    many = torch.arange(length, device=life.device)

    def token() -> None:
        query = state @ weights[0]
        here = (many == place)[:, None]
        keys.copy_(torch.where(here, state @ weights[1], keys))
        values.copy_(torch.where(here, state @ weights[2], values))
        scores = (query @ keys.T).masked_fill(many > place, float("-inf"))
        state.copy_(torch.tanh(torch.softmax(scores, -1) @ values @ weights[3]))
        place.add_(1)

    def begin() -> None:
        for one, value in ((keys, 0), (values, 0), (state, 1), (place, 0)):
            one.fill_(value)

    begin()
    token()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token()
    golden = None
    for _ in life.loop(every=500):
        begin()
        for _ in range(length):
            graph.replay()
        golden = state.clone() if golden is None else golden
        same(torch, life, state, golden, "the last state")


@program()
def lightning_trainer(life: Life) -> None:
    torch, lightning = torch_of(life), need("lightning")
    data = batches(torch, life, 64, 256)
    network = mlp(torch, life)

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]  # whatever lightning has
        """Regression of the data onto itself."""

        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def training_step(self, batch: Any, number: int) -> Any:
            return (self.network(batch) - batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

        def on_train_start(self) -> None:
            life.ready()

        def on_train_batch_end(self, outputs: Any, batch: Any, number: int) -> None:
            sync(torch, life)
            self.trainer.should_stop = not life.tick(lambda: bits(torch, network.parameters()))

    loader = torch.utils.data.DataLoader([batch.cpu() for batch in data] * 100, batch_size=None)
    trainer = lightning.Trainer(
        accelerator="gpu" if life.device == "cuda" else "cpu", devices=1, max_epochs=-1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=str(life.folder),
    )  # fmt: skip
    trainer.fit(Module(), loader)


@program()
def accelerate_loop(life: Life) -> None:
    torch, accelerate = torch_of(life), need("accelerate")
    accelerator = accelerate.Accelerator(cpu=life.device == "cpu")
    model = mlp(torch, life)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    data = batches(torch, life, 64, 256)
    for number in life.loop(lambda: bits(torch, model.parameters())):
        batch = data[number % len(data)]
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        life.check(bool(torch.isfinite(loss)), "the loss is not finite")


def vision(life: Life, mode: str) -> None:
    """Training of a small vision transformer."""
    torch, timm = torch_of(life), need("timm")
    timm.layers.set_fused_attn(False)  # whose backward adds in any order
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, num_classes=10, img_size=64).to(life.device)
    compiled = torch.compile(model, mode=mode) if mode else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    images, labels = batches(torch, life, 8, 3, 64, 64), torch.arange(8, device=life.device)

    def step(number: int) -> Any:
        optimizer.zero_grad(set_to_none=True)
        if mode:
            torch.compiler.cudagraph_mark_step_begin()
        loss = torch.nn.functional.cross_entropy(compiled(images[number % len(images)]), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    for number in range(5):
        step(number)
    for number in life.loop(lambda: bits(torch, model.parameters()), 50):
        life.check(bool(torch.isfinite(step(number))), "the loss is not finite")


@program()
def timm_vit_eager(life: Life) -> None:
    vision(life, "")


@program(graphs=True)
def timm_vit_reduce_overhead(life: Life) -> None:
    vision(life, "reduce-overhead")


@program()
def diffusion_unet(life: Life) -> None:
    """Eight denoising steps of a small UNet; every picture must be the first one."""
    torch = torch_of(life)
    nn = torch.nn

    def block(narrow: int, wide: int) -> Any:
        layers = [nn.GroupNorm(4, narrow), nn.SiLU(), nn.Conv2d(narrow, wide, 3, 1, 1)]
        return nn.Sequential(*layers, nn.GroupNorm(4, wide), nn.SiLU(), nn.Conv2d(wide, wide, 3, 1, 1)).to(life.device)

    into, out = nn.Conv2d(4, 32, 3, 1, 1).to(life.device), nn.Conv2d(32, 4, 3, 1, 1).to(life.device)
    down, low, up = block(32, 64), block(64, 64), block(96, 32)
    times = nn.Sequential(nn.Linear(1, 64), nn.SiLU(), nn.Linear(64, 64)).to(life.device)
    noise = batches(torch, life, 2, 4, 32, 32)[0]
    steps = torch.linspace(1, 0, 8, device=life.device)

    def denoised() -> Any:
        picture = noise
        for now in steps:
            high = into(picture)
            deep = down(nn.functional.avg_pool2d(high, 2)) + times(now.view(1, 1))[:, :, None, None]
            deep = nn.functional.interpolate(low(deep), scale_factor=2.0, mode="nearest")
            picture = picture - 0.1 * out(up(torch.cat([high, deep], 1)))
        return picture

    with torch.no_grad():
        golden = denoised()
        for _ in life.loop(lambda: bits(torch, [golden])):
            same(torch, life, denoised(), golden, "the picture")


@program(deterministic=False)
def gradient_checkpointing(life: Life) -> None:
    """Checkpointed layers and anomaly detection, as people debug with."""
    torch = torch_of(life)
    checkpoint = torch.utils.checkpoint.checkpoint
    layers = [mlp(torch, life) for _ in range(3)]
    data = batches(torch, life, 32, 256)
    golden = None
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        for _ in life.loop(every=100):
            found = data[0].clone().requires_grad_()
            result = found
            for layer in layers:
                result = checkpoint(layer, result, use_reentrant=False)
            result.square().sum().backward()
            golden = found.grad.clone() if golden is None else golden
            same(torch, life, found.grad, golden, "the gradient")
