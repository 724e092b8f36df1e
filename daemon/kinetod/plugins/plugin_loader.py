"""Loads the plug-ins that the configuration allows, each in a process of its own, and packs them for the agents."""

import asyncio
import hashlib
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import msgspec
from kineto_agent.protocol import wire
from kineto_agent.protocol.plugin_bundle import Plugin, PluginFile, Signs, pack
from kineto_agent.protocol.schema import TYPES_OF_KINETO

from kinetod.attach.channel.payload import sealed_memfd
from kinetod.attach_helper.messages import MAX_PLUGINS, MAX_SIGNS_BYTES
from kinetod.base.safe_text import clean
from kinetod.plugins.entry_points import installed
from kinetod.plugins.load_protocol import LoadAnswer, LoadQuestion
from kinetod.processes.accelerator_signs import OutsideSigns, outside
from kinetod.supervise import child

log = logging.getLogger(__name__)

COMMAND = child.python("kinetod.plugins.load_process")
DEADLINE_S = 10.0  # half a second is usual
_MAX_ERRORS = 300
_MAX_REASON = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPlugin:
    """One plug-in that is installed or allowed.

    refused: why it is not used although it is on the allow-list. is_allowed: whether it is there.
    """

    name: str
    package: str = ""
    version: str = ""
    activity_types: tuple[str, ...] = ()
    is_allowed: bool = True
    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """What each agent gets. descriptor: a sealed memfd, open as long as the daemon runs."""

    message: wire.Plugins
    descriptor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPlugins:
    """All plug-ins of this daemon, as they were at its start. parcel: None if there are none for agents.

    signs: by which processes of the used ones are known from outside.
    """

    known: tuple[LoadedPlugin, ...] = ()
    parcel: Parcel | None = None
    signs: tuple[OutsideSigns, ...] = ()

    @property
    def activity_types(self) -> frozenset[str]:
        """What the used ones declare."""
        return frozenset(kind for plugin in self.known for kind in plugin.activity_types)

    def refusals(self, types: Collection[str] = ()) -> list[str]:
        """For whoever wants a trace: which plug-ins of the allow-list are not used, and why.

        types: only those that might declare one of these types. What a refused one declares is not known, but types of
        its own begin with its name, and those that it may share with others are Kineto's.
        """
        shared = not types or any(kind in TYPES_OF_KINETO for kind in types)
        return [
            f"the plug-in {plugin.name} is not used: {plugin.refused}"
            for plugin in self.known
            if plugin.refused and (shared or any(kind.startswith(f"{plugin.name}_") for kind in types))
        ]


async def load(
    allowed: Sequence[str], *, command: Sequence[str] = COMMAND, deadline_s: float = DEADLINE_S
) -> KnownPlugins:
    """Loads those of the allow-list, all at the same time. Never raises for what a plug-in does."""
    names = list(dict.fromkeys(allowed))
    answers = await asyncio.gather(*(_ask(name, command, deadline_s) for name in names))
    packed: list[Plugin] = []
    known = [_taken(name, answer, packed) for name, answer in zip(names, answers, strict=True)]
    for entry in await asyncio.to_thread(installed):
        if entry.name not in names:
            package, version = clean(entry.package, 80), clean(entry.version, 40)
            known.append(LoadedPlugin(name=clean(entry.name, 40), package=package, version=version, is_allowed=False))
    for plugin in known:
        if plugin.refused:
            log.error("the plug-in %s is not used: %s", plugin.name, plugin.refused)
        elif plugin.is_allowed:
            log.info("the plug-in %s is sent to agents: %s %s", plugin.name, plugin.package, plugin.version)
    return KnownPlugins(known=tuple(known), parcel=_parcel(packed) if packed else None, signs=_signs(packed))


def _taken(name: str, answer: LoadAnswer, packed: list[Plugin]) -> LoadedPlugin:
    """Adds the plug-in to those that agents get, unless it is refused."""
    loaded = LoadedPlugin(
        name=name,
        package=clean(answer.package, 80),
        version=clean(answer.version, 40),
        refused=clean(answer.refused, _MAX_REASON),
    )
    if loaded.refused:
        return loaded
    try:
        plugin = _for_agents(answer)
        pack([*packed, plugin])
        _check_signs(_signs([*packed, plugin]))
        types = tuple(sorted(plugin.activity_types))
    except (KeyError, TypeError, ValueError) as exc:
        return replace(loaded, refused=f"it cannot be sent to agents: {clean(str(exc), _MAX_REASON)}")
    packed.append(plugin)
    return replace(loaded, activity_types=types)


async def _ask(name: str, command: Sequence[str], deadline_s: float) -> LoadAnswer:
    lines: list[bytes] = []
    question = msgspec.json.encode(LoadQuestion(name=name))
    try:
        ended = await child.ask_once(command, question, lines.append, deadline_s=deadline_s)
    except (OSError, ValueError) as exc:
        return LoadAnswer(refused=f"the process that loads it failed: {exc}")
    if ended.status is None:
        return LoadAnswer(refused=f"loading it did not end within {deadline_s:g} s")
    if ended.status or len(lines) != 1:
        said = clean(ended.errors[-_MAX_ERRORS:].strip(), _MAX_ERRORS)
        return LoadAnswer(refused=f"loading it ended its process (exit status {ended.status}): {said or 'no message'}")
    try:
        return msgspec.json.decode(lines[0], type=LoadAnswer)
    except msgspec.DecodeError as exc:
        return LoadAnswer(refused=f"the process that loads it gave no valid answer: {exc}")


def _for_agents(answer: LoadAnswer) -> Plugin:
    declared = answer.declaration
    return Plugin(
        name=declared["name"],
        signs=Signs(*map(tuple, declared["signs"])),
        schema=declared["schema"],
        files={name: PluginFile(file.pieces, file.annotations) for name, file in answer.python.items()},
        libraries=answer.libraries,
        conflicts=frozenset(declared["conflicts"]),
        needs_from_start=declared["needs_from_start"],
        detach=declared["detach"],
    )


def _signs(plugins: Sequence[Plugin]) -> tuple[OutsideSigns, ...]:
    """What is seen of them from outside, without those of which nothing is."""
    return tuple(filter(None, (outside(plugin.name, plugin.signs) for plugin in plugins)))


def _check_signs(signs: tuple[OutsideSigns, ...]) -> None:
    """Raises ValueError if they do not fit into a question to the attach helper."""
    size = len(msgspec.json.encode(signs))
    if len(signs) > MAX_PLUGINS or size > MAX_SIGNS_BYTES:
        raise ValueError(
            f"the signs of all plug-ins ({len(signs)}) have {size} bytes, at most {MAX_SIGNS_BYTES} of {MAX_PLUGINS} "
            "plug-ins are looked for; declare fewer or shorter patterns"
        )


def _parcel(plugins: Sequence[Plugin]) -> Parcel:
    data = pack(list(plugins))
    message = wire.Plugins(hashlib.sha256(data).hexdigest(), [plugin.name for plugin in plugins])
    return Parcel(message=message, descriptor=sealed_memfd("kineto-plugins", data))
