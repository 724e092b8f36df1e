"""Reads a process's other telemetry from its environment: OpenTelemetry's resource, and the W3C trace context.

Theory of operation
    A span that is current in a running program is a context variable of one thread or task, which cannot be read from
    outside without stopping the interpreter; the environment at its start is fixed and harmless to read. Both variables
    of the resource are OpenTelemetry's (the specification of its SDKs); TRACEPARENT is how a launcher passes its span
    to a program. The process controls all of it, so sizes are bounded, and it serves as a description only.
"""

import re
from collections.abc import Mapping
from urllib.parse import unquote

from kineto_trace.base.telemetry_ids import SERVICE_NAME, TRACE_PARENT_VARIABLE, TraceContext

from kinetod.base.safe_text import clean

SERVICE_VARIABLE = "OTEL_SERVICE_NAME"
RESOURCE_VARIABLE = "OTEL_RESOURCE_ATTRIBUTES"
VARIABLES = (TRACE_PARENT_VARIABLE, SERVICE_VARIABLE, RESOURCE_VARIABLE)
MAX_ATTRIBUTES = 16
MAX_BYTES = 512  # of all names and values: the facts of many processes must fit into one message
MAX_NAME_CHARS = 64
MAX_VALUE_CHARS = 256
MAX_TRACE_PARENT_CHARS = 64
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")


def trace_parent(environ: Mapping[str, str]) -> str:
    """The trace context in which the process was started; "" for none or an invalid one."""
    return checked_trace_parent(environ.get(TRACE_PARENT_VARIABLE, "").strip())


def checked_trace_parent(text: str) -> str:
    """The text if it is a valid trace context of a normal length; otherwise ""."""
    return text if len(text) <= MAX_TRACE_PARENT_CHARS and TraceContext.parse(text) else ""


def resource(environ: Mapping[str, str]) -> dict[str, str]:
    """The attributes of the process's own telemetry, from its environment."""
    parts = [part.partition("=") for part in environ.get(RESOURCE_VARIABLE, "").split(",")]
    named = {name.strip(): unquote(value.strip()) for name, separator, value in parts if separator}
    if service := environ.get(SERVICE_VARIABLE, "").strip():
        named = {SERVICE_NAME: service, **{name: value for name, value in named.items() if name != SERVICE_NAME}}
    return checked_resource(named)


def checked_resource(named: Mapping[str, str]) -> dict[str, str]:
    """The attributes with valid names, as far as they fit."""
    found: dict[str, str] = {}
    room = MAX_BYTES
    for name, text in named.items():
        value = clean(text, MAX_VALUE_CHARS)
        room -= len(name) + len(value.encode())
        if len(found) == MAX_ATTRIBUTES or room < 0:
            break
        if value and len(name) <= MAX_NAME_CHARS and _NAME.fullmatch(name):
            found[name] = value
    return found
