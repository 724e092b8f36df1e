"""The memfd with a daemon's plug-ins, as an agent reads it: plug-ins that are packed the same again, or an error."""

import random
import struct
from collections.abc import Iterator, Sequence

from kineto_agent.protocol.plugin_bundle import Plugin, PluginFile, Signs, pack, unpack
from kineto_agent.sources.plugins.guarded_source import PluginSource, ProcessView
from support.agent.plugins import plugin

from fuzz import mutate
from fuzz.parts import changed_json

_HEAD = struct.Struct("<8sQ")
_view = ProcessView()


def play(data: bytes) -> None:
    try:
        plugins = unpack(data)
    except ValueError:
        return
    for each in plugins:
        assert all(content in data for content in each.libraries.values())
        source = PluginSource(each)
        source.look(_view)
        assert source.declared_types == set(each.schema["types"])
        assert source.looks_for().startswith(each.name)
    if sum(len(content) for each in plugins for content in each.libraries.values()) <= len(data):  # they may overlap
        assert _texts(unpack(pack(plugins))) == _texts(plugins)


def _texts(plugins: Sequence[Plugin]) -> list[str]:
    """As texts, since a schema may have numbers that differ from themselves; a set has its members in any order."""
    return [f"{sorted(each.conflicts)} {each._replace(conflicts=frozenset())}" for each in plugins]


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Other values in the head, whose length is right."""
    if len(data) < _HEAD.size:
        return mutate.damaged(data, rng)
    magic, length = _HEAD.unpack_from(data)
    head = changed_json(data[_HEAD.size : _HEAD.size + length], rng)
    return _HEAD.pack(magic, len(head)) + head + data[_HEAD.size + length :]


def seeds() -> Iterator[bytes]:
    """None, one, and two with libraries; and one of another interface version."""
    one = plugin()
    other = plugin(
        name="other",
        signs=Signs(libraries=("libo*.so",), environment=("O=1",), device_files=("/dev/o[0-9]",)),
        needs_from_start="O=1",
        detach="idle",
        files={"helper.py": PluginFile(((1, "a = 1\n"), (41, "b = 2\n")), True)},
        libraries={"libc.so": b"xyz", "libd.so": b""},
        conflicts=frozenset(("jax", "torch")),
    )
    yield pack([])
    yield pack([one])
    yield pack([one, other])
    yield pack([one._replace(interface_version=7), other])
