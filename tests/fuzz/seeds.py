"""Writes the corpora's seeds: `cd tests && python -m fuzz.seeds`. What was found and mended lies beside them."""

import importlib
from collections.abc import Iterable

from fuzz.seeds_native import NATIVE
from fuzz.table import CORPUS, PYTHON_TARGETS


def write(name: str, seeds: Iterable[bytes]) -> None:
    """Replaces the seeds of a target."""
    folder = CORPUS / name
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("seed-*"):
        old.unlink()
    for number, data in enumerate(seeds):
        (folder / f"seed-{number:02}").write_bytes(data)


def main() -> None:
    """All of them."""
    for name, made in NATIVE.items():
        write(name, made())
    for target in PYTHON_TARGETS:
        write(target.name, importlib.import_module(target.module).seeds())


if __name__ == "__main__":
    main()
