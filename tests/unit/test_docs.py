"""The documentation is complete and true: commands, options, variables, exit codes, reason codes."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import tomllib
from kineto_agent.sources.torch.object_layouts import LAYOUTS
from kineto_agent.system import env
from kineto_protos import endpoints
from kineto_protos.kineto_config import KEYS, Effect
from kinetoctl.app import cli
from kinetoctl.base import common_options
from kinetoctl.exit_codes import MEANINGS, ExitCode
from kinetoctl.kinetod_web import VARIABLES as WEB_VARIABLES
from kinetoctl.options import completers
from kinetod.__main__ import command as kinetod_command
from kinetod.base.errors import Reason, VerdictReason
from kinetod.config.settings import KEYS as KINETOD_KEYS
from kinetod.config.value_kinds import CONFIG_VARIABLE
from kinetod.hooks.hook_types import VARIABLES as HOOK_VARIABLES
from kinetod.kineto_ipc.network_namespaces import VARIABLES as LIBKINETO_VARIABLES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
COMMON = {"--address", "--output", "-o", "--no-color", "--quiet", "-q", "--timeout", "--help", "-h"}
_OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z0-9-]*")
_VARIABLE = re.compile(r"\bKINETOD?_[A-Z][A-Z_]*[A-Z]\b")


def read(name: str) -> str:
    return (ROOT / name).read_text()


def commands(group: click.Group, *path: str) -> Iterator[tuple[str, click.Command]]:
    """Every command with its full name; groups that do nothing by themselves are left out."""
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None
        if isinstance(found, click.Group):
            yield from commands(found, *path, name)
        if not isinstance(found, click.Group) or found.invoke_without_command:
            yield " ".join(("kinetoctl", *path, name)), found


def options(command: click.Command) -> set[str]:
    return {text for parameter in command.params if isinstance(parameter, click.Option) for text in parameter.opts}


def section(text: str, title: str) -> str:
    """A second-level section of a document."""
    match = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert match, f"no section {title!r}"
    return match[1]


def table_options(text: str) -> set[str]:
    """The options in the first column of the tables."""
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `-")]
    return {option for cell in cells for option in _OPTION.findall(cell)}


COMMANDS = dict(commands(cli))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_section_with_exactly_its_options(name: str) -> None:
    text = section(read("docs/cli.md"), name)
    documented = table_options(text)
    own = options(COMMANDS[name]) - COMMON
    # Their selectors are those of `trace`, in a sentence.
    if name in ("kinetoctl ps", "kinetoctl stacks", "kinetoctl top"):
        documented |= set(re.findall(r"`(--[a-z-]+)`", text))
    assert documented == own


def test_no_section_is_about_a_command_that_is_gone() -> None:
    sections = set(re.findall(r"^## (kinetoctl .*)$", read("docs/cli.md"), re.MULTILINE))
    assert sections == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_takes_the_common_options(name: str) -> None:
    assert options(COMMANDS[name]) >= COMMON - {"--help", "-h"}


def test_the_common_options_are_documented() -> None:
    assert table_options(section(read("docs/cli.md"), "Options of every command")) == COMMON


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_has_a_help_text(name: str) -> None:
    command = COMMANDS[name]
    assert command.help
    for parameter in command.params:
        assert not isinstance(parameter, click.Option) or parameter.help, parameter.name


def test_exit_codes_are_documented_in_the_help_and_in_the_docs() -> None:
    rows = dict(re.findall(r"^\| (\d+) \| (.*?) \|$", section(read("docs/cli.md"), "Exit codes"), re.MULTILINE))
    assert {int(code) for code in rows} == set(ExitCode)
    context = click.Context(cli, info_name="kinetoctl")
    for code, meaning in MEANINGS.items():
        assert re.search(rf"^ +{code.value}  {re.escape(meaning)}$", cli.get_help(context), re.MULTILINE)
        assert rows[str(code.value)].replace("`", "") == meaning


def test_kinetod_options_and_variables_are_documented() -> None:
    text = section(read("docs/configuration.md"), "kinetod")
    keys = {key.option for key in KINETOD_KEYS if key.option}
    assert table_options(text) | keys == options(kinetod_command) | {"--help"}
    assert table_options(text) & keys == set()
    for key in KINETOD_KEYS:
        (row,) = (line for line in text.splitlines() if line.startswith(f"| `{key.name}` |"))
        assert key.option in row and f"`{key.variable}`" in row


def agent_variables() -> set[str]:
    """The values of the constants in kineto_agent/system/env.py that name variables."""
    return {value for name, value in vars(env).items() if name.isupper() and str(value).startswith("KINETO_")}


def test_every_variable_is_documented_and_every_documented_one_exists() -> None:
    known = agent_variables() | set(endpoints.CLIENT_VARIABLES)
    text = read("docs/configuration.md")
    rows = set(re.findall(r"^\| `(KINETO_[A-Z_]+)` \|", text, re.MULTILINE))
    assert rows == known
    assert f"`{common_options.NO_COLOR_VARIABLE}`" in text


def test_documents_name_no_variable_that_does_not_exist() -> None:
    daemon = {CONFIG_VARIABLE, *(key.variable for key in KINETOD_KEYS)}
    others = {*HOOK_VARIABLES, *WEB_VARIABLES, *LIBKINETO_VARIABLES}
    known = agent_variables() | set(endpoints.CLIENT_VARIABLES) | daemon | others
    for path in (ROOT / "README.md", *sorted(DOCS.glob("*.md"))):
        assert set(_VARIABLE.findall(path.read_text())) <= known, path.name


def test_the_variables_of_the_web_front_end_are_documented() -> None:
    assert set(WEB_VARIABLES) <= set(re.findall(r"`(KINETOD_WEB_[A-Z_]+)`", read("docs/web.md")))


def test_the_variables_of_hooks_are_documented() -> None:
    text = section(read("docs/orchestration.md"), "When a capture has ended")
    assert re.findall(r"^\| `(KINETO_[A-Z_]+)` \|", text, re.MULTILINE) == list(HOOK_VARIABLES)


def test_variables_are_read_by_their_constants_only() -> None:
    """A variable's name as a literal outside the modules that define it would escape the other tests."""
    defined = {
        "agent/kineto_agent/system/env.py",
        "protos/kineto_protos/endpoints.py",
        "cli/kinetoctl/commands/run.py",
    }
    defined |= {"daemon/kinetod/config/value_kinds.py", "daemon/kinetod/hooks/hook_types.py"}
    defined |= {"daemon/kinetod/kineto_ipc/network_namespaces.py", "cli/kinetoctl/dynolog_migration.py"}
    startup = {"agent/kineto_agent/bootstrap/inject/sitecustomize.py"}  # runs before anything can be imported
    for folder in ("agent/kineto_agent", "daemon", "cli", "protos"):
        for path in (ROOT / folder).rglob("*.py"):
            if str(path.relative_to(ROOT)) in defined | startup:
                continue
            text = path.read_text()
            tree = ast.parse(text if "KINETO" in text else "")  # to parse all takes seconds
            literals = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
            found = {text for text in literals if isinstance(text, str) and _VARIABLE.fullmatch(text)}
            assert not found, path


def test_kinetoctl_run_uses_the_agents_own_variables() -> None:
    from kinetoctl.commands import run

    assert (run.AGENT_VARIABLE, run.SOCKET_VARIABLE) == (env.AGENT, env.AGENT_SOCKET)


def agent_reason_codes() -> set[str]:
    """Reason codes that the agent's code gives: the first argument of these calls, where it is a literal."""
    calls = {"SourceError", "Refusal", "Ending"}
    codes = set()
    for path in (ROOT / "agent" / "kineto_agent").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in calls:
                codes |= {a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)}
    return {code for code in codes if re.fullmatch(r"[A-Z][A-Z0-9_]+", code)}


def test_every_reason_code_is_documented() -> None:
    documented = set(re.findall(r"`([A-Z][A-Z0-9_]+)`", read("docs/errors.md")))
    known = {*map(str, Reason), *map(str, VerdictReason), *agent_reason_codes()}
    assert known - documented == set()


@pytest.mark.parametrize(
    ("title", "effect"),
    [("Keys that count", Effect.USED), ("Keys without effect", Effect.NONE), ("Old keys", Effect.LEGACY)],
)
def test_every_key_of_kinetos_configuration_is_documented_with_what_becomes_of_it(title: str, effect: Effect) -> None:
    rows = re.findall(
        r"^\| `([A-Z0-9_]+)` \| (\w+) \| .+ \| .+ \|$", section(read("docs/kineto.md"), title), re.MULTILINE
    )
    assert dict(rows) == {name: key.kind.value for name, key in KEYS.items() if key.effect is effect}


def test_the_versions_of_torch_that_the_observer_knows_are_documented() -> None:
    first, last = (f"{major}.{minor}" for major, minor in (min(LAYOUTS), max(LAYOUTS)))
    assert f"torch {first} to {last}," in section(read("docs/agent.md"), "What it records")


def test_every_activity_type_that_is_offered_for_completion_is_documented() -> None:
    text = section(read("docs/agent.md"), "What it records")
    assert {name for name in completers.ACTIVITIES if f"`{name}`" not in text} == set()


def test_documents_show_only_options_that_exist() -> None:
    known = {option for command in COMMANDS.values() for option in options(command)} | COMMON
    known |= options(kinetod_command)
    # of python, ssh, head, journalctl, systemctl and training scripts
    foreign = {"-m", "-c", "-L", "-1", "-u", "--now", "--epochs", "--nproc-per-node"}
    for path in (ROOT / "README.md", *sorted(DOCS.glob("*.md"))):
        code = re.findall(r"`[^`\n]+`|^(?:kinetoctl|kinetod) .*$", path.read_text(), re.MULTILINE)
        used = {option for text in code if "kineto" in text for option in _OPTION.findall(text)}
        assert used - known - foreign == set(), path.name


def test_the_choice_of_tools_is_about_all_that_people_ask_about() -> None:
    rows = section(read("docs/overview.md"), "Which tool when")
    tools = ("kinetoctl", "py-spy", "memray", "Nsight Systems", "Nsight Compute", "HTA", "torch.profiler")
    assert [tool for tool in tools if f"| {tool}" not in rows and f"`{tool} " not in rows] == []


def test_links_between_documents_lead_somewhere() -> None:
    for path in (ROOT / "README.md", *sorted(DOCS.glob("*.md"))):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
            assert "://" in target or (path.parent / target).exists(), f"{path.name}: {target}"


def test_advice_to_install_something_names_packages_of_our_extras() -> None:
    """They can be had however kinetod itself was installed; no index has kinetod."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    offered = {re.split(r"[<>=;\[ ]", line)[0] for lines in project["optional-dependencies"].values() for line in lines}
    texts = [path.read_text() for folder in ("daemon", "cli") for path in (ROOT / folder).rglob("*.py")]
    texts += [path.read_text() for path in DOCS.glob("*.md")]
    advised = {word for text in texts for word in re.findall(r"pip install ([a-z][\w-]+)", text)}
    assert advised - offered <= {"nvidia-cuda-cupti"}  # a newer libcupti


def test_no_text_advises_to_install_kinetod_from_an_index_which_has_none() -> None:
    folders = ("agent", "cli", "daemon", "deploy", "docs", "examples")
    paths = [*ROOT.glob("*.md"), *(path for folder in folders for path in (ROOT / folder).rglob("*"))]
    texts = {".py", ".md", ".html", ".template", ".toml", ".sh", ".ipynb"}
    wrong = re.compile(r"pip install (?:-\S+ )*['\"]?kineto(?:d|ctl|-agent|_trace)\b(?! @)")
    assert not [path for path in paths if path.suffix in texts and wrong.search(path.read_text())]


def test_code_advises_to_install_packages_by_one_function() -> None:
    sources = [path for folder in ("cli", "daemon") for path in (ROOT / folder).rglob("*.py")]
    described = {"metrics_settings.py", "__main__.py", "__init__.py", "install_advice.py"}  # no advice for this host
    assert {path.name for path in sources if "pip install" in path.read_text()} <= described
