"""Checks whether decoders of hostile data can be confined on this host."""

from collections.abc import Iterable, Iterator

from kinetod.attach.attach_types import Finding, Status
from kinetod.host_checks.check_protocol import CheckQuestion
from kinetod.sandbox.confinement import Support, support

_ADVICE = (
    "Landlock needs Linux 5.13 with `landlock` among lsm= on its command line; a container's or unit's own filter must "
    "let landlock_* and seccomp through. captures.decode_sandbox decides what kinetod does without them"
)


def check(_question: CheckQuestion) -> Iterable[Finding]:
    """Asks the kernel from a child of the daemon."""
    return findings(support())


def findings(found: Support) -> Iterator[Finding]:
    """The finding about the sandbox."""
    name = "sandbox"
    if found.missing:
        detail = f"decoders are not fully confined: {'; '.join(found.missing)}"
        yield Finding(name, Status.NOTE, detail, _ADVICE)
    else:
        yield Finding(name, Status.OK, f"decoders are confined by {found.present}")
