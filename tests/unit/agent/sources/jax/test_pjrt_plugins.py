"""A PJRT plug-in's profiler through its C interface, and plug-ins that are not as they should be."""

import ctypes
from typing import Any, List

import pytest
from kineto_agent.protocol.records import PART_HEAD
from kineto_agent.sources.interface import SourceError, SourceRequest
from kineto_agent.sources.jax import pjrt_plugins
from kineto_agent.sources.jax.pjrt_plugins import PluginsSource
from support.agent.arenas import ArenaReader
from support.machine.native import fake_pjrt_plugin

REQUEST = SourceRequest(frozenset(("kernel",)), 1 << 20, {})


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The library, loaded. It does what FAKE_PJRT says; monkeypatch sets it for C as well."""
    monkeypatch.delenv("FAKE_PJRT", raising=False)
    return ctypes.CDLL(str(fake_pjrt_plugin()))


def recorded() -> bytes:
    session = PluginsSource().prepare(REQUEST)
    reader = ArenaReader(session.arena_fd)
    try:
        session.start()
        outcome = session.stop()
        assert outcome.metadata["started_ns"] > 1 << 60
        data: bytes = b"".join(buffer.data for buffer in reader.ready())
    finally:
        session.close()
    (size,) = PART_HEAD.unpack_from(data)
    assert len(data) == PART_HEAD.size + size
    return data[PART_HEAD.size :]


def refusal() -> "tuple[str, str]":
    with pytest.raises(SourceError) as caught:
        recorded()
    return caught.value.reason_code, caught.value.reason


def calls(data: bytes) -> str:
    """The calls of this session that the plug-in had got when it gave the data, which has those of earlier ones too."""
    return data.rstrip(b"\0").decode().rpartition("x")[2].replace("XSPACE", "")


def test_a_loaded_plugin_offers_kernels_and_only_on_request(plugin: Any) -> None:
    source = PluginsSource()
    assert source.activity_types() == ["kernel"]
    assert source.on_request == {"kernel"}


def test_the_data_is_collected_with_two_calls(plugin: Any) -> None:
    assert calls(recorded()) == "cstdd"


def test_the_data_is_taken_from_the_address_that_the_first_call_returns(
    plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_PJRT", "owned")
    assert calls(recorded()) == "cstd"


@pytest.mark.parametrize(
    ("peculiar", "code", "text"),
    [
        ("small", "PJRT_PROFILER_UNAVAILABLE", "its PLUGIN_Profiler_Api has 72 bytes, not 80"),
        ("none", "PJRT_PROFILER_UNAVAILABLE", "has no profiler"),
        ("swapped", "PJRT_PROFILER_FAILED", "its profiler has an unknown version"),
        ("refuse-create", "PJRT_PROFILER_FAILED", "refused to create: another session is active"),
        ("refuse-start", "PJRT_PROFILER_FAILED", "refused to start: another session is active"),
        ("refuse-collect", "PJRT_PROFILER_FAILED", "refused to collect_data: another session is active"),
    ],
)
def test_a_plugin_that_does_not_do_it_is_refused_with_the_reason(
    plugin: Any, monkeypatch: pytest.MonkeyPatch, peculiar: str, code: str, text: str
) -> None:
    monkeypatch.setenv("FAKE_PJRT", peculiar)
    found, reason = refusal()
    assert (found, text in reason) == (code, True), reason
    assert "pjrt_plugin_fake.so" in reason
    assert plugin.fake_pjrt_errors() == 0


def test_an_address_that_is_none_is_an_error_and_no_crash() -> None:
    with pytest.raises(SourceError, match="is not in a known form: no memory is mapped at 0x10"):
        pjrt_plugins.functions_at(16, "libtpu.so")


def test_plugins_of_gpus_are_left_alone(tmp_path: Any) -> None:
    def line(path: str) -> str:
        return "7f0000000000-7f0000001000 r-xp 00000000 08:01 1  %s\n" % path

    maps = tmp_path / "maps"
    others: List[str] = ["/x/xla_cuda_plugin.so", "/x/pjrt_c_api_rocm_plugin.so"]
    maps.write_text("".join(map(line, [*others, "/x/libnumpy.so"])))
    assert PluginsSource(str(maps)).activity_types() == []
    maps.write_text("".join(map(line, [*others, "/x/libtpu.so"])))
    assert PluginsSource(str(maps)).activity_types() == ["kernel"]
