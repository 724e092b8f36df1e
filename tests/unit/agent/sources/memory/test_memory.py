"""The memory sources against a torch with CUDA that is a fake, and that fake against a real torch."""

import inspect
import json
import pickle
import sys
from typing import Any, List, Tuple

import pytest
from kineto_agent.protocol.records import (
    MEMORY_ALLOCATED,
    MEMORY_EVENT,
    MEMORY_FREED,
    MEMORY_OUT_OF_MEMORY,
    MEMORY_RESERVED,
)
from kineto_agent.sources.interface import SourceError, SourceRequest
from kineto_agent.sources.memory import allocator_history
from kineto_agent.sources.memory.allocator_history import MAX_ENTRIES, ONLY_CUDA, MemoryEventsSource, MemorySource
from kineto_agent.system.memory_use import anonymous_bytes
from support.agent.arenas import ArenaReader
from support.agent.python_child import environment
from support.targets import torch_forks
from support.targets.fake_torch import SEGMENT_BYTES, FakeTorch, entry

LIMIT = 8 << 20


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    fake = FakeTorch()
    fake.install(monkeypatch)
    monkeypatch.setattr(allocator_history, "MAX_ENTRIES", 100)
    return fake


def ready_bytes(session: Any) -> bytes:
    with ArenaReader(session.arena_fd) as reader:
        return b"".join(buffer.data for buffer in sorted(reader.ready(), key=lambda buffer: buffer.sequence))


def request(activity_type: str, **options: Any) -> SourceRequest:
    return SourceRequest(frozenset((activity_type,)), LIMIT, options)


def snapshot_session(**options: Any) -> Any:
    return MemorySource().prepare(request("memory_snapshot", **options))


def events_session() -> Any:
    return MemoryEventsSource().prepare(request("cpu_instant_event"))


@pytest.mark.parametrize("make", [snapshot_session, events_session])
def test_a_full_history_takes_a_bounded_amount_of_memory_and_returns_it(
    make: Any, torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    torch.install(monkeypatch)
    told: List[int] = []

    def full_history() -> Any:
        trace = [entry("alloc", (1 << 40) + number, 1000 + number, number) for number in range(MAX_ENTRIES)]
        told.append(anonymous_bytes())
        return {"segments": [], "device_traces": [trace]}

    torch.module.cuda.memory._snapshot = full_history
    before = anonymous_bytes()
    session = make()
    session.start()
    session.stop()
    session.close()
    assert told[0] - before < 64 << 20
    assert anonymous_bytes() - before < 16 << 20


def test_a_snapshot_is_the_pickle_of_what_torch_tells(torch: FakeTorch) -> None:
    session = snapshot_session()
    session.start()
    torch.allocate(512, 1000)
    outcome = session.stop()
    data = ready_bytes(session)
    value = pickle.loads(data)
    assert value["segments"][0]["blocks"][0]["address"] == 512
    assert [entry["action"] for entry in value["device_traces"][0]] == ["alloc"]
    assert (outcome.metadata["size_bytes"], outcome.metadata["entries"]) == (len(data), 1)
    assert outcome.metadata["took_ns"] > 0
    assert data[:2] == b"\x80\x04"  # what the visualiser in the browser reads
    session.close()


def test_history_is_on_for_the_window_only_and_as_cheap_as_can_be(torch: FakeTorch) -> None:
    session = snapshot_session()
    assert torch.history is None
    session.start()
    assert torch.calls == [("all", None, "python", allocator_history.MAX_ENTRIES)]
    session.stop()
    assert torch.history is None
    session.close()


def test_stacks_are_recorded_on_request(torch: FakeTorch) -> None:
    session = snapshot_session(with_stack=True)
    session.start()
    assert torch.calls[0][:3] == ("all", "all", "python")
    session.stop()
    session.close()


def test_the_programs_own_history_is_used_and_left_on(torch: FakeTorch) -> None:
    torch.module.cuda.memory._record_memory_history(max_entries=9)
    torch.allocate(512, 1000)
    session = snapshot_session()
    session.start()
    outcome = session.stop()
    session.close()
    assert torch.history == {"max_entries": 9}
    assert len(torch.calls) == 1
    assert outcome.warnings == ["the program records its allocations itself: its own history was used and left on"]
    assert outcome.metadata["entries"] == 1


def test_a_history_that_the_program_switches_on_meanwhile_is_left_on(torch: FakeTorch) -> None:
    session = snapshot_session()
    session.start()
    torch.module.cuda.memory._record_memory_history(max_entries=9)
    outcome = session.stop()
    session.close()
    assert torch.history == {"max_entries": 9}
    assert "switched the recording of its allocations on" in outcome.warnings[0]


def test_a_history_that_the_program_switches_off_meanwhile_is_told(torch: FakeTorch) -> None:
    session = snapshot_session()
    session.start()
    torch.module.cuda.memory._record_memory_history(None)
    assert "off: nothing was recorded from then on" in session.stop().warnings[0]
    session.close()


def test_torchs_functions_are_as_before_afterwards(torch: FakeTorch) -> None:
    before = torch.module._C._cuda_record_memory_history
    session = snapshot_session()
    session.start()
    assert torch.module._C._cuda_record_memory_history is not before
    session.stop()
    session.close()
    assert torch.module._C._cuda_record_memory_history == before


def test_a_full_history_is_told(torch: FakeTorch) -> None:
    session = snapshot_session()
    session.start()
    for address in range(allocator_history.MAX_ENTRIES + 5):
        torch.allocate(address, 1)
    outcome = session.stop()
    session.close()
    assert outcome.metadata["entries"] == allocator_history.MAX_ENTRIES
    assert "device 0: more than" in outcome.warnings[0]


def test_a_session_that_is_closed_early_leaves_no_history_on(torch: FakeTorch) -> None:
    session = snapshot_session()
    session.start()
    session.close()
    assert torch.history is None


def test_snapshot_and_events_share_one_history(torch: FakeTorch) -> None:
    snapshot, events = snapshot_session(), events_session()
    snapshot.start()
    events.start()
    torch.allocate(512, 1000)
    assert snapshot.stop().metadata["entries"] == 1
    assert torch.history is not None
    assert events.stop().counts.records == 1
    assert torch.history is None
    assert len(torch.calls) == 2
    snapshot.close()
    events.close()


def recorded(session: Any) -> List[Tuple[int, ...]]:
    return [tuple(each) for each in MEMORY_EVENT.iter_unpack(ready_bytes(session))]


def test_events_are_allocations_frees_and_what_the_allocator_holds(torch: FakeTorch) -> None:
    torch.blocks.append({"address": 1, "size": 50, "requested_size": 50, "state": "active_allocated"})
    session = events_session()
    session.start()
    torch.note("segment_alloc", 4096, SEGMENT_BYTES)
    torch.allocate(512, 1000)
    torch.allocate(2048, 300)
    torch.free(512)
    torch.note("oom", 77, 1 << 40)
    outcome = session.stop()
    assert [event[1:] for event in recorded(session)] == [
        (4096, SEGMENT_BYTES, 7, 0, MEMORY_RESERVED),
        (512, 1000, 7, 0, MEMORY_ALLOCATED),
        (2048, 300, 7, 0, MEMORY_ALLOCATED),
        (512, 1000, 7, 0, MEMORY_FREED),
        (0, 1 << 40, 7, 0, MEMORY_OUT_OF_MEMORY),
    ]
    assert outcome.metadata["totals"] == {"0": (350, SEGMENT_BYTES)}
    assert outcome.warnings == [ONLY_CUDA]
    session.close()


def test_what_was_before_the_recording_is_no_event(torch: FakeTorch) -> None:
    torch.module.cuda.memory._record_memory_history(max_entries=9)
    torch.trace.append({"action": "alloc", "addr": 1, "size": 1, "stream": 0, "time_us": 12345})
    session = events_session()
    session.start()
    torch.allocate(512, 1000)
    session.stop()
    assert [event[1] for event in recorded(session)] == [512]
    session.close()


def refusal(monkeypatch: pytest.MonkeyPatch) -> str:
    with pytest.raises(SourceError) as caught:
        snapshot_session()
    return "%s: %s" % (caught.value.reason_code, caught.value.reason)


def test_it_says_why_there_is_no_snapshot(torch: FakeTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.initialized = False
    assert refusal(monkeypatch).startswith("NO_CUDA: the program has not used CUDA yet")
    torch.initialized = True
    torch.backend = "cudaMallocAsync"
    assert refusal(monkeypatch).startswith("NO_CUDA_HISTORY: the program uses torch's allocator 'cudaMallocAsync'")
    del torch.module.cuda.memory._record_memory_history_impl
    assert refusal(monkeypatch).startswith("TORCH_TOO_OLD: torch 2.13.0+cu130 is too old")
    torch.module.version.cuda = None
    assert refusal(monkeypatch).startswith("NO_CUDA: this torch (2.13.0+cu130) is built without CUDA")
    monkeypatch.delitem(sys.modules, "torch")
    assert refusal(monkeypatch).startswith("NO_TORCH: torch is not imported")


def test_nothing_is_offered_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert MemorySource().activity_types() == MemoryEventsSource().activity_types() == []


def test_a_history_that_torch_refuses_is_an_error(torch: FakeTorch) -> None:
    session = snapshot_session()
    torch.fails = "no"
    with pytest.raises(SourceError) as caught:
        session.start()
    assert caught.value.reason_code == "MEMORY_HISTORY_FAILED"
    session.close()


def test_a_snapshot_that_torch_refuses_is_an_error_and_the_history_ends(torch: FakeTorch) -> None:
    session = snapshot_session()
    session.start()
    torch.module.cuda.memory._snapshot = None
    with pytest.raises(SourceError) as caught:
        session.stop()
    assert caught.value.reason_code == "MEMORY_SNAPSHOT_FAILED"
    assert torch.history is None
    session.close()


REAL = """
import inspect, json
import torch.cuda.memory as memory
names = ("_record_memory_history_impl", "_snapshot")
print(json.dumps({name: list(inspect.signature(getattr(memory, name)).parameters) for name in names}))
"""


@pytest.mark.torch
def test_the_fake_has_the_signatures_of_torch(torch: FakeTorch) -> None:
    done = torch_forks.run("-c", REAL, env=environment())
    assert done.returncode == 0, done.stderr
    memory = torch.module.cuda.memory
    names = ("_record_memory_history_impl", "_snapshot")
    fake = {name: list(inspect.signature(getattr(memory, name)).parameters) for name in names}
    assert json.loads(done.stdout) == fake


CPU = """
import torch
from kineto_agent.sources.interface import SourceError, SourceRequest
from kineto_agent.sources.memory.allocator_history import MemorySource
assert MemorySource().activity_types() == ["memory_snapshot"]
try:
    MemorySource().prepare(SourceRequest(frozenset(["memory_snapshot"]), 1 << 20, {}))
except SourceError as exc:
    print(exc.reason_code, exc.reason)
"""


@pytest.mark.torch
def test_a_torch_for_the_cpu_is_refused_with_the_reason() -> None:
    done = torch_forks.run("-c", CPU, env=environment())
    if "+cpu" in done.stdout:
        assert "is built without CUDA" in done.stdout
    assert done.stdout.startswith("NO_CUDA"), done.stderr
