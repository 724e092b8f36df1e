"""Loads the allowed plug-ins, each in a separate process, and packs them for the agents."""

import asyncio
import hashlib
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
from kineto_agent.protocol import wire
from kineto_agent.protocol.plugin_bundle import Plugin, PluginFile, Signs, pack
from kineto_agent.protocol.schema import TYPES_OF_KINETO

from kinetod.attach.attach_types import Finding, Status
from kinetod.attach.channel.payload import sealed_memfd
from kinetod.attach_helper.messages import MAX_PLUGINS, MAX_SIGNS_BYTES
from kinetod.base.safe_text import clean
from kinetod.plugins.entry_points import LoadAnswer, LoadQuestion, installed
from kinetod.processes.accelerator_signs import OutsideSigns, outside
from kinetod.supervise import child

log = logging.getLogger(__name__)

COMMAND = child.python("kinetod.plugins.load_process")
DEADLINE_S = 10.0  # usually half a second
_MAX_ERRORS = 300
_MAX_REASON = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPlugin:
    """One plug-in that is installed or allowed.

    refused: why it is not used although it is on the allow-list. is_allowed: whether it is on it.
    """

    name: str
    package: str = ""
    version: str = ""
    activity_types: tuple[str, ...] = ()
    is_allowed: bool = True
    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """The plug-ins as sent to each agent. descriptor: a sealed memfd, open as long as the daemon runs."""

    message: wire.Plugins
    descriptor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPlugins:
    """All plug-ins of this daemon, as of its start. parcel: None if there are none for agents.

    signs: external signs of processes that use them.
    """

    known: tuple[LoadedPlugin, ...] = ()
    parcel: Parcel | None = None
    signs: tuple[OutsideSigns, ...] = ()

    @property
    def activity_types(self) -> frozenset[str]:
        """The types that the used plug-ins declare."""
        return frozenset(kind for plugin in self.known for kind in plugin.activity_types)

    def refusals(self, types: Collection[str] = ()) -> list[str]:
        """Which plug-ins of the allow-list are not used, and why, for a caller who wants a trace.

        types: only those that might declare one of these types. A refused one's declaration is unknown, but its own
        types begin with its name, and shared ones are Kineto's.
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
    """Loads the plug-ins of the allow-list, all at the same time. Never raises because of a plug-in."""
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
    """Adds the plug-in to those sent to agents, unless it is refused."""
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
        return LoadAnswer(refused=f"loading it took longer than {deadline_s:g} s")
    if ended.status or len(lines) != 1:
        said = clean(ended.errors[-_MAX_ERRORS:].strip(), _MAX_ERRORS)
        return LoadAnswer(
            refused=f"the process that loads it failed (exit status {ended.status}): {said or 'no message'}"
        )
    try:
        return msgspec.json.decode(lines[0], type=LoadAnswer)
    except msgspec.DecodeError as exc:
        return LoadAnswer(refused=f"the process that loads it returned an invalid answer: {exc}")


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
    """External signs of the plug-ins; those without signs are omitted."""
    return tuple(filter(None, (outside(plugin.name, plugin.signs) for plugin in plugins)))


def _check_signs(signs: tuple[OutsideSigns, ...]) -> None:
    """Raises ValueError if they do not fit into a query to the attach helper."""
    size = len(msgspec.json.encode(signs))
    if len(signs) > MAX_PLUGINS or size > MAX_SIGNS_BYTES:
        raise ValueError(
            f"the signs of all plug-ins ({len(signs)}) take {size} bytes, but the limits are {MAX_PLUGINS} plug-ins "
            f"and {MAX_SIGNS_BYTES} bytes; use fewer plug-ins, or declare fewer or shorter patterns"
        )


def _parcel(plugins: Sequence[Plugin]) -> Parcel:
    data = pack(list(plugins))
    message = wire.Plugins(hashlib.sha256(data).hexdigest(), [plugin.name for plugin in plugins])
    return Parcel(message=message, descriptor=sealed_memfd("kineto-plugins", data))


_NAME = "plugins"  # of the check


def findings(plugins: KnownPlugins) -> Iterator[Finding]:
    """One finding for each plug-in of the allow-list that is not used, and one for the others."""
    yield from _refusals(plugins, Status.PROBLEM)
    parts = [*(f"{_named(plugin)} ({_types(plugin.activity_types)})" for plugin in _used(plugins)), *_off(plugins)]
    if parts or not plugins.known:
        yield Finding(_NAME, Status.OK, "; ".join(parts) or "none are installed")


def of_process(
    plugins: KnownPlugins, *, seen: Collection[str] | None, offers: Mapping[str, Sequence[str]] | None
) -> Iterator[Finding]:
    """Findings about the plug-ins for one process. An unused plug-in prevents no trace.

    seen: plug-ins whose external signs it shows; None: it may not be inspected. offers: the activity types of its
    agent's sources, by name; None: it has no agent.
    """
    yield from _refusals(plugins, Status.NOTE)
    watched = {signs.plugin for signs in plugins.signs}
    parts, unknown = list[str](), False
    for plugin in _used(plugins):
        if offers is not None:
            said = _by_agent(plugin, offers)
        elif seen is not None and plugin.name in watched:
            said = _by_signs(plugin, seen)
        else:
            said, unknown = "only an agent in the process can see its signs", True
        parts.append(f"{_named(plugin)}: {said}")
    parts += _off(plugins)
    if parts or not plugins.known:
        status = Status.UNKNOWN if unknown else Status.OK
        yield Finding(_NAME, status, "; ".join(parts) or "none are installed")


def _by_agent(plugin: LoadedPlugin, offers: Mapping[str, Sequence[str]]) -> str:
    if plugin.name not in offers:
        return "the agent in the process does not have it"
    if types := offers[plugin.name]:
        return f"records {_types(types)}"
    return "records nothing now: the agent finds no sign of its accelerator, or the plug-in declined"


def _by_signs(plugin: LoadedPlugin, seen: Collection[str]) -> str:
    if plugin.name in seen:
        return f"would record {_types(plugin.activity_types)}: the process shows the signs of its accelerator"
    return "no sign of its accelerator is visible from outside"


def _refusals(plugins: KnownPlugins, status: Status) -> Iterator[Finding]:
    for plugin in plugins.known:
        if plugin.refused:
            advice = (
                f"fix it so that `kinetoctl plugin check {plugin.name}` accepts it on this host, or remove it from "
                "plugins.sources; then restart kinetod"
            )
            yield Finding(_NAME, status, f"{plugin.name} is not used: {plugin.refused}", advice)


def _used(plugins: KnownPlugins) -> list[LoadedPlugin]:
    return [plugin for plugin in plugins.known if plugin.is_allowed and not plugin.refused]


def _off(plugins: KnownPlugins) -> list[str]:
    off = [plugin.name for plugin in plugins.known if not plugin.is_allowed]
    return [f"installed, but not in plugins.sources: {', '.join(off)}"] if off else []


def _named(plugin: LoadedPlugin) -> str:
    return f"{plugin.name} {plugin.version}"


def _types(types: Sequence[str]) -> str:
    return ", ".join(types)
