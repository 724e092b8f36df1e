"""A recording of operators as the agent has it, in a process with a real torch.

Run with "python -m support.agent.ops_session PLAN", where PLAN is Python text that uses what is here.
"""

from __future__ import annotations

import struct
import sys
import threading
import time
from collections import Counter
from typing import Any, NamedTuple

import torch
from kineto_agent.protocol.records import (
    KIND_OP_COMMS,
    KIND_OP_TENSORS,
    OP,
    OP_COMMS,
    OP_KIND,
    OP_TENSORS,
    SPACE_OP_COMMS,
    SPACE_OP_INPUTS,
    SPACE_OP_NAME,
    SPACE_TORCH_THREAD,
)
from kineto_agent.sources.interface import SourceOutcome, SourceRequest
from kineto_agent.sources.torch.operators import TorchOpsSession, TorchOpsSource

from support.agent.arenas import ArenaReader, Recycler

COPY_PERIOD_S = 0.01
LIMIT_BYTES = 64 << 20


class Op(NamedTuple):
    """One OP record with its names looked up."""

    name: str
    start_ns: int
    end_ns: int
    sequence: int
    forward_thread: int
    inputs: bytes
    thread: int
    torch_thread: int
    number: int
    scope: int
    flags: int


class Recording:
    """Records from its making until `stop`, with a daemon's side that copies."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES, **options: Any) -> None:
        types = frozenset(("cpu_op", "user_annotation"))
        session = TorchOpsSource().prepare(SourceRequest(types, limit_bytes, options))
        assert isinstance(session, TorchOpsSession), session.metadata
        self.session = session
        self._reader = ArenaReader(session.arena_fd)
        self._daemon = Recycler(self._reader, COPY_PERIOD_S)
        self._daemon.start()
        session.start()

    def stop(self) -> SourceOutcome:
        """End the session; `ops` and `tensors` exist from then on."""
        outcome = self.session.stop()
        taken = self._daemon.end()
        assert sorted(buffer.sequence for buffer in taken) == list(range(len(taken)))
        assert all(buffer.records * OP.size == len(buffer.data) for buffer in taken)
        records = [each.data[at : at + OP.size] for each in taken for at in range(0, len(each.data), OP.size)]
        assert len(records) == outcome.counts.records
        strings: dict[int, dict[int, bytes]] = {}
        for (space, key), text in self._reader.raw_strings().items():
            strings.setdefault(space, {})[key] = text
        self._read(records, strings)
        self.session.close()
        return outcome

    def _read(self, records: list[bytes], strings: dict[int, dict[int, bytes]]) -> None:
        names, inputs = strings.get(SPACE_OP_NAME, {}), strings.get(SPACE_OP_INPUTS, {})
        threads = {key: struct.unpack("<Q", text)[0] for key, text in strings.get(SPACE_TORCH_THREAD, {}).items()}
        self.ops: list[Op] = []
        self.tensors: list[tuple[int, ...]] = []
        self.collectives: list[tuple[int, int, int, bytes]] = []  # number of the op, sequence, transfer, entry
        comms = strings.get(SPACE_OP_COMMS, {})
        for record in records:
            if record[OP_KIND] == KIND_OP_TENSORS:
                self.tensors.append(OP_TENSORS.unpack(record))
                continue
            if record[OP_KIND] == KIND_OP_COMMS:
                entry, sequence, *_, number, _, transfer, _, _, _ = OP_COMMS.unpack(record)
                self.collectives.append((number, sequence, transfer, comms[entry]))
                continue
            start, end, name, sequence, forward, entry, thread, number, _, scope, flags, _, _ = OP.unpack(record)
            text = names[name].decode()
            described = inputs[entry] if entry else b""
            self.ops.append(
                Op(text, start, end, sequence, forward, described, thread, threads[thread], number, scope, flags)
            )

    def counts(self) -> Counter[tuple[str, int, int, int]]:
        """Number of ops by (name, torch's thread number, sequence number, forward thread)."""
        return Counter((op.name, op.torch_thread, op.sequence, op.forward_thread) for op in self.ops)


def profiler(**options: Any) -> Any:
    """torch's own profiler, for all threads."""
    everything = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    return torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=everything, **options
    )


def profiled(profile: Any) -> Counter[tuple[str, int, int, int]]:
    """As Recording.counts, of torch's own profiler, without the numbers that it copies from an op to the one around."""
    return Counter(
        (event.name(), event.start_thread_id(), -1, 0)
        if event.name().startswith("autograd::engine::evaluate_function")
        else (event.name(), event.start_thread_id(), event.sequence_nr(), event.fwd_thread_id())
        for event in profile.profiler.kineto_results.events()
    )


def model() -> Any:
    """A small model with a few layers."""
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def train(net: Any, steps: int = 3) -> None:
    """Train some steps with annotations, some of them nested, and an operator that raises."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(steps):
        with torch.profiler.record_function("step %d" % step), torch.profiler.record_function("inner"):
            net(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        try:
            torch.mm(torch.ones(2, 3), torch.ones(2, 3))
        except RuntimeError:
            continue


def in_threads(count: int, body: Any) -> None:
    """Run `body` in so many threads, to the end."""
    threads = [threading.Thread(target=body) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    exec(compile(sys.argv[1], "plan", "exec"), {**globals(), "time": time})
