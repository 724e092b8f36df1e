"""kinetod: the daemon that traces running processes on demand."""

from kineto_agent import __version__

__all__ = ["__version__"]
