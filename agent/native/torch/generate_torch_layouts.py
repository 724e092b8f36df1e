"""Writes kineto_agent/sources/torch/object_layouts.py: where things lie in torch's objects, from the headers of its
wheels.

A development tool: `python agent/native/torch/generate_torch_layouts.py 2.12.0 2.13.0 …` takes torch/include out of
each
version's wheel (`pip download`, half a gigabyte each, deleted at once), compiles torch_layout.cpp with g++ and runs
it. A folder in place of a version (it has torch/include and torch/version.py) is used as it is. What the observer
assumes for every version (the form of a callback, among other things) is checked here.

Wheels up to 2.6 were made with the old string of libstdc++ and, elsewhere, with the new one: both layouts are kept
where they differ.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Dict, List, NamedTuple, Tuple

HERE = Path(__file__).resolve().parent
TARGET = HERE.parents[1] / "kineto_agent" / "sources" / "torch" / "object_layouts.py"
PROGRAM = HERE / "torch_layout.cpp"
_KEPT = ("torch/include/", "torch/version.py")
_OLD_STRINGS_UNTIL = (2, 6)

# What agent/native takes for granted.
EXPECTED = {
    "callback_bytes": 40,
    "callback_start": 0,
    "callback_end": 8,
    "callback_probability": 16,
    "callback_scopes": 24,
    "callback_needs_inputs": 34,
    "callback_needs_outputs": 35,
    "callback_needs_ids": 36,
    "scope_backward_function": 1,
    "scope_user": 7,
    "scopes": 10,
    "value_tag_bytes": 4,
    "policy_custom_strides": 1,
    "policy_custom_sizes": 2,
}

HEADER = '''"""Where things lie in torch's objects, by minor version: byte offsets in 64-bit Linux builds. Generated.

agent/native/torch/generate_torch_layouts.py made this from the headers in torch's wheels. The names are those of
kc_observer_layout
(agent/native/torch/observer.h). A version that was built with either string of libstdc++ has two layouts; which one a
torch keeps to is seen when it is tried (kc_observer_open).
"""

from typing import Dict, NamedTuple, Tuple


class TorchLayout(NamedTuple):
    """kc_observer_layout, and the names of the types as Kineto writes them, by at::ScalarType."""

'''


class Layout(NamedTuple):
    """What the program printed."""

    numbers: Dict[str, int]
    dtypes: Tuple[str, ...]


def fetched(version: str, folder: Path) -> Path:
    """The wheel's headers in `folder`."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", scratch, "torch==" + version]
        subprocess.run(command, check=True)
        for wheel in Path(scratch).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder, [name for name in archive.namelist() if name.startswith(_KEPT)])
    return folder


def version_of(folder: Path) -> Tuple[int, int]:
    """From torch/version.py."""
    names: Dict[str, str] = {}
    exec((folder / "torch" / "version.py").read_text(encoding="utf-8"), names)  # noqa: S102
    major, minor = names["__version__"].split(".")[:2]
    return int(major), int(minor)


def measure(folder: Path, old_strings: bool) -> Layout:
    """Compile and run the program against the headers."""
    include = folder / "torch" / "include"
    with tempfile.TemporaryDirectory() as scratch:
        program = Path(scratch) / "layout"
        command = ["g++", "-O0", "-w", "-ffunction-sections", "-fdata-sections", "-no-pie"]
        command += ["-std=c++" + ("20" if version_of(folder) >= (2, 10) else "17")]
        command += ["-D_GLIBCXX_USE_CXX11_ABI=" + ("0" if old_strings else "1")]
        command += ["-I%s" % include, "-I%s" % (include / "torch" / "csrc" / "api" / "include")]
        command += [str(PROGRAM), "-o", str(program), "-Wl,--gc-sections,--unresolved-symbols=ignore-all"]
        subprocess.run(command, check=True)
        printed = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    numbers: Dict[str, int] = {}
    dtypes: List[str] = []
    for line in printed.splitlines():
        name, value, *rest = line.split(" ", 2)
        if name == "dtype":
            assert int(value) == len(dtypes), "the types are not in order"
            dtypes.append(rest[0])
        else:
            numbers[name] = int(value)
    for name, expected in EXPECTED.items():
        assert numbers.pop(name) == expected, "%s is not %d in %s" % (name, expected, folder)
    assert numbers.pop("function_inputs_length") == numbers["function_inputs"] + 8
    assert numbers.pop("sizes_outside") == numbers["sizes_values"]
    assert numbers["dtypes"] == len(dtypes), "the last type is not before Undefined"
    return Layout(numbers, tuple(dtypes))


def layouts_of(folder: Path) -> List[Layout]:
    """One, or two that differ."""
    layouts = [measure(folder, old_strings=False)]
    if version_of(folder) <= _OLD_STRINGS_UNTIL:
        layouts.append(measure(folder, old_strings=True))
    return layouts


def rendered(found: Dict[Tuple[int, int], List[Layout]]) -> str:
    """The module's text. Lists of types are told by what they add to an older one, layouts by their changes."""
    fields = list(next(iter(found.values()))[0].numbers)
    lines = ["    %s: int" % field for field in fields]
    lines += ["    dtype_names: Tuple[str, ...]", "", ""]
    types: Dict[Tuple[str, ...], str] = {}
    for version, layouts in sorted(found.items()):
        if layouts[0].dtypes not in types:
            name = "_DTYPES_%d_%d" % version
            lines += _types(name, layouts[0].dtypes, types)
            types[layouts[0].dtypes] = name
    newest = found[max(found)][0]
    names = [(newest, "_TORCH_%d_%d" % max(found))]
    lines += ["", "%s = TorchLayout(" % names[0][1]]
    lines += ["    %s=%d," % (field, newest.numbers[field]) for field in fields]
    lines += ["    dtype_names=%s," % types[newest.dtypes], ")"]
    table: List[str] = []
    for version, layouts in sorted(found.items(), reverse=True):
        for number, layout in enumerate(layouts):
            if layout not in (known for known, _name in names):
                names.append((layout, "_TORCH_%d_%d%s" % (*version, "_OLD_STRINGS" * number)))
                lines.append("%s = %s" % (names[-1][1], _difference(layout, names[:-1], types)))
        of_version = [next(name for known, name in names if known == layout) for layout in layouts]
        table.append("    %r: (%s)," % (version, ", ".join(of_version) if of_version[1:] else of_version[0] + ","))
    lines += ["", "LAYOUTS: Dict[Tuple[int, int], Tuple[TorchLayout, ...]] = {", *reversed(table), "}"]
    return HEADER + "\n".join(lines) + "\n"


def _types(name: str, dtypes: Tuple[str, ...], known: Dict[Tuple[str, ...], str]) -> List[str]:
    older = max((each for each in known if each == dtypes[: len(each)]), key=len, default=())
    added = ['    "%s",' % text for text in dtypes[len(older) :]]
    return ["%s: Tuple[str, ...] = (" % name, *(["    *%s," % known[older]] if older else []), *added, ")", ""]


def _difference(layout: Layout, known: List[Tuple[Layout, str]], types: Dict[Tuple[str, ...], str]) -> str:
    """By the fewest changes to a known one."""

    def changes(base: Layout) -> List[str]:
        changed = ["%s=%d" % item for item in layout.numbers.items() if base.numbers[item[0]] != item[1]]
        return changed + (["dtype_names=%s" % types[layout.dtypes]] if layout.dtypes != base.dtypes else [])

    base, name = min(known, key=lambda each: len(changes(each[0])))
    return "%s._replace(%s)" % (name, ", ".join(changes(base)))


def main() -> int:
    """Measure all that are named."""
    if not sys.argv[1:]:
        sys.stderr.write("error: name the versions, for example 2.12.0, or folders with torch/include\n")
        return 2
    found: Dict[Tuple[int, int], List[Layout]] = {}
    for wanted in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(wanted) if Path(wanted).is_dir() else fetched(wanted, Path(scratch))
            found[version_of(folder)] = layouts_of(folder)
            sys.stdout.write("%s: %d layouts\n" % (wanted, len(found[version_of(folder)])))
    TARGET.write_text(rendered(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
