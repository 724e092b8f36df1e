"""How the programs of the daemon's side end: what click found wrong is printed, and becomes an exit status."""

import click

INTERRUPTED = 130


def exit_status(command: click.Command) -> int:
    """Runs a command with this process's arguments; its own exit status, 2 for usage errors, 130 after Ctrl-C.

    Raises what else the command raises.
    """
    try:
        return int(command.main(standalone_mode=False) or 0)
    except click.ClickException as exc:
        exc.show()
        return exc.exit_code
    except click.Abort:
        return INTERRUPTED
