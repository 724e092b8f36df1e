"""Places in source code as people read them: `forward (torch/nn/modules/linear.py:134)`, `main (train.py:13)`."""

import re

_INSTALLED = re.compile(r"^.*/(?:(?:site|dist)-packages|lib(?:64)?/python\d[^/]*)/", re.DOTALL)
_WINDOWS = re.compile(r"[A-Za-z]:\\|\\\\|[^/]*\\[^/]*$")
_PLACE = re.compile(r"(.*?) \((.+?)(:\d+)?\)", re.DOTALL)
_NAME = re.compile(r"(.+?\.pyx?)(\(\d+\):) (.+)", re.DOTALL)
_FILE = re.compile(r"[^\s()]+\.pyx?")
_PYTHON_FILES = (".py", ".pyx")


def portable_path(path: str) -> str:
    """Returns the path with "/" between folders, on any system."""
    return path.replace("\\", "/") if _WINDOWS.match(path) else path


def source_file(path: str) -> str:
    """Returns the path from its package on, torch/nn/modules/linear.py, and otherwise the name of the file.

    Profilers have cut relative paths off at a folder of sys.path, so that these begin with their package.
    """
    path = portable_path(path)
    installed = _INSTALLED.sub("", path)
    if installed != path or not (path.startswith(("/", ".")) or path[1:3] == ":/"):
        return installed
    folder, _, name = path.rpartition("/")
    return f"{folder.rpartition('/')[2]}/{name}" if folder and name == "__init__.py" else name


def place_parts(text: str) -> tuple[str, ...]:
    """Returns the function and the file, as source_file() names it, of a place in source code; () for any other text.

    A place is `function (file:line)`, `file(line): function`, as traces name functions, or a file alone.
    """
    if match := _PLACE.fullmatch(text) if text.endswith(")") else None:
        if match[3] or match[2].endswith(_PYTHON_FILES):
            return match[1], f"({source_file(match[2])}{match[3] or ''})"
    elif match := _NAME.fullmatch(text):
        return f"{source_file(match[1])}{match[2]}", match[3]
    return (source_file(text),) if _FILE.fullmatch(text) else ()


def short_place(text: str) -> str:
    """Returns a place with the file as source_file() names it; other text unchanged."""
    return " ".join(place_parts(text)) or text
