"""The daemon's errors, and every reason code that a caller may see.

KinetodError
├── InvalidRequest        the caller's request makes no sense
├── NotFound              the named object does not exist
├── AlreadyExists         the caller's key is taken
├── NotIdentified         the caller cannot be identified
├── NotPermitted          the caller may not do this
├── Precondition          valid request, wrong state of target, store or capture
├── Exhausted             a limit of this host is reached
├── OutOfRange            an offset beyond the end
├── DataLoss              a stored file differs from what was written
└── Stopping              the daemon is shutting down
StartError                the daemon cannot start (never reaches a caller)

The classes map to gRPC status codes in `kinetod.rpc.error_status`; the codes are documented in docs/errors.md.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from kineto_trace.base.visible_text import one_line


class Reason(StrEnum):
    """Reason codes of refused calls (google.rpc.ErrorInfo.reason)."""

    INVALID_FIELD = "INVALID_FIELD"
    NO_SUCH_PROCESS = "NO_SUCH_PROCESS"
    NO_MATCH = "NO_MATCH"
    NO_SUCH_CAPTURE = "NO_SUCH_CAPTURE"
    NO_SUCH_TARGET = "NO_SUCH_TARGET"
    NO_SUCH_FILE = "NO_SUCH_FILE"
    NOT_YOUR_PROCESS = "NOT_YOUR_PROCESS"
    NOT_IDENTIFIED = "NOT_IDENTIFIED"
    NOT_DELEGATED = "NOT_DELEGATED"
    UNKNOWN_CERTIFICATE = "UNKNOWN_CERTIFICATE"
    NO_ROLE = "NO_ROLE"
    ROLE_NEEDED = "ROLE_NEEDED"
    POD_EXEC_NEEDED = "POD_EXEC_NEEDED"
    KUBERNETES_UNAVAILABLE = "KUBERNETES_UNAVAILABLE"
    TRACING_REFUSED = "TRACING_REFUSED"
    NO_AGENT = "NO_AGENT"
    ATTACH_NOT_PERMITTED = "ATTACH_NOT_PERMITTED"  # these are the codes of attach.attach_types.AttachCode
    ATTACH_TRACED = "ATTACH_TRACED"
    ATTACH_UNSUITABLE = "ATTACH_UNSUITABLE"
    ATTACH_UNSUPPORTED = "ATTACH_UNSUPPORTED"
    ATTACH_LIMIT = "ATTACH_LIMIT"
    ATTACH_SECCOMP = "ATTACH_SECCOMP"
    ATTACH_TIMEOUT = "ATTACH_TIMEOUT"
    ATTACH_GONE = "ATTACH_GONE"
    ATTACH_REPLACED = "ATTACH_REPLACED"
    ATTACH_FAILED = "ATTACH_FAILED"
    AGENT_INCOMPATIBLE = "AGENT_INCOMPATIBLE"
    NOT_POLLING = "NOT_POLLING"
    LIBKINETO_UNAVAILABLE = "LIBKINETO_UNAVAILABLE"
    BUSY = "BUSY"
    STORE_NOT_WRITABLE = "STORE_NOT_WRITABLE"
    CAPTURE_RUNNING = "CAPTURE_RUNNING"
    CAPTURE_PINNED = "CAPTURE_PINNED"
    CAPTURE_NOT_ARMED = "CAPTURE_NOT_ARMED"
    CAPTURE_STARTED = "CAPTURE_STARTED"
    OBJECT_STORE_FAILED = "OBJECT_STORE_FAILED"
    IDEMPOTENCY_KEY_REUSED = "IDEMPOTENCY_KEY_REUSED"
    TOO_MANY_REQUESTS = "TOO_MANY_REQUESTS"
    TOO_MANY_CALLS = "TOO_MANY_CALLS"
    TOO_MANY_STREAMS = "TOO_MANY_STREAMS"
    TOO_MANY_CAPTURES = "TOO_MANY_CAPTURES"
    QUOTA_EXCEEDED = "QUOTA_EXCEEDED"
    TOO_MANY_TARGETS = "TOO_MANY_TARGETS"
    TOO_MANY_WATCHERS = "TOO_MANY_WATCHERS"
    LOW_DISK = "LOW_DISK"
    OFFSET_BEYOND_END = "OFFSET_BEYOND_END"
    FILE_DAMAGED = "FILE_DAMAGED"
    COUNTERS_BUSY = "COUNTERS_BUSY"  # these are the codes of counters.interface.CounterCode
    COUNTERS_NOT_PERMITTED = "COUNTERS_NOT_PERMITTED"
    COUNTERS_UNAVAILABLE = "COUNTERS_UNAVAILABLE"
    COUNTERS_INVALID_METRIC = "COUNTERS_INVALID_METRIC"
    COUNTERS_FAILED = "COUNTERS_FAILED"
    NOT_YOUR_GPU = "NOT_YOUR_GPU"
    DAEMON_STOPPING = "DAEMON_STOPPING"
    INTERNAL = "INTERNAL"


class VerdictReason(StrEnum):
    """Reason codes of target verdicts given by the daemon (Target.reason_code)."""

    AGENT_SILENT = "AGENT_SILENT"
    AGENT_STUCK = "AGENT_STUCK"
    AGENT_LOST = "AGENT_LOST"
    AGENT_INCOMPATIBLE = "AGENT_INCOMPATIBLE"
    AGENT_ERROR = "AGENT_ERROR"
    BUSY = "BUSY"
    BAD_ARENA = "BAD_ARENA"
    NOTHING_RECORDED = "NOTHING_RECORDED"
    LIBKINETO_UNAVAILABLE = "LIBKINETO_UNAVAILABLE"
    NOT_POLLED = "NOT_POLLED"
    NOT_TAKEN = "NOT_TAKEN"
    NOT_TRAINING_YET = "NOT_TRAINING_YET"
    CANCELLED_BY_PROGRAM = "CANCELLED_BY_PROGRAM"
    NO_FILE = "NO_FILE"
    ITERATIONS_NOT_REACHED = "ITERATIONS_NOT_REACHED"
    RECORDS_DROPPED = "RECORDS_DROPPED"
    RECORDS_UNREADABLE = "RECORDS_UNREADABLE"
    TARGET_EXITED = "TARGET_EXITED"
    TARGET_REPLACED = "TARGET_REPLACED"
    ATTACH_LIMIT = "ATTACH_LIMIT"
    NO_MEMORY = "NO_MEMORY"
    MEMORY_SHORT = "MEMORY_SHORT"
    TRACE_LIMIT = "TRACE_LIMIT"
    QUOTA_EXCEEDED = "QUOTA_EXCEEDED"
    DISK_FULL = "DISK_FULL"
    STORE_IO = "STORE_IO"
    CLOCK_SET = "CLOCK_SET"
    CANCELLED = "CANCELLED"
    NOT_STARTED = "NOT_STARTED"
    DAEMON_STOPPED = "DAEMON_STOPPED"
    DAEMON_RESTARTED = "DAEMON_RESTARTED"
    DECODE_FAILED = "DECODE_FAILED"
    DECODE_TIMEOUT = "DECODE_TIMEOUT"
    FILE_DAMAGED = "FILE_DAMAGED"
    FILE_INCOMPLETE = "FILE_INCOMPLETE"
    INTERNAL = "INTERNAL"


class KinetodError(Exception):
    """A refused call. The message says what happened, to which object, and what to do next."""

    def __init__(self, reason: Reason, message: str, **metadata: str | int) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.audited: Mapping[str, Any] = {}  # for the audit log only
        self.metadata: Mapping[str, str] = {name: str(value) for name, value in metadata.items()}


class InvalidRequest(KinetodError):
    """The request makes no sense; `metadata["field"]` is the dotted path of the field."""


class NotFound(KinetodError):
    """No such process, capture, target or file."""


class AlreadyExists(KinetodError):
    """An idempotency key was already used for another request."""


class NotIdentified(KinetodError):
    """The connection does not identify the caller."""


class NotPermitted(KinetodError):
    """The target belongs to somebody else, or the caller's roles do not allow this."""


class Precondition(KinetodError):
    """The target, the store or the capture is not in the state that this call needs."""


class Exhausted(KinetodError):
    """A limit of this host is reached; try again later or raise the limit."""


class OutOfRange(KinetodError):
    """An offset lies beyond the end of the file."""


class DataLoss(KinetodError):
    """A stored file is missing or was changed."""


class Stopping(KinetodError):
    """The daemon is stopping and takes no more requests."""

    def __init__(self) -> None:
        super().__init__(Reason.DAEMON_STOPPING, "the daemon is stopping; try again once it is back")


class StartError(Exception):
    """The daemon or the attach helper cannot start; the message goes to its standard error."""


def invalid(field: str, problem: str) -> InvalidRequest:
    """The error for one wrong field. field: its dotted path; problem: the text after the colon."""
    return InvalidRequest(Reason.INVALID_FIELD, f"{field}: {problem}", field=field)


def check_shown(field: str, text: str) -> None:
    """Rejects text with control characters, since others see it in terminals and logs. Raises InvalidRequest."""
    if one_line(text) != text:
        raise invalid(field, f"must not contain control characters, got '{one_line(text[:80])}'")
