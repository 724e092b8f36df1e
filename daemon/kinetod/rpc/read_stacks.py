"""ReadStacks: where the threads of the selected processes stand, each process as soon as it has been read.

The answer for a process with an open GPU includes what its GPUs did during the look, which helps to tell a wait for a
result from a hang. The GPUs are read twice, at least GPUS_S apart, for all processes.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Protocol

from kineto_protos.v1 import profiler_pb2 as pb

from kinetod.base.errors import NotFound, Reason, invalid
from kinetod.base.fair_slots import FairSlots
from kinetod.captures.request.target_resolution import each_named, forbidden
from kinetod.gpus.gpu_reader import GpuReader, gpu_number, held
from kinetod.gpus.gpu_types import Snapshot
from kinetod.permissions.role_policy import Caller
from kinetod.processes.identity import ProcessKey
from kinetod.rpc.watch_host import gpu_samples
from kinetod.selection.candidate import Candidate
from kinetod.selection.process_registry import Match, Registry, checked_selector
from kinetod.stacks.stack_reader import AT_ONCE, StackReader
from kinetod.stacks.thread_stacks import StackReading, ThreadStack

MAX_PROCESSES = 512
GPUS_S = 0.25  # GPM's counters take 0.1 s
GPUS_DEADLINE_S = 1.5  # for each of two readings; opening the driver takes a second


class StackSource(Protocol):
    """Reads a process: in a process of our own, or through the attach helper service."""

    async def read(self, key: ProcessKey, uid: int) -> StackReading:
        """The stacks of a process of this user. Raises ProcessLookupError if it does not exist."""


class _GpusDuringLook:
    """The GPUs of this host between its making and the first call of `of`, at least GPUS_S later."""

    def __init__(self, reader: GpuReader) -> None:
        self._reader = reader
        self._before = asyncio.create_task(self._read(0.0))
        self._after: asyncio.Task[Snapshot] | None = None

    async def of(self, process: pb.Process) -> list[pb.GpuSample]:
        """Those on which the process has a context; if no context can be seen, the one that it has open."""
        before = await self._before
        if not before.time_ns:
            return []  # the driver does not answer: it would not the second time either
        if self._after is None:
            self._after = asyncio.create_task(self._read(before.monotonic_ns / 1e9 + GPUS_S - time.monotonic()))
        after = await self._after
        numbers = held(after).get(process.pid) or (set(process.gpus) if len(process.gpus) == 1 else ())
        samples = zip(after.gpus, gpu_samples(before, after), strict=True)
        return [sample for gpu, sample in samples if gpu_number(gpu) in numbers]

    async def _read(self, wait_s: float) -> Snapshot:
        await asyncio.sleep(max(0.0, wait_s))
        return await asyncio.to_thread(lambda: self._reader.read(max_age_s=0, deadline_s=GPUS_DEADLINE_S))

    def close(self) -> None:
        """Ends what still waits."""
        for task in (self._before, self._after):
            if task is not None:
                task.cancel()


class StackLooker:
    """Answers ReadStacks. reader: None: this daemon reads by itself."""

    def __init__(self, registry: Registry, gpus: GpuReader, reader: StackSource | None = None) -> None:
        self._registry = registry
        self._gpus = gpus
        self._reader: StackSource = reader or StackReader()
        self._slots = FairSlots(AT_ONCE, spare=1)  # before the helper, whose connections are everybody's

    async def read(self, request: pb.ReadStacksRequest, caller: Caller) -> AsyncIterator[pb.ProcessStacks]:
        """Yields each process once it has been read. Raises KinetodError."""
        match = checked_selector(request.selector)
        if not match:
            raise invalid("selector", "must have at least one condition; `kinetoctl ps` lists the processes")
        found = await self._chosen(match, caller)
        if not found:
            text = f"no process matches {match}; `kinetoctl ps --all` lists all, and --pid accepts any of them"
            raise NotFound(Reason.NO_MATCH, text)
        if len(found) > MAX_PROCESSES:
            raise invalid("selector", f"matches {len(found)} processes, more than {MAX_PROCESSES}; select fewer")
        gpus = _GpusDuringLook(self._gpus) if any(each.process.gpus for each in found) else None
        reading = [asyncio.create_task(self._of(each, gpus)) for each in found]
        try:
            for done in asyncio.as_completed(reading):
                yield await done
        finally:
            if gpus is not None:
                gpus.close()
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)

    async def _chosen(self, match: Match, caller: Caller) -> list[Candidate]:
        """Those that a capture with these conditions would have, and that the caller may trace. Raises KinetodError."""
        own_uid = self._registry.own_uid

        def usable(candidate: Candidate) -> bool:
            return forbidden(caller, candidate, own_uid) is None

        if not match.names_pids:
            return await self._registry.selected(match, usable, attachable=True)
        named = await each_named(self._registry, match.pids, caller)
        for candidate in named:
            if (problem := forbidden(caller, candidate, own_uid)) is not None:
                raise problem
        return await self._registry.narrowed(match, named)

    async def _of(self, candidate: Candidate, gpus: _GpusDuringLook | None) -> pb.ProcessStacks:
        key, before = candidate.key, candidate.facts.credentials
        try:
            async with self._slots.turn():
                stacks = await self._reader.read(key, candidate.facts.uid)
        except ProcessLookupError:
            return pb.ProcessStacks(process=candidate.process, reason="it has ended")
        now = await self._registry.whose(key)
        if now is None or before is None or before.difference(now):
            return pb.ProcessStacks(process=candidate.process, reason="it has ended, or executed another program")
        told = to_proto(candidate.process, stacks)
        if gpus is not None and candidate.process.gpus:
            told.gpus.extend(await gpus.of(candidate.process))
        return told


def to_proto(process: pb.Process, stacks: StackReading) -> pb.ProcessStacks:
    """The public form."""
    return pb.ProcessStacks(
        process=process,
        time_ns=stacks.time_ns,
        threads=[_thread(each, process.pid) for each in stacks.threads],
        left_out=stacks.left_out,
        reason=stacks.reason,
    )


def _thread(thread: ThreadStack, pid: int) -> pb.ThreadStack:
    return pb.ThreadStack(
        thread=thread.thread,
        name=thread.name,
        main=thread.thread == pid,
        state=f"THREAD_STATE_{thread.state}",
        cpu_ns=thread.cpu_ns,
        system_call=thread.system_call,
        holds_gil=thread.holds_gil,
        wait=f"WAIT_{thread.wait}",
        waits=thread.waits,
        frames=[
            pb.Frame(function=each.function, file=each.file, line=each.line, code=each.code, own=each.own)
            for each in thread.frames
        ],
        left_out=thread.left_out,
    )
