"""Arrow imports pandas, where it is installed, to know its objects: a sixth of a second and 30 MiB in each process.

Our processes give it none of them. A program that imports our library may, and is left as it is.
"""

import sys


class _Finder:
    """Of `sys.meta_path`."""

    @staticmethod
    def find_spec(name: str, *_where: object) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("this process does not use pandas", name=name)


def go_without_pandas() -> None:
    """Keeps pandas out of this process for good."""
    sys.meta_path.insert(0, _Finder)
