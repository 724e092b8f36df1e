"""kineto_agent: the light agent inside a traced process."""

__version__ = "0.1.0"
