"""Activity types that nobody knows: refused before there is a capture."""

import difflib
from collections.abc import Iterable, Sequence

from kineto_agent.sources.registry import ACTIVITY_TYPES

from kinetod.agents.agent_hub import ConnectedAgent
from kinetod.base.errors import invalid
from kinetod.plugins.plugin_loader import KnownPlugins

_NO_PLUGINS = KnownPlugins()


def check_known(
    wanted: Sequence[str], agents: Iterable[ConnectedAgent | None], plugins: KnownPlugins = _NO_PLUGINS
) -> None:
    """Raises InvalidRequest for a type that is neither common, nor declared by a plug-in, nor offered by these agents.

    None stands for a process without agent, which says itself why it is not traced; without any agent, nothing is
    checked. The text names plug-ins that are not used, if the type may be one of theirs.
    """
    offers = [set(agent.activity_types()) for agent in agents if agent is not None]
    offered = sorted(set().union(*offers))
    for index, name in enumerate(wanted if offers else ()):
        if name in ACTIVITY_TYPES or name in offered or name in plugins.activity_types:
            continue
        like = difflib.get_close_matches(name, [*offered, *sorted(ACTIVITY_TYPES)], 1)
        guess = f" (did you mean {like[0]}?)" if like else ""
        there = "; ".join([", ".join(offered) or "nothing", *plugins.refusals([name])])
        text = f"no source knows the activity type {name!r:.80}{guess}; the selected processes offer {there}"
        raise invalid(f"spec.activity_types[{index}]", text)
