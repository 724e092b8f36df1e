"""What programs do for the first time after a trace ends as in a twin that nobody traced. The campaign has all."""

import pytest
from support.attach_targets import later
from support.campaigns.gaps import Pair, table, watch_once
from support.machine.kernel import allowed_to_trace
from support.service.daemon import Daemon
from support.waiting import scaled

pytestmark = pytest.mark.skipif(not allowed_to_trace(), reason="the kernel does not let us trace (ptrace_scope?)")
USED_S = 2.0  # of processor time
FEW = ("fork", "descriptors_of_a_fork", "end_with_a_status", "become_another_program", "exit_handlers", "import_jax")
FEW_WITH_TORCH = ("capture_a_graph", "optimise_by_sgd", "process_group")


def traced(daemon: Daemon, name: str) -> Pair:
    return watch_once(name, daemon, options=("--duration", "200ms", "--keep-agent", "10min"), used_s=USED_S)


def is_as_untouched(pair: Pair) -> bool:
    """It did the same, and did not wait for anything: a thread once slept for three times its processor time."""
    return pair.differences() == [] and pair.waited_ms() <= 3 * pair.untouched.took + scaled(USED_S) * 1e3


@pytest.mark.parametrize("name", FEW)
def test_a_traced_program_goes_on_as_an_untouched_one(daemon: Daemon, name: str) -> None:
    pair = traced(daemon, name)
    assert is_as_untouched(pair), table([pair])


@pytest.mark.torch
@pytest.mark.parametrize("name", FEW_WITH_TORCH)
def test_torch_does_the_same_after_a_trace(daemon: Daemon, name: str) -> None:
    pytest.importorskip("torch")
    pair = traced(daemon, name)
    assert is_as_untouched(pair), table([pair])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in later.load() if name not in FEW + FEW_WITH_TORCH])
def test_nothing_else_that_a_program_does_is_changed(daemon: Daemon, name: str) -> None:
    pytest.importorskip(later.NEEDS[name])
    pair = traced(daemon, name)
    assert is_as_untouched(pair), table([pair])
