import gc
import importlib
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable, Iterator, List

import pytest
from kineto_agent.steps import RING_ITERATIONS, OptimizerHook, StepCounter, median_ns


class Optimizer:
    """Stands for any optimizer: the hook only looks at its identity."""


class Clock:
    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        self.now_ns += 10
        return self.now_ns


def optimizer_step(counter: StepCounter, optimizer: object) -> None:
    counter.on_optimizer_step(optimizer, (), {})


def test_a_process_that_never_stepped_counts_minus_one() -> None:
    assert StepCounter().count == -1


def test_each_step_of_one_optimizer_is_an_iteration() -> None:
    counter, optimizer = StepCounter(), Optimizer()
    for _ in range(5):
        optimizer_step(counter, optimizer)
    assert counter.count == 5


def test_two_optimizers_in_a_loop_make_one_iteration() -> None:
    counter, first, second = StepCounter(), Optimizer(), Optimizer()
    for _ in range(5):
        optimizer_step(counter, first)
        optimizer_step(counter, second)
    assert counter.count == 5


def test_the_busiest_optimizer_counts() -> None:
    counter, often, seldom = StepCounter(), Optimizer(), Optimizer()
    for _ in range(4):
        for _ in range(3):
            optimizer_step(counter, often)
        optimizer_step(counter, seldom)
    assert counter.count == 12


def test_an_optimizer_that_replaces_another_goes_on_counting() -> None:
    counter = StepCounter()
    first = Optimizer()
    for _ in range(5):
        optimizer_step(counter, first)
    del first
    gc.collect()
    second = Optimizer()
    for _ in range(3):
        optimizer_step(counter, second)
    assert counter.count == 7  # its first step joined iteration 5
    assert len(counter._optimizers) == 1


def test_optimizers_are_not_kept_alive() -> None:
    counter, alive = StepCounter(), []
    for number in range(1000):
        optimizer = Optimizer()
        if number % 100 == 0:
            alive.append(optimizer)
        optimizer_step(counter, optimizer)
    del optimizer
    assert len(counter._optimizers) == 10


def test_an_optimizer_without_weak_references_is_left_out() -> None:
    counter = StepCounter()
    optimizer_step(counter, 5)
    assert counter.count == -1


def test_the_programs_own_steps_win() -> None:
    counter, optimizer = StepCounter(), Optimizer()
    optimizer_step(counter, optimizer)
    counter.step()
    for _ in range(5):
        optimizer_step(counter, optimizer)
    assert counter.count == 2


def test_an_awaited_iteration_wakes_once() -> None:
    counter, woken = StepCounter(), []
    counter.step()
    assert counter.watch(3, lambda: woken.append(counter.count)) is False
    for _ in range(5):
        counter.step()
    assert woken == [3]


def test_an_iteration_that_has_begun_is_said_at_once() -> None:
    counter = StepCounter()
    counter.step()
    assert counter.watch(1) is True


def test_nobody_is_woken_after_the_watch_ended() -> None:
    counter, woken = StepCounter(), []
    counter.watch(2, lambda: woken.append(1))
    counter.watch(None)
    for _ in range(5):
        counter.step()
    assert woken == []


def test_the_ring_knows_when_recent_iterations_began() -> None:
    counter = StepCounter(Clock())
    for _ in range(RING_ITERATIONS + 100):
        counter.step()
    assert counter.time_of(RING_ITERATIONS + 100) == 10 * (RING_ITERATIONS + 100)
    assert counter.time_of(200) == 2000
    assert counter.time_of(50) == 0
    assert counter.time_of(RING_ITERATIONS + 101) == 0
    assert counter.time_of(-1) == 0


def test_durations_are_those_of_iterations_inside_the_window() -> None:
    times = iter([100, 110, 130, 160, 200, 250])
    counter = StepCounter(lambda: next(times))
    for _ in range(6):
        counter.step()
    assert counter.durations_ns(0, 1000) == [10, 20, 30, 40, 50]
    assert counter.durations_ns(110, 200) == [20, 30, 40]


@pytest.mark.parametrize(("values", "median"), [([], 0), ([5, 6], 0), ([9, 1, 5], 5), ([4, 1, 2, 3], 3)])
def test_the_median_of_too_few_is_none(values: List[int], median: int) -> None:
    assert median_ns(values) == median


# ---------------------------------------------------------------- a stand-in for torch on the disk

FAKE_OPTIMIZER = """
HOOKS = []
class Handle:
    def __init__(self, hook): self.hook = hook
    def remove(self): HOOKS.remove(self.hook)
def register_optimizer_step_post_hook(hook):
    HOOKS.append(hook)
    return Handle(hook)
"""


@pytest.fixture
def fake_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    def write(source: str) -> None:
        (tmp_path / "torch" / "optim").mkdir(parents=True, exist_ok=True)
        (tmp_path / "torch" / "__init__.py").write_text("__version__ = '9.9'\n")
        (tmp_path / "torch" / "optim" / "__init__.py").write_text("")
        (tmp_path / "torch" / "optim" / "optimizer.py").write_text(source)

    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "torch"}
    meta_path = list(sys.meta_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield write
    assert sys.meta_path == meta_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        del sys.modules[name]
    sys.modules.update(kept)


def import_optimizer() -> Any:
    return importlib.import_module("torch.optim.optimizer")


def test_torch_is_hooked_when_it_is_imported_later(fake_torch: Callable[[str], None]) -> None:
    fake_torch(FAKE_OPTIMIZER)
    counter = StepCounter()
    hook = OptimizerHook(counter)
    hook.install()
    hook.install()
    module = import_optimizer()
    assert [counter.on_optimizer_step] == module.HOOKS
    assert type(sys.meta_path[0]).__name__ != "_OptimizerFinder"
    hook.remove()
    assert module.HOOKS == []


def test_torch_is_hooked_when_it_is_there_already(fake_torch: Callable[[str], None]) -> None:
    fake_torch(FAKE_OPTIMIZER)
    module = import_optimizer()
    counter = StepCounter()
    hook = OptimizerHook(counter)
    hook.install()
    assert [counter.on_optimizer_step] == module.HOOKS
    hook.remove()


def test_the_imported_module_shows_no_trace_of_the_finder(fake_torch: Callable[[str], None]) -> None:
    fake_torch(FAKE_OPTIMIZER)
    plain = import_optimizer()
    del sys.modules["torch.optim.optimizer"]
    hook = OptimizerHook(StepCounter())
    hook.install()
    hooked = import_optimizer()
    assert type(hooked.__loader__) is type(plain.__loader__)
    assert vars(hooked.__loader__) == vars(plain.__loader__)
    assert (hooked.__spec__.origin, hooked.__spec__.cached) == (plain.__spec__.origin, plain.__spec__.cached)
    hook.remove()


def test_an_error_in_the_import_is_the_programs_own_and_the_next_try_is_hooked(
    fake_torch: Callable[[str], None],
) -> None:
    fake_torch("raise ValueError('broken')")
    hook = OptimizerHook(StepCounter())
    hook.install()
    with pytest.raises(ValueError, match=r"^broken$"):
        import_optimizer()
    fake_torch(FAKE_OPTIMIZER + "# mended, and longer than before\n")
    importlib.invalidate_caches()
    assert len(import_optimizer().HOOKS) == 1
    hook.remove()


def test_an_old_torch_without_the_hook_is_left_alone(fake_torch: Callable[[str], None]) -> None:
    fake_torch("")
    hook = OptimizerHook(StepCounter())
    hook.install()
    import_optimizer()
    hook.remove()


def test_removing_the_hook_before_torch_is_imported_leaves_nothing(fake_torch: Callable[[str], None]) -> None:
    fake_torch(FAKE_OPTIMIZER)
    hook = OptimizerHook(StepCounter())
    hook.install()
    hook.remove()
    assert import_optimizer().HOOKS == []


@pytest.mark.torch
def test_torchs_optimizers_are_counted() -> None:
    torch = pytest.importorskip("torch")
    counter = StepCounter()
    hook = OptimizerHook(counter)
    hook.install()
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    try:
        for _ in range(4):
            parameter.sum().backward()
            optimizer.step()
    finally:
        hook.remove()
    optimizer.step()
    assert counter.count == 4


# ---------------------------------------------------------------- hooks of others, optimizers at work

REAL_OPTIMIZER = """
from collections import OrderedDict
_global_optimizer_post_hooks = OrderedDict()
class Handle:
    def __init__(self, key): self.key = key
    def remove(self): del _global_optimizer_post_hooks[self.key]
def register_optimizer_step_post_hook(hook):
    handle = Handle(len(_global_optimizer_post_hooks))
    _global_optimizer_post_hooks[handle.key] = hook
    return handle
def step():
    for hook in _global_optimizer_post_hooks.values():
        hook(None, (), {})
"""


def test_without_a_finder_only_a_torch_that_is_there_is_hooked(fake_torch: Callable[[str], None]) -> None:
    fake_torch(REAL_OPTIMIZER)
    meta_path = list(sys.meta_path)
    hook = OptimizerHook(StepCounter())
    hook.install(wait_for_import=False)
    assert sys.meta_path == meta_path
    module = import_optimizer()
    assert not module._global_optimizer_post_hooks
    hook.install(wait_for_import=False)
    hook.install(wait_for_import=False)
    assert len(module._global_optimizer_post_hooks) == 1
    hook.remove()
    assert not module._global_optimizer_post_hooks


@pytest.mark.parametrize("others", [0, 1, 3])
def test_hooking_never_makes_a_step_fail(fake_torch: Callable[[str], None], others: int) -> None:
    """While steps walk through hooks that give up the GIL, ours comes and goes from another thread."""
    fake_torch(REAL_OPTIMIZER)
    module = import_optimizer()
    for _ in range(others):
        module.register_optimizer_step_post_hook(lambda *_arguments: time.sleep(0.0002))
    stop, failures, steps = threading.Event(), [], []

    def train() -> None:
        try:
            while not stop.is_set():
                module.step()
                steps.append(1)
                time.sleep(0.0002)
        except RuntimeError as exc:
            failures.append(exc)

    trainer = threading.Thread(target=train)
    trainer.start()
    hook = OptimizerHook(StepCounter())
    for _ in range(20):
        hook.install(wait_for_import=False)
        hook.remove()
    stop.set()
    trainer.join()
    assert steps
    assert not failures
    assert len(module._global_optimizer_post_hooks) == others
