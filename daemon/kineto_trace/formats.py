"""The files that a trace can be had as. Imports nothing, so that daemon and CLI can name formats without numpy."""

SUFFIXES = {"chrome": ".json.gz", "chrome-json": ".json"}  # Chrome trace, compressed or plain
DEFAULT_FORMAT = "chrome"
FILE_NAMES = {name: f"trace{suffix}" for name, suffix in SUFFIXES.items()}  # in a target's folder
