"""Names of services and spans in other telemetry: the ids by which a profile is found beside traces and metrics.

Form of a W3C trace context: "00-<trace id, 32 hex digits>-<span id, 16 hex digits>-<flags, 2>"
    (https://www.w3.org/TR/trace-context/). A later version may append members after another "-". Pure.
"""

import re
from typing import NamedTuple, Self

SERVICE_NAME = "service.name"  # of OpenTelemetry's semantic conventions
TRACE_PARENT = "traceparent"  # the key of metadata, headers and labels
TRACE_PARENT_VARIABLE = "TRACEPARENT"  # an environment variable, by OpenTelemetry's specification of carriers
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_IN_NAME = re.compile(r"(?:^|[ ,;])traceparent[=:] ?([0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})$")
_INVALID_VERSION = "ff"


class TraceContext(NamedTuple):
    """One span. trace_id: 32 hex digits; span_id: 16. Neither is all zeros."""

    trace_id: str
    span_id: str

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Returns the span in a traceparent; None if it is not a valid one."""
        found = _FORM.fullmatch(text)
        if found is None or found[1] == _INVALID_VERSION or (found[1] == "00" and found[5]):
            return None
        return cls(found[2], found[3]) if found[2].strip("0") and found[3].strip("0") else None


def split_name(text: str) -> tuple[str, TraceContext | None]:
    """Splits the name of an annotation, "request traceparent=00-…", into the name alone and the span that it names."""
    found = _IN_NAME.search(text)
    context = TraceContext.parse(found[1]) if found else None
    if found is None or context is None:
        return text, None
    return text[: found.start()].strip() or TRACE_PARENT, context
