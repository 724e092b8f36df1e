"""The modules of live executables go through an arena, and what is left out is said."""

import sys
from types import ModuleType
from typing import Any, List

import pytest
from kineto_agent.protocol.records import PART_HEAD
from kineto_agent.sources.jax import hlo_modules
from support.agent.arenas import ArenaReader
from support.waiting import scaled

LIMIT = 1 << 20


class Module:
    def __init__(self, name: str, data: bytes = b"module") -> None:
        self.name = name
        self._data = data

    def as_serialized_hlo_module_proto(self) -> bytes:
        return self._data


class Executable:
    def __init__(self, *modules: Module) -> None:
        self._modules = list(modules)

    def hlo_modules(self) -> List[Module]:
        if not self._modules:
            raise RuntimeError("it has been deleted")
        return self._modules


class Client:
    platform_version = "cuda 13000"

    def __init__(self, platform: str, *executables: Executable) -> None:
        self.platform = platform
        self._executables = executables

    def live_executables(self) -> List[Executable]:
        return list(self._executables)


def program(monkeypatch: pytest.MonkeyPatch, *clients: Client) -> None:
    """A program whose JAX has these backends."""
    bridge: Any = ModuleType("jax._src.xla_bridge")
    bridge._backends = {str(number): client for number, client in enumerate(clients)}
    monkeypatch.setitem(sys.modules, "jax._src.xla_bridge", bridge)


@pytest.fixture(autouse=True)
def _in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that gets no processor for a while has time enough."""
    monkeypatch.setattr(hlo_modules, "LONGEST_READ_S", scaled(20))
    monkeypatch.setattr(hlo_modules, "TOTAL_S", scaled(20))


def handed_over() -> "tuple[List[bytes], List[str]]":
    """The modules and the warnings."""
    session = hlo_modules.session(LIMIT)
    assert session is not None
    reader = ArenaReader(session.arena_fd)
    session.start()
    outcome = session.stop()
    data = b"".join(buffer.data for buffer in reader.ready())
    session.close()
    found = []
    while data:
        (size,) = PART_HEAD.unpack_from(data)
        found.append(data[PART_HEAD.size : PART_HEAD.size + size])
        data = data[PART_HEAD.size + size :]
    assert outcome.metadata == {"modules": len(found)}
    return found, outcome.warnings


def test_modules_of_gpus_are_handed_over_one_behind_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Client("gpu", Executable(Module("a", b"first"), Module("b", b"second")), Executable(Module("c", b"")))
    program(monkeypatch, Client("cpu", Executable(Module("host"))), gpu)
    assert handed_over() == ([b"first", b"second", b""], [])


def test_without_a_gpu_there_is_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    program(monkeypatch, Client("cpu", Executable(Module("host"))))
    assert hlo_modules.session(LIMIT) is None


def test_an_executable_that_is_being_freed_is_left_out_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    program(monkeypatch, Client("gpu", Executable(), Executable(Module("a", b"first"))))
    found, (warning,) = handed_over()
    assert found == [b"first"]
    assert warning.endswith("one could not be read")


def test_a_module_that_took_long_to_read_is_not_serialised_with_the_gil(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hlo_modules, "LONGEST_READ_S", -1.0)
    program(monkeypatch, Client("gpu", Executable(Module("jit_train"))))
    found, (warning,) = handed_over()
    assert found == []
    assert warning.endswith("jit_train: too large")


def test_reading_ends_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hlo_modules, "TOTAL_S", -1.0)
    program(monkeypatch, Client("gpu", Executable(Module("a")), Executable(Module("b"))))
    found, (warning,) = handed_over()
    assert found == []
    assert warning.endswith("all others: too many")
