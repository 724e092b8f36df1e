"""What programs of `later` do with torch, on any machine."""

import importlib
import tempfile
from typing import Any, Callable, List

from campaign.attach_targets.later import action

TORCH = ("torch",)


def _torch() -> Any:
    return importlib.import_module("torch")


@action("torch")
def import_torch() -> None:
    print(int(_torch().ones(3).sum()))


@action("torch", TORCH)
def capture_a_graph() -> None:
    """Without a GPU it raises, but not before hooks on it have run."""
    torch = _torch()
    graph = object.__new__(torch.cuda.CUDAGraph)  # its own __new__ and __init__ need a GPU
    try:
        graph.capture_begin()
    except Exception as error:
        print(type(error).__name__)


@action("torch", TORCH)
def graph_contexts() -> None:
    torch = _torch()
    for make in (torch.cuda.CUDAGraph, torch.cuda.graph_pool_handle, torch.cuda.Stream):
        try:
            print(type(make()))
        except Exception as error:
            print(type(error).__name__)


@action("torch", TORCH)
def initialise_cuda() -> None:
    torch = _torch()
    print(torch.cuda.is_available(), torch.cuda.is_initialized())
    try:
        torch.cuda.init()
    except Exception as error:
        print(type(error).__name__)


@action("torch", TORCH)
def compile_eagerly() -> None:
    torch = _torch()
    print(torch.compile(lambda data: (data * 2).sum(), backend="eager")(torch.ones(4)))


@action("torch", TORCH)
def compile_with_inductor() -> None:
    torch = _torch()
    print(torch.compile(lambda data: (data * 2).sum())(torch.ones(4)))


@action("torch", TORCH)
def script() -> None:
    torch = _torch()
    print(torch.jit.trace(lambda data: data * 2 + 1, torch.ones(2))(torch.ones(2)))


def _trained(make: Callable[[Any, Any], Any]) -> None:
    torch = _torch()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = make(torch, model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    print([round(float(each), 6) for each in model.weight.flatten()])


@action("torch", TORCH)
def optimise_by_sgd() -> None:
    _trained(lambda torch, parameters: torch.optim.SGD(parameters, lr=0.1))


@action("torch", TORCH)
def optimise_by_adam() -> None:
    _trained(lambda torch, parameters: torch.optim.Adam(parameters, lr=0.1))


@action("torch", TORCH)
def optimise_by_lbfgs() -> None:
    torch = _torch()
    value = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.LBFGS([value])

    def loss() -> Any:
        optimizer.zero_grad()
        found = (value**2).sum()
        found.backward()
        return found

    print(round(float(optimizer.step(loss)), 4))


@action("torch", TORCH)
def schedule_of_rates() -> None:
    torch = _torch()
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    print(scheduler.get_last_lr())


@action("torch", TORCH)
def profile_with_torch() -> None:
    torch = _torch()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True) as profile:
        torch.ones(4).sum()
    print(sorted(event.key for event in profile.key_averages() if event.key.startswith("aten::")))


@action("torch", TORCH)
def profile_by_schedule() -> None:
    torch = _torch()
    ready: List[int] = []
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=2),
        on_trace_ready=lambda profile: ready.append(len([e for e in profile.events() if e.name == "aten::sum"])),
    ) as profile:
        for _ in range(10):
            torch.ones(4).sum()
            profile.step()
    print(ready)


@action("torch", TORCH)
def profile_with_autograd() -> None:
    torch = _torch()
    with torch.autograd.profiler.profile() as profile, torch.profiler.record_function("own"):
        torch.ones(4).sum()
    print(any(event.name == "own" for event in profile.function_events))


@action("torch", TORCH)
def process_group() -> None:
    torch = _torch()
    import torch.distributed as distributed

    with tempfile.TemporaryDirectory() as folder:
        distributed.init_process_group("gloo", init_method="file://%s/store" % folder, rank=0, world_size=1)
        data = torch.ones(3)
        distributed.all_reduce(data)
        distributed.barrier()
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
        model(data).sum().backward()
        print(data, distributed.get_world_size())
        distributed.destroy_process_group()


def _loaded(workers: int, **options: Any) -> None:
    torch = _torch()
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=workers, **options)
    print([float(batch.sum()) for (batch,) in loader])


@action("torch", TORCH)
def load_data_by_forks() -> None:
    _loaded(2)


@action("torch", TORCH)
def load_data_by_spawning() -> None:
    _loaded(2, multiprocessing_context="spawn", persistent_workers=False)


@action("torch", TORCH)
def own_function() -> None:
    torch = _torch()

    class Double(torch.autograd.Function):  # type: ignore[misc,name-defined]
        """Twice its input."""

        @staticmethod
        def forward(_context: Any, data: Any) -> Any:
            return data * 2

        @staticmethod
        def backward(_context: Any, gradient: Any) -> Any:
            return gradient * 2

    value = torch.ones(2, requires_grad=True)
    Double.apply(value).sum().backward()
    print(value.grad)


@action("torch", TORCH)
def dispatch_modes() -> None:
    torch = _torch()
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: List[str] = []

    class Mode(TorchDispatchMode):  # type: ignore[misc]
        """Notes operators."""

        def __torch_dispatch__(self, function: Any, _types: Any, arguments: Any = (), options: Any = None) -> Any:
            seen.append(str(function))
            return function(*arguments, **(options or {}))

    with Mode():
        torch.ones(2).sum()
    print(seen)


@action("torch", TORCH)
def module_hooks() -> None:
    torch = _torch()
    seen: List[str] = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: seen.append("hook"))
    torch.nn.Linear(2, 2)(torch.ones(2))
    handle.remove()
    print(seen, len(torch.nn.modules.module._global_forward_hooks))


@action("torch", TORCH)
def train_in_a_thread() -> None:
    import threading

    thread = threading.Thread(target=optimise_by_sgd)
    thread.start()
    thread.join()
