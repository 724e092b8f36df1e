"""Who holds a context on which GPU, by the fake NVML."""

import asyncio

import pytest
from kinetod.gpus import gpu_reader
from kinetod.gpus.gpu_reader import ContextHolders, GpuReader
from support.machine.gpus import FakeGpus

LONG_S = 30.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOLDERS_DEADLINE_S", "LIST_DEADLINE_S"):
        monkeypatch.setattr(gpu_reader, name, LONG_S)


def test_a_process_may_be_on_several_gpus(gpus: FakeGpus, reader: GpuReader) -> None:
    gpus.say("process 0 77 100 5", "process 1 77 100 5", "process 1 78 100 5")
    found = ContextHolders(reader)
    assert not found.has_gpus  # nobody has looked yet
    assert asyncio.run(found.now()) == {77: {0, 1}, 78: {1}}
    assert found.has_gpus


def test_a_capture_has_a_fresh_reading_and_a_list_the_latest(
    gpus: FakeGpus, reader: GpuReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        found = ContextHolders(reader)
        gpus.say("process 0 77 100 5")
        assert set(await found.lately()) == {77}  # nothing was read yet: it waits
        gpus.say("process 0 78 100 5")
        monkeypatch.setattr(gpu_reader, "FRESH_S", -1.0)
        monkeypatch.setattr(gpu_reader, "LATELY_S", 1000.0)
        assert set(await found.lately()) == {77}
        assert found._reading is not None  # behind the answer
        await found._reading
        assert set(await found.lately()) == {78}
        await found._reading
        gpus.say("process 0 79 100 5")
        assert set(await found.now()) == {79}

    asyncio.run(scenario())


def test_without_a_library_nobody_holds_anything(gpus: FakeGpus, reader: GpuReader) -> None:
    gpus.say("init 9")
    assert asyncio.run(ContextHolders(reader).now()) == {}


def test_what_a_late_driver_said_before_counts(
    gpus: FakeGpus, reader: GpuReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        found = ContextHolders(reader)
        gpus.say("process 0 77 100 5")
        await found.now()
        gpus.say("hang 1")
        reader.read(max_age_s=0, deadline_s=0.05)  # somebody who wants everything
        monkeypatch.setattr(gpu_reader, "FRESH_S", -1.0)
        monkeypatch.setattr(gpu_reader, "HOLDERS_DEADLINE_S", 0.05)
        assert set(await found.now()) == {77}
        monkeypatch.setattr(gpu_reader, "OLD_S", -1.0)
        assert await found.now() == {}

    asyncio.run(scenario())
