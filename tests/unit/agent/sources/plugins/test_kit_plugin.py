"""A plug-in whose collector is in C: it comes with the plug-in and records through the kit."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict

import pytest
from kineto_agent.sources.interface import SourceRequest
from kineto_agent.sources.plugins.guarded_source import PluginSource, ProcessView
from kineto_agent.sources.plugins.libraries import PluginLibraries
from support.agent.agent_daemon import ArenaReader
from support.agent.plugins import plugin
from support.machine.native import fake_vendor
from support.waiting import scaled

SOURCE = """
import sys
from kineto_agent.sources.plugins.api import kit_session, load_library

class Toy:
    on_request = frozenset()
    def activity_types(self):
        return ["toy_kernel"]
    def prepare(self, request):
        library = sys.toy_library = load_library("libtoy_collector.so")
        return kit_session(library, "the toy", {"toy_kernel": (1,)}, "/opt/fake/libfake.so", request)

SOURCE = Toy()
"""
REQUEST = SourceRequest(frozenset(["toy_kernel"]), 1 << 20, {})


@pytest.fixture
def contents() -> Dict[str, bytes]:
    return {"libtoy_collector.so": fake_vendor(pushes=False).read_bytes()}


def test_its_records_reach_the_arena(contents: Dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "toy_library", None, raising=False)
    source = PluginSource(plugin(SOURCE, libraries=contents))
    source.look(ProcessView())
    assert source.activity_types() == ["toy_kernel"]
    for count in (1, 70):  # the library is loaded once
        session = source.prepare(REQUEST)
        reader = ArenaReader(os.dup(session.arena_fd))
        session.start()
        launching: Any = sys.toy_library  # type: ignore[attr-defined]
        launching.fake_vendor_launch(b"kernel", count, 0)
        outcome = session.stop()
        assert (outcome.counts.records, outcome.counts.dropped) == (count, 0)
        assert sum(map(len, reader.take())) == 64 * count
        session.close()
        reader.close()


def test_what_the_library_refuses_is_the_plug_ins_reason(contents: Dict[str, bytes]) -> None:
    source = PluginSource(plugin(SOURCE.replace("libtoy_collector", "libother"), libraries=contents))
    source.look(ProcessView())
    source.activity_types()
    with pytest.raises(Exception, match=r"the plug-in has no file libother\.so"):
        source.prepare(REQUEST)


def test_each_content_is_loaded_although_its_descriptor_had_another_one_before(contents: Dict[str, bytes]) -> None:
    """dlopen knows libraries by their paths: the second is the first one otherwise."""
    first = PluginLibraries(contents).load("libtoy_collector.so")
    second = PluginLibraries({"libtoy_collector.so": fake_vendor(pushes=True).read_bytes()}).load("libtoy_collector.so")
    assert first._name != second._name
    places = [ctypes.cast(library.kineto_vendor, ctypes.c_void_p).value for library in (first, second)]
    assert places[0] != places[1]
    open_files = [os.path.realpath(str(entry)) for entry in Path("/proc/self/fd").iterdir()]
    assert not [path for path in open_files if "kineto-libtoy_collector" in path]


UNLOADABLE = """
from kineto_agent.sources.plugins.libraries import PluginLibraries
import os
before = len(os.listdir("/proc/self/fd"))
try:
    PluginLibraries({"liba.so": b"no library"}).load("liba.so")
except OSError as error:
    print(type(error).__name__, len(os.listdir("/proc/self/fd")) == before)
"""


def test_a_file_that_is_no_library_is_an_error_and_leaves_nothing_open() -> None:
    ran = subprocess.run([sys.executable, "-c", UNLOADABLE], capture_output=True, text=True, timeout=scaled(30))
    assert ran.stdout == "OSError True\n", ran.stderr
