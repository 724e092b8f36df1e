"""What `kinetoctl doctor` and `kinetoctl host` say about plug-ins."""

from collections.abc import Iterator

from kinetod.attach.finding import Finding, Status
from kinetod.plugins.plugin_loader import KnownPlugins, LoadedPlugin


def findings(plugins: KnownPlugins) -> Iterator[Finding]:
    """One for each plug-in of the allow-list that is not used, and one for the others."""
    name = "plugins"
    for plugin in plugins.known:
        if plugin.refused:
            advice = (
                f"correct that until `kinetoctl plugin check {plugin.name}` accepts it on this host, or take it out of "
                "plugins.sources; then restart kinetod"
            )
            yield Finding(name, Status.PROBLEM, f"{plugin.name} is not used: {plugin.refused}", advice)
    used = [_named(plugin) for plugin in plugins.known if plugin.is_allowed and not plugin.refused]
    off = [plugin.name for plugin in plugins.known if not plugin.is_allowed]
    parts = [*used, *([f"installed, but not in plugins.sources: {', '.join(off)}"] if off else [])]
    if parts or not plugins.known:
        yield Finding(name, Status.OK, "; ".join(parts) or "none are installed")


def _named(plugin: LoadedPlugin) -> str:
    return f"{plugin.name} {plugin.version} ({', '.join(plugin.activity_types)})"
