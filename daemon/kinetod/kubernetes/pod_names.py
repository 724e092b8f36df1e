"""The names of the pods and containers on this node, according to the kubelet and the API server.

Theory of operation
    The kernel's control groups tell by id which container a process is in; the kubelet tells by name which container it
    gave which GPUs. A container that uses GPUs is matched with the one that was given them if only one can match;
    certain matches are made first and excluded from the rest. GPUs that were given to nobody tell nothing: privileged
    pods use what they like. If the API server is asked for the pods of this node (access.kubernetes), it gives
    namespace and name of a pod by its UID.

    All of this is for display and joins; it decides nothing.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kinetod.kubernetes.api_server import ApiError
from kinetod.kubernetes.pod_resources import ContainerRef, KubeletError
from kinetod.processes.containers import Container, Names
from kinetod.processes.process_info import ProcessFacts

log = logging.getLogger(__name__)

KEEP_S = 5.0
RETRY_S = 30.0  # after a failure
WAIT_S = 0.5  # lists of processes wait no longer for names
GPUS = Path("/proc/driver/nvidia/gpus")
Held = Mapping[str, Collection[ContainerRef]]  # by the GPU's UUID


class KubeletGpuHolders:
    """Who holds which GPU according to the kubelet, at most KEEP_S old; empty and logged if it fails."""

    def __init__(self, ask: Callable[[], Awaitable[Held]], clock: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._clock = clock
        self._asking: asyncio.Task[None] | None = None
        self._until = float("-inf")
        self._held: Held = {}
        self._problem = ""

    async def current(self, wait_s: float = WAIT_S) -> Held:
        """The current holders, or the last known ones if it does not answer in time. Use it on one loop only."""
        if self._clock() >= self._until and self._asking is None:
            self._asking = asyncio.create_task(self._refresh(), name="pod resources")
        if self._asking is not None:
            await asyncio.wait({self._asking}, timeout=wait_s)
        return self._held

    async def _refresh(self) -> None:
        problem = ""
        try:
            self._held = await self._ask()
        except (KubeletError, OSError) as exc:
            self._held, problem = {}, str(exc)
        finally:
            self._asking = None
            self._until = self._clock() + (RETRY_S if problem else KEEP_S)
        if problem and problem != self._problem:
            log.warning("GPUs are shown without the pods that hold them: %s", problem)
        self._problem = problem

    def reader(self, loop: asyncio.AbstractEventLoop, deadline_s: float) -> Callable[[], Held]:
        """A function like `current` for threads other than the loop's."""

        def read() -> Held:
            asked = asyncio.run_coroutine_threadsafe(self.current(deadline_s), loop)
            with contextlib.suppress(TimeoutError):  # the loop itself is late
                return asked.result(2 * deadline_s)
            return {}

        return read


def matched(used: Mapping[Container, Collection[str]], held: Held) -> dict[Container, ContainerRef]:
    """Matches containers that use GPUs with those that were given them, where only one can match."""
    possible = {container: _possible(gpus, held) for container, gpus in used.items()}
    found: dict[Container, ContainerRef] = {}
    while certain := {next(iter(refs)): each for each, refs in possible.items() if len(refs) == 1}:
        for ref, container in certain.items():
            claimed = [each for each, refs in possible.items() if refs == {ref}]
            if claimed == [container]:
                found[container] = ref
            for each in claimed:  # several that say to be the same are none
                del possible[each]
        possible = {each: refs - certain.keys() for each, refs in possible.items()}
    return found


def _possible(gpus: Collection[str], held: Held) -> set[ContainerRef]:
    given = [set(held[gpu]) for gpu in gpus if held.get(gpu)]
    return set.intersection(*given) if given and len(given) == len(gpus) else set()


def called(ref: ContainerRef) -> Names:
    """The container as named in the metrics."""
    return Names(pod=ref.pod, namespace=ref.namespace, container=ref.container)


class PodNames:
    """Names processes by their containers. pods: (namespace, name) by UID from the API server, or None."""

    def __init__(
        self,
        holders: KubeletGpuHolders | None,
        pods: Callable[[], Awaitable[Mapping[str, tuple[str, str]]]] | None = None,
        *,
        gpus: Path = GPUS,
    ) -> None:
        self._holders = holders
        self._pods = pods
        self._gpus = gpus

    async def named(self, processes: Sequence[ProcessFacts]) -> list[ProcessFacts]:
        """The processes, with names where they are known."""
        names = await self._of(processes)
        return [replace(each, names=names[each.container]) if each.container in names else each for each in processes]

    async def _of(self, processes: Iterable[ProcessFacts]) -> dict[Container | None, Names]:
        minors: dict[Container, set[int]] = {}
        for facts in processes:
            if facts.container is not None and facts.container.pod_uid:
                minors.setdefault(facts.container, set()).update(facts.gpus)
        if not minors:
            return {}
        found: dict[Container | None, Names] = {}
        if self._pods is not None:
            pods: Mapping[str, tuple[str, str]] = {}
            with contextlib.suppress(ApiError, TimeoutError):
                pods = await asyncio.wait_for(self._pods(), WAIT_S)
            for container in minors:
                if container.pod_uid in pods:
                    namespace, name = pods[container.pod_uid]
                    found[container] = Names(pod=name, namespace=namespace)
        if self._holders is not None:
            held = await self._holders.current()
            uuids = await asyncio.to_thread(uuids_by_minor, self._gpus) if held else {}
            used = {each: {uuids.get(minor, "") for minor in group} for each, group in minors.items() if group}
            found |= {container: called(ref) for container, ref in matched(used, held).items()}
        return found


def uuids_by_minor(gpus: Path = GPUS) -> dict[int, str]:
    """The UUIDs of NVIDIA's GPUs according to its kernel driver. Blocks."""
    found = {}
    for path in gpus.glob("*/information"):
        with contextlib.suppress(OSError, ValueError):
            lines = path.read_text(errors="replace").splitlines()
            facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            if "GPU UUID" in facts:
                found[int(facts.get("Device Minor", ""))] = facts["GPU UUID"]
    return found
