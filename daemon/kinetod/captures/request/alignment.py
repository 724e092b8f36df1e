"""Asks the agents of a capture which iterations their processes are at."""

import asyncio
import time
from collections.abc import Callable, Sequence

from kineto_protos.alignment import NEVER, Sample

from kinetod.agents.agent_hub import ConnectedAgent

OBSERVED_S = 0.2
SAMPLES = 5
FIRST_STEP_S = 5.0  # for the first iteration that a new agent sees
_MAX_ITERATION = 2**53  # what an agent says is untrusted


async def observe(agents: Sequence[ConnectedAgent], is_wanted: Callable[[], bool]) -> list[Sample]:
    """Samples the iteration of each agent over OBSERVED_S; a new agent gets up to FIRST_STEP_S for its first one.

    Ends early when `is_wanted` says that nobody waits for it any more. An agent that does not answer keeps its count.
    """
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + FIRST_STEP_S
    samples: list[Sample] = []
    while is_wanted():
        await asyncio.wait([agent.ask() for agent in agents], timeout=OBSERVED_S)
        counts = tuple(min(agent.hello.iterations, _MAX_ITERATION) for agent in agents)
        samples.append(Sample(time.monotonic_ns(), counts))
        if len(samples) >= SAMPLES and (not _is_awaited(agents) or loop.time() >= give_up_at):
            break
        await asyncio.sleep(OBSERVED_S / (SAMPLES - 1))
    return samples[-SAMPLES:]


def _is_awaited(agents: Sequence[ConnectedAgent]) -> bool:
    """Whether an agent attached to a torch program has yet to see its first iteration."""
    return any(
        agent.attached is not None and agent.hello.framework and agent.hello.iterations == NEVER for agent in agents
    )
