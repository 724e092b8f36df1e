"""The hooks in torch's optimizers and profiler: coming, counting, going."""

import _thread
import importlib
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Iterator

import pytest
from kineto_agent.steps import torch_hooks
from kineto_agent.steps.counting import StepCounter
from kineto_agent.steps.torch_hooks import JaxStepHooks, StepHooks
from kineto_agent.system.threads import Thread, _ours
from support.agent.python_child import environment
from support.targets import torch_forks
from support.waiting import until

# ---------------------------------------------------------------- a stand-in for torch on the disk

FAKE_PROFILER = """
class profile:
    def step(self, fail=False):
        "The profiler's own words."
        if fail: raise ValueError('its own')
        return 5
"""
FAKE_TRACKER = """
class KinetoStepTracker:
    seen = []
    @classmethod
    def increment_step(cls, requester):
        cls.seen.append(requester)
        return len(cls.seen)
"""
FAKE_OPTIMIZER = """
from collections import OrderedDict
_global_optimizer_post_hooks = OrderedDict()
def register_optimizer_step_post_hook(hook):
    _global_optimizer_post_hooks[len(_global_optimizer_post_hooks)] = hook
def step():
    for hook in _global_optimizer_post_hooks.values():
        hook(None, (), {})
"""


@pytest.fixture
def fake_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    def write(source: str) -> None:
        (tmp_path / "torch" / "optim").mkdir(parents=True, exist_ok=True)
        (tmp_path / "torch" / "__init__.py").write_text("__version__ = '9.9'\n")
        (tmp_path / "torch" / "optim" / "__init__.py").write_text("")
        (tmp_path / "torch" / "optim" / "optimizer.py").write_text(source)
        for package, text in (("profiler", FAKE_PROFILER), ("autograd", FAKE_TRACKER)):
            (tmp_path / "torch" / package).mkdir(exist_ok=True)
            (tmp_path / "torch" / package / "__init__.py").write_text("")
            (tmp_path / "torch" / package / "profiler.py").write_text(text)

    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "torch"}
    meta_path = list(sys.meta_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield write
    assert sys.meta_path == meta_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        del sys.modules[name]
    sys.modules.update(kept)


@pytest.fixture
def agents_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of the test is the agent's."""
    monkeypatch.setitem(_ours, _thread.get_ident(), Thread("kineto-agent"))


def import_optimizer() -> Any:
    return importlib.import_module("torch.optim.optimizer")


def hooks_of(optimizer: Any) -> list[Any]:
    return list(optimizer._global_optimizer_post_hooks.values())


def import_profiler() -> Any:
    return importlib.import_module("torch.profiler.profiler").profile


def import_tracker() -> Any:
    return importlib.import_module("torch.autograd.profiler").KinetoStepTracker


def is_waiting() -> bool:
    return type(sys.meta_path[0]).__name__ == "_ModuleFinder"


def test_torch_is_hooked_when_it_is_imported_later(fake_torch: Callable[[str], None]) -> None:
    fake_torch(FAKE_OPTIMIZER)
    counter = StepCounter()
    hook = StepHooks(counter)
    hook.install()
    hook.install()
    module = import_optimizer()
    assert hooks_of(module) == [counter.on_optimizer_step]
    assert is_waiting()
    import_profiler()
    import_tracker()
    assert not is_waiting()
    hook.remove()
    assert hooks_of(module) == []


def test_torch_is_hooked_when_it_is_there_already(fake_torch: Callable[[str], None]) -> None:
    fake_torch(FAKE_OPTIMIZER)
    module = import_optimizer()
    counter = StepCounter()
    hook = StepHooks(counter)
    hook.install()
    assert hooks_of(module) == [counter.on_optimizer_step]
    hook.remove()


def test_the_imported_module_shows_no_trace_of_the_finder(fake_torch: Callable[[str], None]) -> None:
    fake_torch(FAKE_OPTIMIZER)
    plain = import_optimizer()
    del sys.modules["torch.optim.optimizer"]
    hook = StepHooks(StepCounter())
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
    hook = StepHooks(StepCounter())
    hook.install()
    with pytest.raises(ValueError, match=r"^broken$"):
        import_optimizer()
    fake_torch(FAKE_OPTIMIZER + "# mended, and longer than before\n")
    importlib.invalidate_caches()
    assert len(hooks_of(import_optimizer())) == 1
    hook.remove()


def test_an_old_torch_without_the_hook_is_left_alone(fake_torch: Callable[[str], None]) -> None:
    fake_torch("")
    hook = StepHooks(StepCounter())
    hook.install()
    module = import_optimizer()
    before = dict(vars(module))
    hook.remove()
    assert vars(module) == before
    assert not any("post_hook" in name for name in before)


def test_removing_the_hook_before_torch_is_imported_leaves_nothing(fake_torch: Callable[[str], None]) -> None:
    fake_torch(FAKE_OPTIMIZER)
    hook = StepHooks(StepCounter())
    hook.install()
    hook.remove()
    assert hooks_of(import_optimizer()) == []


TORCHS_OPTIMIZER = """
import torch
from kineto_agent.steps.torch_hooks import StepHooks
from kineto_agent.steps.counting import StepCounter
counter = StepCounter()
hook = StepHooks(counter)
hook.install()
parameter = torch.nn.Parameter(torch.zeros(3))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for _ in range(4):
    parameter.sum().backward()
    optimizer.step()
hook.remove()
optimizer.step()
print(counter.count)
"""


@pytest.mark.torch
def test_torchs_optimizers_are_counted() -> None:
    done = torch_forks.run("-c", TORCHS_OPTIMIZER, env=environment())
    assert (done.stdout, done.returncode) == ("4\n", 0), done.stderr


# ---------------------------------------------------------------- hooks of others, optimizers at work


def test_without_a_finder_only_a_torch_that_is_there_is_hooked(fake_torch: Callable[[str], None]) -> None:
    fake_torch(FAKE_OPTIMIZER)
    meta_path = list(sys.meta_path)
    hook = StepHooks(StepCounter())
    hook.install(wait_for_import=False)
    assert sys.meta_path == meta_path
    module = import_optimizer()
    assert not hooks_of(module)
    hook.install(wait_for_import=False)
    hook.install(wait_for_import=False)
    assert len(hooks_of(module)) == 1
    hook.remove()
    assert not hooks_of(module)


@pytest.mark.usefixtures("agents_thread")
@pytest.mark.parametrize("others", [0, 1, 3])
def test_hooking_never_makes_a_step_fail(
    fake_torch: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    """While steps walk through hooks that give up the GIL, ours comes and goes from another thread."""
    fake_torch(FAKE_OPTIMIZER)
    monkeypatch.setattr(torch_hooks, "_TRIES", 10_000)  # a loaded machine may not let us look for a while
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
    until(lambda: steps, "the training has begun")
    hook = StepHooks(StepCounter())
    for _ in range(20):
        hook.install(wait_for_import=False)
        hook.remove()
    stop.set()
    trainer.join()
    assert not failures
    assert len(hooks_of(module)) == others


@pytest.mark.usefixtures("agents_thread")
def test_hooks_of_others_are_not_joined_while_a_step_is_under_way(
    fake_torch: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_torch(FAKE_OPTIMIZER)
    module = import_optimizer()
    begun, released = threading.Event(), threading.Event()
    for theirs in (begun.set, lambda: released.wait(30)):
        module.register_optimizer_step_post_hook(lambda *_arguments, theirs=theirs: theirs())
    trainer = threading.Thread(target=module.step)
    trainer.start()
    begun.wait(30)
    monkeypatch.setattr(torch_hooks, "_TRIES", 3)
    counter = StepCounter()
    hook = StepHooks(counter)
    hook.install(wait_for_import=False)
    assert len(hooks_of(module)) == 2
    released.set()
    trainer.join()
    monkeypatch.setattr(torch_hooks, "_TRIES", 10_000)  # a loaded machine may not let us look for a while
    hook.install(wait_for_import=False)
    assert hooks_of(module)[2:] == [counter.on_optimizer_step]
    hook.remove()
    assert len(hooks_of(module)) == 2


def test_a_thread_of_the_program_waits_for_nothing_and_leaves_the_rest_to_the_agents(
    fake_torch: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_torch(FAKE_OPTIMIZER)
    module = import_optimizer()
    for _ in range(2):
        module.register_optimizer_step_post_hook(lambda *_arguments: None)
    hook, looks = StepHooks(StepCounter()), torch_hooks._sampler
    monkeypatch.setattr(torch_hooks, "_sampler", lambda: pytest.fail("stacks are looked at"))
    hook.install(wait_for_import=False)
    assert len(hooks_of(module)) == 2
    monkeypatch.setattr(torch_hooks, "_sampler", looks)
    monkeypatch.setitem(_ours, _thread.get_ident(), Thread("kineto-agent"))
    hook.look()
    hook.look()
    assert len(hooks_of(module)) == 3
    hook.remove()
    assert len(hooks_of(module)) == 2


@pytest.mark.usefixtures("agents_thread")
def test_no_step_begins_between_the_look_at_others_and_the_change_of_hooks(fake_torch: Callable[[str], None]) -> None:
    """The other thread steps without a pause, and the interpreter lets threads change wherever it can."""
    fake_torch(FAKE_OPTIMIZER)
    module = import_optimizer()
    for _ in range(2):
        module.register_optimizer_step_post_hook(lambda *_arguments: sum(range(200)))
    stop, failures = threading.Event(), []

    def train() -> None:
        try:
            while not stop.is_set():
                module.step()
                sum(range(2000))
        except RuntimeError as exc:
            failures.append(exc)

    trainer = threading.Thread(target=train)
    joined, hook, interval = 0, StepHooks(StepCounter()), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        trainer.start()
        for _ in range(100):
            hook.install(wait_for_import=False)
            joined += len(hooks_of(module)) == 3
            hook.remove()
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        trainer.join()
    assert joined > 50
    assert not failures


class ClearsFirst:
    """A sampler beside a program that clears its hooks between our look at them and the change."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def change_item(self, file: str, hooks: Any, key: Any) -> bool:
        hooks.clear()
        return bool(self._sampler.change_item(file, hooks, key))


@pytest.mark.usefixtures("agents_thread")
def test_a_program_that_clears_its_hooks_while_ours_is_removed_has_removed_it(
    fake_torch: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_torch(FAKE_OPTIMIZER)
    module, counter = import_optimizer(), StepCounter()
    hook = StepHooks(counter)
    hook.install(wait_for_import=False)
    module.register_optimizer_step_post_hook(lambda *_arguments: None)
    sampler = torch_hooks._sampler()
    monkeypatch.setattr(torch_hooks, "_sampler", lambda: ClearsFirst(sampler))
    monkeypatch.setattr(torch_hooks, "_TRIES", 10_000)
    hook.remove()
    assert (hooks_of(module), counter.hooked_ns) == ([], 0)


# ---------------------------------------------------------------- torch's own profiler


@pytest.mark.parametrize("early", [True, False])
def test_a_step_of_the_profiler_is_an_iteration(fake_torch: Callable[[str], None], early: bool) -> None:
    fake_torch(FAKE_OPTIMIZER)
    counter = StepCounter()
    hooks = StepHooks(counter)
    if early:
        hooks.install()
    profile = import_profiler()
    hooks.install(wait_for_import=early)
    original = vars(profile)["step"].__wrapped__
    profiler = profile()
    assert [profiler.step() for _ in range(3)] == [5, 5, 5]
    assert counter.count == 3
    assert profile.step.__doc__ == "The profiler's own words."
    hooks.remove()
    assert vars(profile)["step"] is original


def test_an_error_of_the_profiler_is_the_programs_own_and_no_iteration(fake_torch: Callable[[str], None]) -> None:
    fake_torch(FAKE_OPTIMIZER)
    counter, profile = StepCounter(), import_profiler()
    hooks = StepHooks(counter)
    hooks.install(wait_for_import=False)
    with pytest.raises(ValueError, match=r"^its own$"):
        profile().step(fail=True)
    assert counter.count == -1
    hooks.remove()


def test_a_step_of_torchs_step_tracker_is_an_iteration_once(fake_torch: Callable[[str], None]) -> None:
    fake_torch(FAKE_OPTIMIZER)
    counter, tracker, profiler = StepCounter(), import_tracker(), import_profiler()()
    original = vars(tracker)["increment_step"]
    hooks = StepHooks(counter)
    hooks.install(wait_for_import=False)
    for _ in range(3):
        tracker.increment_step("loop")
        profiler.step()
        tracker.increment_step("ProfilerStep")  # as torch.profiler does under KINETO_USE_DAEMON
    assert counter.count == 3
    assert tracker.seen == ["loop", "ProfilerStep"] * 3
    hooks.remove()
    assert vars(tracker)["increment_step"] is original


def test_what_somebody_put_over_ours_stays_and_ours_falls_silent_and_wakes(fake_torch: Callable[[str], None]) -> None:
    fake_torch(FAKE_OPTIMIZER)
    counter, profile = StepCounter(), import_profiler()
    hooks = StepHooks(counter)
    hooks.install(wait_for_import=False)
    below = profile.step
    profile.step = theirs = lambda self: below(self)
    profiler = profile()
    profiler.step()
    hooks.remove()
    assert vars(profile)["step"] is theirs
    profiler.step()
    assert counter.count == 1
    hooks.install(wait_for_import=False)
    profiler.step()
    assert (vars(profile)["step"], counter.count) == (theirs, 2)
    hooks.remove()


REAL_TORCH = """
import torch
from kineto_agent.steps.torch_hooks import StepHooks
from kineto_agent.steps.counting import StepCounter
counter = StepCounter()
hooks = StepHooks(counter)
hooks.install()
from torch.profiler import profile, schedule
parameter = torch.nn.Parameter(torch.zeros(3))
with profile(schedule=schedule(wait=1, warmup=1, active=2)) as profiler:
    for _ in range(6):
        profiler.step()
print(counter.count)
first, second = (torch.optim.SGD([parameter], lr=0.1) for _ in range(2))
with profile() as profiler:
    for _ in range(4):
        for optimizer in (first, second):
            parameter.grad = torch.ones(3)
            optimizer.step()
        profiler.step()
print(counter.count)
scaler = torch.amp.GradScaler("cpu")
for _ in range(2):
    scaler.scale(parameter.sum()).backward()
    scaler.step(first)
    scaler.update()
print(counter.count)
compiled = torch.compile(lambda: first.step(), backend="eager")
for _ in range(2):
    parameter.grad = torch.ones(3)
    compiled()
print(counter.count)
hooks.remove()
print(profile.step.__module__)
"""


@pytest.mark.slow
@pytest.mark.torch
def test_torchs_profiler_scaler_and_compiled_optimizers_are_counted() -> None:
    done = torch_forks.run("-c", REAL_TORCH, env=environment())
    assert done.returncode == 0, done.stderr
    # 6 steps of the profiler; 4 of optimizers, of which the first joins at the 6th
    assert done.stdout.split() == ["6", "9", "11", "13", "torch.profiler.profiler"]


NAME = "jax._src.profiler"


@pytest.fixture
def jax(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """As much of jax._src.profiler as is hooked."""

    class StepTraceAnnotation:
        def __init__(self, name: str, **kwargs: Any) -> None:
            if name == "fail":
                raise ValueError(name)
            self.kwargs = kwargs

    module: Any = ModuleType(NAME)
    module.StepTraceAnnotation = StepTraceAnnotation
    monkeypatch.setitem(sys.modules, NAME, module)
    before = StepTraceAnnotation.__init__
    yield module
    assert StepTraceAnnotation.__init__ is before


def test_marked_steps_count_and_the_annotation_is_as_it_was(jax: Any) -> None:
    counter = StepCounter()
    hooks = JaxStepHooks(counter)
    hooks.install()
    for number in range(3):
        assert jax.StepTraceAnnotation("train", step_num=number).kwargs == {"step_num": number}
    assert counter.count == 3
    hooks.remove()
    jax.StepTraceAnnotation("train", step_num=4)
    assert counter.count == 3


def test_steps_of_two_names_are_not_added(jax: Any) -> None:
    counter = StepCounter()
    hooks = JaxStepHooks(counter)
    hooks.install()
    for _ in range(4):
        jax.StepTraceAnnotation("train")
    jax.StepTraceAnnotation(name="without a position")
    hooks.remove()
    assert counter.count == 4


def test_a_step_that_is_not_made_does_not_count(jax: Any) -> None:
    counter = StepCounter()
    hooks = JaxStepHooks(counter)
    hooks.install()
    with pytest.raises(ValueError, match="fail"):
        jax.StepTraceAnnotation("fail")
    hooks.remove()
    assert counter.count == -1


def test_without_jax_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    meta_path = list(sys.meta_path)
    hooks = JaxStepHooks(StepCounter())
    hooks.install(wait_for_import=False)
    assert sys.meta_path == meta_path
    hooks.install()
    assert len(sys.meta_path) == len(meta_path) + 1
    hooks.remove()
    assert sys.meta_path == meta_path
