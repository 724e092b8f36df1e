"""For all tests."""

import gc
import importlib.util
import os
import signal
import sys
from typing import Iterator

import pytest
from support.targets import torch_forks

# Whoever starts the tests in the background of a shell has them ignore Ctrl-C, and every process that they start
# inherits that. Some of them are sent SIGINT on purpose.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Hundreds of processes import the product, and each worker all tests: where compiled modules are not kept, that takes a
# third of all time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# How long an example takes says what else the machine does. The examples are the same in every run, so that a change
# is judged by what it changed; `make properties` looks for new ones.
if importlib.util.find_spec("hypothesis"):  # the agent's tests run without it, too
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "any machine", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.register_profile("search", settings.get_profile("any machine"), derandomize=False, max_examples=2000)
    settings.load_profile("any machine")
    _name = "hypothesis.internal.conjecture.providers"
    _provider = importlib.import_module(_name) if importlib.util.find_spec(_name) else None

    def _same_constants() -> object:
        """None of the product's modules, whose constants hypothesis tries: which are imported differs by worker."""
        return _provider.Constants() if _provider and settings().derandomize else _imported_constants()

    if _provider and hasattr(_provider, "_get_local_constants"):  # older versions try none
        _imported_constants = _provider._get_local_constants
        vars(_provider)["_get_local_constants"] = _same_constants


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Thousands of tests and what they import stay until the end: later garbage collections need not look at them."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what needs torch or JAX where there is none. Neither is imported: the agent would see it here."""
    for name in ("torch", "jax"):
        if item.get_closest_marker(name) and importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}")


@pytest.fixture(scope="session", autouse=True)
def _no_server_is_left() -> Iterator[None]:
    yield
    torch_forks.end()
