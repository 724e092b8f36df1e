"""A plug-in as its package declares it, for tests of what kinetod takes and refuses."""

from typing import Any

from kinetod.plugins.accelerator import Accelerator, Signs

from support.agent.plugins import GOOD, toy_schema

# The module of a package whose plug-in is good. Tests put lines behind it.
MODULE = """
import support.service.plugin_sources as sources
PLUGIN = sources.accelerator()
"""


def accelerator(**members: Any) -> Accelerator:
    """A good one, with these members instead."""
    return Accelerator(
        **{
            "name": "toy",
            "signs": Signs(modules=("sys",)),
            "agent_files": {"source.py": GOOD.encode()},
            "schema": toy_schema(),
            **members,
        }
    )
