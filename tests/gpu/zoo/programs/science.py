"""Libraries on top of torch and JAX: graph networks, Gaussian processes, adapters, probabilistic programs, solvers."""

from __future__ import annotations

from typing import Any

from gpu.zoo.catalog import program
from gpu.zoo.life import Life, need
from gpu.zoo.programs.jax_programs import ENVIRON, jax_of
from gpu.zoo.programs.jax_programs import bits as jax_bits
from gpu.zoo.programs.torch_common import batches, bits, descend, same, sync, torch_of


@program(deterministic=False)
def geometric_network(life: Life) -> None:
    """torch-geometric: two layers of graph convolution, whose atomic additions give other bits in every run."""
    torch, geometric = torch_of(life), need("torch_geometric.nn")
    generator = torch.Generator().manual_seed(4)
    edges = torch.randint(0, 1000, (2, 8000), generator=generator).to(life.device)
    nodes, wanted = batches(torch, life, 1000, 64)[:2]
    first, second = (geometric.GCNConv(64, 64).to(life.device) for _ in range(2))
    model = torch.nn.ModuleList([first, second])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss_of(_: int) -> Any:
        return (second(first(nodes, edges).relu(), edges) - wanted).square().mean()

    descend(torch, life, model.parameters, optimizer, loss_of)


@program(deterministic=False)
def gaussian_process(life: Life) -> None:
    """gpytorch: exact inference."""
    torch, gpytorch = torch_of(life), need("gpytorch")
    places = torch.linspace(0, 1, 200, device=life.device)
    values = torch.sin(places * 6)

    class Exact(gpytorch.models.ExactGP):  # type: ignore[misc,name-defined]  # whatever gpytorch has
        """A constant mean and a smooth kernel."""

        def __init__(self) -> None:
            super().__init__(places, values, gpytorch.likelihoods.GaussianLikelihood())
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: Any) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    model = Exact().to(life.device)
    model.train()
    marginal = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    descend(torch, life, model.parameters, optimizer, lambda _: -marginal(model(places), values))


@program()
def peft_adapter(life: Life) -> None:
    """peft: LoRA of a small GPT-2."""
    torch, transformers, peft = torch_of(life), need("transformers"), need("peft")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=2, vocab_size=256, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    config._attn_implementation = "eager"
    wanted = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0)
    model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), wanted).to(life.device)
    tokens = torch.randint(0, 256, (16, 8, 64), generator=torch.Generator().manual_seed(2)).to(life.device)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)

    def loss_of(number: int) -> Any:
        batch = tokens[number % len(tokens)]
        return model(input_ids=batch, labels=batch).loss

    descend(torch, life, lambda: trained, optimizer, loss_of)


@program()
def resnet_channels_last(life: Life) -> None:
    """torchvision's ResNet-18 in bfloat16 and channels_last, prefetching on a stream of its own."""
    torch, torchvision = torch_of(life), need("torchvision")
    model = torchvision.models.resnet18(num_classes=10).to(life.device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    images = [one.cpu() for one in batches(torch, life, 8, 3, 64, 64)[:4]]
    labels = torch.arange(8, device=life.device)

    def loss_of(number: int) -> Any:
        batch = images[number % 4].to(life.device, non_blocking=True, memory_format=torch.channels_last)
        with torch.autocast(life.device, torch.bfloat16):
            return torch.nn.functional.cross_entropy(model(batch), labels)

    descend(torch, life, model.parameters, optimizer, loss_of, 50)


@program()
def function_transforms(life: Life) -> None:
    """torch.func: gradients per example by vmap of grad, twice differentiated."""
    torch = torch_of(life)
    weights, data = batches(torch, life, 32, 32)[0], batches(torch, life, 64, 32)

    def energy(matrix: Any, row: Any) -> Any:
        return torch.tanh(row @ matrix).square().sum()

    per_example = torch.func.vmap(torch.func.grad(energy), in_dims=(None, 0))
    curvature = torch.func.vmap(torch.func.hessian(lambda row: energy(weights, row)))
    golden = curvature(data[0][:4]).clone()
    kept = [weights]
    for number in life.loop(lambda: bits(torch, kept)):
        kept[0] = kept[0] - 1e-3 * per_example(kept[0], data[number % len(data)]).mean(0)
        same(torch, life, curvature(data[0][:4]), golden, "the curvature")
        sync(torch, life)


@program()
def ahead_of_time_package(life: Life) -> None:
    """A model compiled by AOTInductor into a library of its own, run without torch's Python dispatch."""
    torch = torch_of(life)
    data = batches(torch, life, 32, 128)
    net = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.GELU(), torch.nn.Linear(256, 128)).to(life.device)
    exported = torch.export.export(net.eval(), (data[0],))
    path = torch._inductor.aoti_compile_and_package(exported, package_path=str(life.folder / "model.pt2"))
    package = torch._inductor.aoti_load_package(path)
    golden = package(data[0]).clone()
    for _ in life.loop(lambda: bits(torch, [golden]), 500):
        same(torch, life, package(data[0]), golden, "the result")


@program(graphs=True, environ=ENVIRON)
def flax_training(life: Life) -> None:
    """flax and optax."""
    jax, flax, optax = jax_of(life), need("flax.linen"), need("optax")
    model = flax.Sequential([flax.Dense(256), flax.gelu, flax.LayerNorm(), flax.Dense(64)])
    data = [jax.random.normal(key, (32, 64)) for key in jax.random.split(jax.random.PRNGKey(0), 8)]
    weights = model.init(jax.random.PRNGKey(1), data[0])
    optimizer = optax.adamw(1e-3)

    def loss(found: Any, batch: Any) -> Any:
        return ((model.apply(found, batch) - batch) ** 2).mean()

    @jax.jit  # type: ignore[untyped-decorator]  # jax has no types here
    def step(found: Any, state: Any, batch: Any) -> Any:
        updates, new = optimizer.update(jax.grad(loss)(found, batch), state, found)
        return optax.apply_updates(found, updates), new

    kept = [step(weights, optimizer.init(weights), data[0])]
    for number in life.loop(lambda: jax_bits(jax, kept[0][0]), 200):
        kept[0] = jax.block_until_ready(step(*kept[0], data[number % len(data)]))


@program(graphs=True, environ=ENVIRON, deterministic=False)
def numpyro_sampler(life: Life) -> None:
    """numpyro: NUTS, whose loops depend on data; a chain after the other."""
    jax, numpyro, infer = jax_of(life), need("numpyro"), need("numpyro.infer")
    seen = jax.random.normal(jax.random.PRNGKey(2), (200,)) + 3

    def model(values: Any) -> None:
        mean = numpyro.sample("mean", numpyro.distributions.Normal(0, 10))
        numpyro.sample("seen", numpyro.distributions.Normal(mean, 1), obs=values)

    sampler = infer.MCMC(infer.NUTS(model), num_warmup=50, num_samples=50, progress_bar=False)
    sampler.run(jax.random.PRNGKey(3), seen)
    for number in life.loop():
        sampler.run(jax.random.PRNGKey(number), seen)
        mean = float(sampler.get_samples()["mean"].mean())
        life.check(abs(mean - float(seen.mean())) < 1, f"the mean is {mean}")


@program(graphs=True, environ=ENVIRON)
def differential_equation(life: Life) -> None:
    """diffrax: an adaptive solver, a while loop on the device."""
    jax, diffrax = jax_of(life), need("diffrax")
    matrix = -jax.numpy.eye(32) + 0.1 * jax.random.normal(jax.random.PRNGKey(0), (32, 32))
    term = diffrax.ODETerm(lambda t, y, args: matrix @ y)

    @jax.jit  # type: ignore[untyped-decorator]  # jax has no types here
    def solve(start: Any) -> Any:
        control = diffrax.PIDController(rtol=1e-5, atol=1e-5)
        return diffrax.diffeqsolve(term, diffrax.Tsit5(), 0.0, 1.0, 0.01, start, stepsize_controller=control).ys

    golden = jax.block_until_ready(solve(jax.numpy.ones(32)))
    for _ in life.loop(lambda: jax_bits(jax, golden)):
        life.check(bool((solve(jax.numpy.ones(32)) == golden).all()), "the solution is not what it was at first")
