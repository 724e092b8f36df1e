"""Names of plug-ins: those of their entry points, sources and schemas."""

import re

PLUGIN_NAME = re.compile(r"[a-z][a-z0-9]{1,15}")


def checked_plugin(text: str) -> str:
    """The name. Raises ValueError."""
    if not PLUGIN_NAME.fullmatch(text):
        raise ValueError(f"expected the name of a plug-in (2 to 16 lower-case letters and digits), got {text!r:.60}")
    return text
