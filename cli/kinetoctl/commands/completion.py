"""`kinetoctl completion`."""

import click
from click.shell_completion import get_completion_class

from kinetoctl.base.common_options import common_options
from kinetoctl.base.program import COMPLETE_VARIABLE, PROGRAM
from kinetoctl.exit_codes import ExitCode
from kinetoctl.output.console import say_text


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@common_options
def command(shell: str) -> int:
    """Print the completion script for a shell.

    \b
    bash  eval "$(kinetoctl completion bash)"         in ~/.bashrc
    zsh   eval "$(kinetoctl completion zsh)"          in ~/.zshrc
    fish  kinetoctl completion fish | source          in ~/.config/fish/config.fish
    """
    maker = get_completion_class(shell)
    assert maker is not None
    root = click.get_current_context().find_root().command
    say_text(maker(root, {}, PROGRAM, COMPLETE_VARIABLE).source())
    return ExitCode.DONE
