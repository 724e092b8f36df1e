"""No modules import each other in a circle, not even for types alone; import-linter finds no such circle in a layer."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "agent/kineto_agent",
    "cli/kinetoctl",
    "daemon/kinetod",
    "daemon/kineto_trace",
    "protos/kineto_protos",
)


def imports(folder: Path) -> dict[str, set[str]]:
    """What each module of a package imports of it, wherever in the file."""
    modules = {_name(path, folder): path for path in folder.rglob("*.py")}
    return {name: {each for each in _imported(name, path, modules) if each != name} for name, path in modules.items()}


def _name(path: Path, folder: Path) -> str:
    parts = path.relative_to(folder.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(name: str, path: Path, modules: dict[str, Path]) -> Iterator[str]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package.split(".")[: len(package.split(".")) - node.level + 1], *base.split(".")])
            inside = [f"{base}.{alias.name}" for alias in node.names]
            yield from (each if each in modules else base for each in inside if each in modules or base in modules)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_imports_itself_over_others(package: str) -> None:
    circle: list[str] = []
    try:
        TopologicalSorter(imports(ROOT / package)).prepare()
    except CycleError as found:
        circle = found.args[1]
    assert circle == []


def test_a_circle_for_types_and_one_inside_a_function_are_found(tmp_path: Path) -> None:
    package = tmp_path / "circle"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "one.py").write_text("if TYPE_CHECKING:\n    from circle.two import Two\n")
    (package / "two.py").write_text("def two():\n    from circle import one\n")
    assert imports(package) == {"circle": set(), "circle.one": {"circle.two"}, "circle.two": {"circle.one"}}
