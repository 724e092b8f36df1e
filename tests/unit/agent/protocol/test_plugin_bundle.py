"""What the daemon packs, agents get; whatever else comes is a ValueError."""

import json
import struct

import pytest
from kineto_agent.protocol.plugin_bundle import MAX_BUNDLE_BYTES, Plugin, PluginFile, Signs, pack, unpack
from support.agent.plugins import plugin

TWO = [
    plugin(libraries={"liba.so": b"\x7fELF\0", "libb.so": b""}, conflicts=frozenset(["jax", "torch"])),
    plugin(
        name="other",
        signs=Signs(libraries=("libo*",), environment=("O=1",)),
        needs_from_start="O=1",
        detach="idle",
        files={"helper.py": PluginFile(((1, "a = 1\n"), (41, "b = 2\n")), True)},
        libraries={"libc.so": b"xyz"},
    ),
]


def test_plug_ins_arrive_as_they_were_packed() -> None:
    assert unpack(pack(TWO)) == TWO
    assert unpack(pack([])) == []
    assert TWO[1].activity_types == {"other_kernel"}


def test_those_of_another_interface_version_are_left_out() -> None:
    assert unpack(pack([TWO[0]._replace(interface_version=2), TWO[1]])) == TWO[1:]


def test_what_is_too_large_for_an_agent_is_not_packed() -> None:
    with pytest.raises(ValueError, match="but at most 16777216 can be sent"):
        pack([TWO[0]._replace(libraries={"liba.so": bytes(MAX_BUNDLE_BYTES)})])


def damaged(change: "dict[str, object]") -> bytes:
    """A content whose only plug-in has these members instead."""
    row = {**Plugin(*TWO[0])._asdict(), "libraries": {}, "conflicts": [], **change}
    head = json.dumps([row]).encode()
    return struct.pack("<8sQ", b"KPLUGIN1", len(head)) + head


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x" * 40,
        pack(TWO)[:-1],
        pack(TWO)[:100],
        struct.pack("<8sQ", b"KPLUGIN1", 1 << 63),
        struct.pack("<8sQ", b"KPLUGIN1", 2) + b"{}"[:1] + b"x",
        struct.pack("<8sQ", b"KPLUGIN1", 4) + b"[[1]",
        struct.pack("<8sQ", b"KPLUGIN1", 3) + b"[1]",
        damaged({"schema": {}}),
        damaged({"schema": {"types": []}}),
        damaged({"files": {"source.py": 7}}),
        damaged({"files": {"source.py": [[[float("inf"), "a = 1"]], False]}}),  # no whole number
        damaged({"signs": [1, 2]}),
        damaged({"libraries": {"liba.so": [0, 1]}}),
        damaged({"libraries": {"liba.so": [-1, 1]}}),
    ],
)
def test_damaged_content_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        unpack(data)
