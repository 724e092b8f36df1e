"""What programs do for the first time after a trace ends as in a twin that nobody traced.

The campaign has each alone. Here a program does several things of different kinds: one that forks at most, ends last.
"""

import importlib.util

import pytest
from campaign.attach_targets import later
from campaign.parts.gaps import Pair, table, watch_once
from support.machine.kernel import allowed_to_trace
from support.service.daemon import Daemon
from support.waiting import scaled

pytestmark = pytest.mark.skipif(not allowed_to_trace(), reason="the kernel does not let us trace (ptrace_scope?)")
USED_S = 1.0  # of processor time
FEW = ("fork", "descriptors_of_a_fork", "end_with_a_status", "become_another_program", "exit_handlers", "import_jax")
FEW_WITH_TORCH = ("capture_a_graph", "optimise_by_sgd", "process_group")
TOGETHER = (
    "handle_signals+import_cupy+fork_twice+close_all_descriptors+end_by_sigterm",
    "wait_for_a_signal+import_triton+fork_in_a_thread+no_more_descriptors+end_by_sigint",
    "wake_by_a_descriptor+import_torch_that_fails+threads_of_a_fork+another_user+end_by_sigkill",
    "threads+load_a_library+run_a_program+another_root_folder",
    "thread_that_fails+event_loop+run_a_program_that_inherits+little_stack+end_at_once",
    "executor_of_threads+monitoring+run_by_shell+end_in_a_handler",
    "profile_and_trace_functions+import_hooks+posix_spawn+exit_handler_that_fails",
    "c_profile+trace_memory+new_session+end_by_abort",
    "audit_hook+pool_by_fork+end_by_an_error",
    "warn+executor_of_processes+end_with_words",
    "collect_garbage+fork_with_warnings_as_errors+daemon_thread_at_exit",
    "recurse+finalizers_at_exit+thread_that_outlives_main",
)
TOGETHER_WITH_TORCH = (
    "optimise_by_adam+compile_eagerly+own_function+graph_contexts+load_data_by_forks",
    "optimise_by_lbfgs+profile_with_torch+module_hooks",
    "schedule_of_rates+profile_by_schedule+dispatch_modes+initialise_cuda",
    "train_in_a_thread+profile_with_autograd+script",
)
SOMEWHERE = {*FEW, *FEW_WITH_TORCH, *"+".join(TOGETHER + TOGETHER_WITH_TORCH).split("+")}
ALONE = [name for name in later.load() if name not in SOMEWHERE]


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
    pair = traced(daemon, name)
    assert is_as_untouched(pair), table([pair])


@pytest.mark.slow
@pytest.mark.parametrize("names", [*TOGETHER, *TOGETHER_WITH_TORCH, *ALONE])
def test_nothing_else_that_a_program_does_is_changed(daemon: Daemon, names: str) -> None:
    for name in names.split("+"):
        if importlib.util.find_spec(later.NEEDS[name]) is None:
            pytest.skip(f"needs {later.NEEDS[name]}")
    pair = traced(daemon, names)
    assert is_as_untouched(pair), table([pair])
