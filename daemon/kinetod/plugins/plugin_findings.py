"""What `kinetoctl doctor` and `kinetoctl host` say about plug-ins: of the host, and of one process."""

from collections.abc import Collection, Iterator, Mapping, Sequence

from kinetod.attach.finding import Finding, Status
from kinetod.plugins.plugin_loader import KnownPlugins, LoadedPlugin

_NAME = "plugins"  # of the check


def findings(plugins: KnownPlugins) -> Iterator[Finding]:
    """One for each plug-in of the allow-list that is not used, and one for the others."""
    yield from _refusals(plugins, Status.PROBLEM)
    parts = [*(f"{_named(plugin)} ({_types(plugin.activity_types)})" for plugin in _used(plugins)), *_off(plugins)]
    if parts or not plugins.known:
        yield Finding(_NAME, Status.OK, "; ".join(parts) or "none are installed")


def of_process(
    plugins: KnownPlugins, *, seen: Collection[str] | None, offers: Mapping[str, Sequence[str]] | None
) -> Iterator[Finding]:
    """Likewise for a process: which ones serve it. A plug-in that is not used prevents no trace.

    seen: those whose signs it shows from outside; None: it may not be looked at. offers: the activity types of its
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
            said, unknown = "only an agent in the process sees its signs", True
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
    return "records nothing now: the agent finds no sign of its accelerator, or the plug-in declines"


def _by_signs(plugin: LoadedPlugin, seen: Collection[str]) -> str:
    if plugin.name in seen:
        return f"would record {_types(plugin.activity_types)}: the process shows the signs of its accelerator"
    return "no sign of its accelerator is seen from outside"


def _refusals(plugins: KnownPlugins, status: Status) -> Iterator[Finding]:
    for plugin in plugins.known:
        if plugin.refused:
            advice = (
                f"correct that until `kinetoctl plugin check {plugin.name}` accepts it on this host, or take it out of "
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
