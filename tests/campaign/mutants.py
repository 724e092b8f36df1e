"""usage: mutants.py [--count N] [--seed N] [--limit SECONDS] [--also TEST] [MODULE …]

Breaks modules of the product (files or folders; none: all) in one place at a time. Runs the unit tests of the same
path, then those of the same folder and those that import the module, then those named by --also, each until one fails.
Prints a line for each mutant, and a summary. The tree never changes: tests run in a mount namespace in which a layer in
memory lies over it, with the broken file and whatever they write. What they build they build each time, unless the tree
has it. All that they started ends with the namespace. Linux with overlayfs, as root.
"""

import argparse
import ast
import copy
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).parents[2]
UNIT = {"agent/kineto_agent": "agent", "cli/kinetoctl": "cli", "daemon/kineto_trace": "trace"}
UNIT |= {"daemon/kinetod": "daemon", "protos/kineto_protos": "protos"}  # each package's folder in tests/unit
MOUNT_AND_RUN = """mount -t tmpfs none "$0" && mkdir "$0/upper" "$0/work" &&
mount -t overlay none -o "lowerdir=$1,upperdir=$0/upper,workdir=$0/work" "$1" && cd "$1" &&
if [ "$2" != "$3" ]; then cp -p "$2" "$3"; fi && shift 3 && "$@"; exit $?"""
NAMESPACE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", MOUNT_AND_RUN)
PYTEST = (sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider")
PASSED, NO_TESTS = 0, 5
_PAIRS = ((ast.Eq, ast.NotEq), (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.In, ast.NotIn), (ast.Is, ast.IsNot))
SWAPPED: "dict[type[Any], type[Any]]" = {old: new for pair in _PAIRS for old, new in (pair, pair[::-1])}
FOR_READERS = {"annotation", "returns", "decorator_list", "type_params", "bases", "keywords"}  # keywords: of classes
CONDITIONS, NO_CONDITIONS, FOR_A_LOG = (ast.If, ast.IfExp, ast.While), ("TYPE_CHECKING", "True"), ("log.", "_log.")


# Of a place in a module: parent, field, place in the field if that is a list, what is there, what to put there.
Site = tuple[ast.AST, str, Optional[int], Any, ast.AST]


def main() -> int:
    """Runs the mutants. Returns 1 if one survived."""
    parser = argparse.ArgumentParser(usage=(__doc__ or "").partition("\n")[0].removeprefix("usage: "))
    parser.add_argument("modules", nargs="*", type=Path)
    parser.add_argument("--count", type=int, help="so many, chosen at random (default: all)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=600, help="seconds for each set of tests")
    parser.add_argument("--also", action="append", default=[], help="a file or folder of tests")
    options = parser.parse_args()
    known = [(path, number) for path in _modules(options.modules) for number, _ in enumerate(_sites(_tree(path)))]
    chosen = random.Random(options.seed).sample(known, min(options.count or len(known), len(known)))
    fates: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for serial, (path, number) in enumerate(sorted(chosen), 1):
            broken = Path(folder, f"{serial}.py")
            what = _break(path, number, broken)
            os.utime(broken, (serial, serial))  # compiled modules are told apart by time and size
            fate = next(_caught(broken, path, options.also, options.limit), "survived")
            fates[fate] += 1
            print(f"{fate}: {path.relative_to(ROOT)}:{what}", flush=True)
    print(f"{len(chosen)} of {len(known)} mutants, seed {options.seed}:", *(f"{fates[fate]} {fate}" for fate in fates))
    return int(fates["survived"] > 0)


def _modules(named: Sequence[Path]) -> "list[Path]":
    found = [path.resolve() for path in named] or [ROOT / package for package in UNIT]
    files = {file for path in found for file in ([path] if path.is_file() else path.rglob("*.py"))}
    return sorted(file for file in files if "_pb2" not in file.name and "_native" not in file.parts)


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _caught(broken: Path, path: Path, also: Sequence[str], limit: float) -> Iterator[str]:
    """The sets of tests that fail with the broken module."""
    package = next(package for package in UNIT if path.is_relative_to(ROOT / package))
    inside = path.relative_to(ROOT / package)
    folder = ROOT / "tests/unit" / UNIT[package] / inside.parent
    own = set(folder.glob(f"test_{inside.stem}*.py"))
    while not any(folder.glob("test_*.py")) and folder != ROOT / "tests/unit":
        folder = folder.parent
    name = ".".join((Path(package).name, *inside.with_suffix("").parts))
    grep = ("grep", "-rlFw", "--include=test_*.py", name, str(ROOT / "tests/unit"))
    importing = subprocess.run(grep, stdout=subprocess.PIPE, text=True).stdout.split()
    near = {*folder.glob("test_*.py"), *map(Path, importing)} - own
    for fate, tests in (("caught by own tests", own), ("by those nearby", near), ("by others", map(Path, also))):
        given = tuple(sorted(map(str, tests)))
        if given and not _pass(broken, path, given, limit):
            yield fate if _pass(path, path, given, limit) else "undecided: tests fail without it, too"


@cache
def _pass(broken: Path, path: Path, tests: "tuple[str, ...]", limit: float) -> bool:
    with tempfile.TemporaryDirectory(prefix="mutants-") as layer:
        command = (*NAMESPACE, layer, str(ROOT), str(broken), str(path), *PYTEST, *tests)
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        try:
            return process.wait(limit) in (PASSED, NO_TESTS)
        except subprocess.TimeoutExpired:
            return False
        finally:
            process.kill()
            process.wait()


def _break(path: Path, number: int, broken: Path) -> str:
    tree = copy.deepcopy(_tree(path))
    parent, field, at, old, new = list(_sites(tree))[number]
    place: Any = vars(parent) if at is None else getattr(parent, field)
    place[field if at is None else at] = new
    broken.write_text(ast.unparse(ast.fix_missing_locations(tree)))
    before, after = (ast.unparse(node).partition("\n")[0] for node in (old, new))
    return f"{old.lineno}: {before}  →  {after}"


def _sites(node: ast.AST) -> Iterator[Site]:
    for field, value in ast.iter_fields(node):
        if field in FOR_READERS and not isinstance(node, ast.Call):
            continue
        for at, child in enumerate(value) if isinstance(value, list) else ((None, value),):
            if isinstance(child, (ast.expr, ast.stmt)):
                if field == "test" and isinstance(node, CONDITIONS) and ast.unparse(child) not in NO_CONDITIONS:
                    truths = (False,) if isinstance(node, ast.While) else (False, True)
                    yield from ((node, field, at, child, ast.Constant(truth)) for truth in truths)
                yield from ((node, field, at, child, new) for new in _replacements(child))
            if isinstance(child, ast.AST):
                yield from _sites(child)


def _replacements(node: ast.AST) -> Iterable[ast.AST]:
    if isinstance(node, ast.Compare):
        for at, operator in enumerate(node.ops):
            swapped = [*node.ops[:at], SWAPPED[type(operator)](), *node.ops[at + 1 :]]
            yield ast.Compare(node.left, swapped, node.comparators)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        for at in range(len(node.values)):
            yield ast.BoolOp(node.op, node.values[:at] + node.values[at + 1 :])
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, ast.Return) and node.value is not None and ast.unparse(node) != "return None":
        yield ast.Return(ast.Constant(None))
    elif isinstance(node, (ast.Raise, ast.AugAssign, ast.Return, ast.Continue, ast.Break)):
        yield ast.Pass()
    elif isinstance(node, ast.Expr) and not ast.unparse(node).startswith(FOR_A_LOG):
        yield from () if isinstance(node.value, ast.Constant) else (ast.Pass(),)


if __name__ == "__main__":
    sys.exit(main())
