"""Runs the command, prints its error if there is one, and returns the exit code.

SIGTERM is taken for a Ctrl-C, unless the caller handles or ignores it: what a capture has recorded is kept, and the
terminal is left as it was.
"""

import difflib
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import click
from click.shell_completion import shell_complete

from kinetoctl.app import cli
from kinetoctl.base.common_options import MissingCommand
from kinetoctl.base.reason_codes import advices
from kinetoctl.errors import CliError
from kinetoctl.exit_codes import COMPLETE_VARIABLE, STOPPED, ExitCode
from kinetoctl.output.console import say_text

_NO_CHOICE = re.compile(r"'(.*)' is not one of ", re.DOTALL)  # as click says it


def _say(kind: str, message: str, *, color: str = "red") -> None:
    style = sys.stderr.isatty() and not os.environ.get("NO_COLOR") and "--no-color" not in sys.argv
    label = click.style(f"{kind}:", fg=color, bold=True) if style else f"{kind}:"
    say_text(message, err=True, label=f"{label} ")


def _usage_text(exc: click.ClickException) -> str:
    if isinstance(exc, click.BadParameter) and not isinstance(exc, click.MissingParameter) and exc.param is not None:
        option = (
            exc.param.opts[-1] if isinstance(exc.param, click.Option) else exc.param.human_readable_name.strip("[].")
        )
        return f"{option}: {exc.message}{_like(exc)}"
    return exc.format_message()


def _like(exc: click.BadParameter) -> str:
    """Which of the possible values is like the one that was given."""
    given = _NO_CHOICE.match(exc.message)
    if given is None or exc.param is None or not isinstance(exc.param.type, click.Choice):
        return ""
    like = difflib.get_close_matches(given[1], [str(choice) for choice in exc.param.type.choices], 3)
    return f" Did you mean {' or '.join(like)}?" if like else ""


def _report_usage(exc: click.ClickException) -> int:
    if isinstance(exc, MissingCommand):
        say_text(exc.message, err=True)
        return ExitCode.USAGE
    _say("error", _usage_text(exc))
    if isinstance(exc, click.UsageError) and exc.ctx is not None:
        say_text(f"See `{exc.ctx.command_path} --help`.", err=True)
    return ExitCode.USAGE


def _report(exc: CliError) -> int:
    code = f" [{exc.reason_code}]" if exc.reason_code else ""
    first, newline, rest = str(exc).partition("\n")
    _say("error", f"{first}{code}{newline}{rest}")
    for advice in advices(exc):
        say_text(advice, err=True)
    return exc.exit_code


def _report_broken_pipe() -> int:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter's last flush must not fail
    return ExitCode.BROKEN_PIPE


def _invoke(argv: list[str] | None, group: click.Group, program: str) -> int:
    """Like click's own main, except that a broken pipe does not become exit code 1."""
    instruction = os.environ.get(COMPLETE_VARIABLE)
    if instruction:
        return shell_complete(group, {}, program, COMPLETE_VARIABLE, instruction)
    try:
        with group.make_context(program, list(sys.argv[1:] if argv is None else argv)) as ctx:
            result = group.invoke(ctx)
    except click.exceptions.Exit as exc:  # --help
        result = exc.exit_code
    sys.stdout.flush()
    return int(result or ExitCode.DONE)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a background job of a script
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Has SIGTERM do what SIGINT does, where this process would end at once."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _print_everything() -> None:
    """Has characters that the terminal's encoding does not have printed as "?", in the place of an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def run(argv: list[str] | None, group: click.Group | None, program: str) -> int:
    """Run the command with these arguments (None: the process's). Returns the exit code.

    group, program: the commands (None: all of kinetoctl) and the name, which differ for `kubectl kineto`.
    """
    _print_everything()
    try:
        with _terminated_like_interrupted():
            return _invoke(argv, group or cli, program)
    except CliError as exc:
        return _report(exc)
    except click.ClickException as exc:
        return _report_usage(exc)
    except (KeyboardInterrupt, click.Abort):
        _say("interrupted", STOPPED, color="yellow")
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        return _report_broken_pipe()
    except MemoryError as exc:  # a small trace may ask for very much
        _say("error", f"not enough memory{f': {exc}' if str(exc) else ''}")
        return ExitCode.FAILED
