"""The version of the agent, and of the daemon, the trace library and the CLI that are released with it."""

__version__ = "0.1.0"
