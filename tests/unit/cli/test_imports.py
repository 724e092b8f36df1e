"""What the commands that people type often do not import: it would be most of their CPU time."""

import subprocess
import sys

import click
import pytest
from kinetoctl.app import COMMANDS, cli
from kinetoctl.base.common_options import LazyGroup
from kinetoctl.client.host_targets import PlaceOptions
from kinetoctl.options.selection_options import PLACE_OPTIONS
from support.waiting import scaled

MODULES = """
import sys
from kinetoctl.__main__ import main
code = main(sys.argv[1:])
print("MODULES", *sys.modules)
sys.exit(code)
"""
NEVER = {
    *("numpy", "pyarrow", "duckdb", "msgspec", "yaml", "rich", "email.message", "importlib.metadata"),
    *("grpc_status", "google.rpc.error_details_pb2", "kubernetes", "kinetod", "kinetoctl.client.fleet.fleet_run"),
}
GRPC = {"grpc", "asyncio", "ssl", "google.protobuf.descriptor_pool", "kinetoctl.client.daemon_client"}


def imported(*argv: str) -> set[str]:
    found = subprocess.run(
        [sys.executable, "-c", MODULES, *argv], capture_output=True, text=True, timeout=scaled(60), check=False
    )
    return set(found.stdout.splitlines()[-1].removeprefix("MODULES ").split())


@pytest.mark.parametrize(
    ("argv", "others"),
    [
        (("--help",), {*GRPC, "kinetoctl.commands", "json"}),
        (("version", "--client"), GRPC),
        (("version", "--address", "unix:/nowhere"), {"kinetoctl.commands.ps", "kinetoctl.output.result_tables"}),
        (("ps", "--address", "unix:/nowhere"), {"kinetoctl.client.kube", "kinetoctl.client.host_targets"}),
        (("stacks", "7", "--address", "unix:/nowhere"), {"kinetoctl.client.kube", "kinetoctl.client.host_targets"}),
    ],
)
def test_a_frequent_command_does_not_import_what_it_does_not_need(argv: tuple[str, ...], others: set[str]) -> None:
    names = imported(*argv)
    assert "kinetoctl.app" in names
    assert names & (NEVER | others) == set()


INTERRUPTED = """
import sys
from kinetoctl.__main__ import main
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "click":
            sys.meta_path.remove(self)
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
sys.exit(main(["--version"]))
"""


def test_ctrl_c_while_the_command_line_is_imported_is_one_line() -> None:
    found = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=scaled(60), check=False
    )
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "interrupted: stopped at once\n")


def test_the_help_of_the_group_says_of_each_command_what_its_own_help_begins_with() -> None:
    context = click.Context(cli)
    assert isinstance(cli, LazyGroup)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        assert COMMANDS[name][1] == command.get_short_help_str(1000)
    assert list(COMMANDS) == cli.list_commands(context)


def test_the_options_that_name_hosts_are_the_fields_of_place_options() -> None:
    assert tuple(PlaceOptions.__dataclass_fields__) == PLACE_OPTIONS
