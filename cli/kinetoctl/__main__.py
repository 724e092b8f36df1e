"""Entry point. Ctrl-C ends the program in one line even while the command line is still being imported."""

import sys
from typing import TYPE_CHECKING

from kinetoctl.exit_codes import PROGRAM, STOPPED

if TYPE_CHECKING:
    import click


def main(argv: list[str] | None = None, *, group: "click.Group | None" = None, program: str = PROGRAM) -> int:
    """Run kinetoctl with these arguments (default: the process's). Returns the exit code.

    group, program: the commands and the name, which differ for `kubectl kineto`.
    """
    try:
        if argv is None:  # the process is ours
            from kineto_trace.base.without_pandas import go_without_pandas

            go_without_pandas()
        from kinetoctl import command_line
    except KeyboardInterrupt:
        from kinetoctl.exit_codes import ExitCode
        from kinetoctl.output.console import say

        say(f"interrupted: {STOPPED}", err=True)
        return ExitCode.INTERRUPTED
    return command_line.run(argv, group, program)


if __name__ == "__main__":
    sys.exit(main())
