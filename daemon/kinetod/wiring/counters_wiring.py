"""What samples hardware counters for the daemon: the service, or a child of its own."""

import contextlib

from kinetod.config.settings import Config
from kinetod.counters.counter_client import CounterClient
from kinetod.counters.sampler_connections import CountersChild, CountersService


def make_counters(config: Config, stack: contextlib.AsyncExitStack) -> CounterClient:
    """The client, which is stopped with the stack. Nothing is started before somebody asks."""
    if config.counters_socket is not None:
        client = CounterClient(CountersService(config.counters_socket))
    else:
        arguments = ["--backend", config.counters_backend, "--log-level", config.log_level]
        if config.counters_library is not None:
            arguments += ["--library", str(config.counters_library)]
        client = CounterClient(CountersChild(arguments))
    stack.push_async_callback(client.stop)
    return client
