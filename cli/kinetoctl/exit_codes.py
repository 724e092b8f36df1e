"""The program's name and its exit codes, which are part of its interface: a test compares them with docs/cli.md."""

from enum import IntEnum

# What the command is called.
PROGRAM = "kinetoctl"
STOPPED = "stopped at once"  # what a Ctrl-C did
COMPLETE_VARIABLE = "_KINETOCTL_COMPLETE"  # click derives the variable's name from the program's


class ExitCode(IntEnum):
    """The exit status of kinetoctl, for scripts."""

    DONE = 0
    INTERNAL = 1
    USAGE = 2
    NOT_FOUND = 3
    PARTIAL = 4
    FAILED = 5
    DENIED = 6
    UNREACHABLE = 7
    CANCELLED = 8
    REGRESSED = 9
    NOT_EXECUTABLE = 126
    COMMAND_NOT_FOUND = 127
    INTERRUPTED = 130
    BROKEN_PIPE = 141


MEANINGS: dict[ExitCode, str] = {
    ExitCode.DONE: "done: a trace was written and verified (size and SHA-256)",
    ExitCode.INTERNAL: "internal error of kinetoctl or kinetod",
    ExitCode.USAGE: "usage error: an option or argument is invalid",
    ExitCode.NOT_FOUND: "not found: no process matches, or no such capture",
    ExitCode.PARTIAL: "partial: a trace was written, but something is missing",
    ExitCode.FAILED: (
        "failed: there is no trace, or its file could not be written or verified; "
        "kinetoctl diff --fail-on: no verdict is possible"
    ),
    ExitCode.DENIED: "permission denied",
    ExitCode.UNREACHABLE: "the daemon cannot be reached, or did not respond in time",
    ExitCode.CANCELLED: "somebody else cancelled the capture",
    ExitCode.REGRESSED: "kinetoctl diff --fail-on: something slowed down by more than the limit",
    ExitCode.NOT_EXECUTABLE: "kinetoctl run: the command cannot be executed",
    ExitCode.COMMAND_NOT_FOUND: "kinetoctl run: no such command",
    ExitCode.INTERRUPTED: "interrupted by Ctrl-C or SIGTERM; what a running capture had recorded was kept",
    ExitCode.BROKEN_PIPE: "stdout was closed by its reader (for example by head in a pipe)",
}
