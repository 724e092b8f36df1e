"""`cd tests && python -m fuzz [--seconds N] [TARGET…]`: every door alone, under libFuzzer.

Ends with 1 if anything was found. `--replay FILE TARGET` plays one input again; `--list` shows the doors.
"""

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from fuzz.build import NoClang, replay
from fuzz.run import Figures, run
from fuzz.table import ROOT, TARGETS, NativeTarget, PythonTarget, Target

HEAD = ("target", "executions", "per second", "coverage", "features", "new inputs", "findings", "peak MiB", "slowest s")
NO_ATHERIS = "atheris is not installed: .venv/bin/pip install -e '.[fuzz]'; targets in Python are left out"


def row(figures: Figures) -> tuple[str, ...]:
    """Of the table."""
    per_second = figures.executions // max(figures.seconds, 1)
    numbers = (
        figures.executions, per_second, figures.coverage, figures.features, figures.new_inputs, len(figures.findings),
        figures.peak_mb, figures.slowest_s,
    )  # fmt: skip
    return (figures.target.name, *(f"{number:,}" for number in numbers))


def shown(cells: Sequence[str]) -> str:
    """A line of the table."""
    return "| " + " | ".join(cells) + " |"


def played(target: Target, path: Path) -> int:
    """One input, once."""
    if isinstance(target, NativeTarget):
        done = replay(target, [path], 0)
        sys.stdout.write(done.stdout + done.stderr)
        return done.returncode
    assert isinstance(target, PythonTarget)
    importlib.import_module(target.module).play(path.read_bytes())
    return 0


def all_of(targets: Sequence[Target], seconds: int) -> int:
    """One after the other."""
    if importlib.util.find_spec("atheris") is None:
        if any(isinstance(target, PythonTarget) for target in targets):
            sys.stderr.write(f"{NO_ATHERIS}\n")
        targets = [target for target in targets if not isinstance(target, PythonTarget)]
    print(shown(HEAD))
    print(shown(["---"] * len(HEAD)), flush=True)
    failed = []
    for target in targets:
        figures = run(target, seconds)
        print(shown(row(figures)), flush=True)
        if figures.failed:
            failed.append(figures)
    for figures in failed:
        if figures.problem:
            print(f"{figures.target.name}: {figures.problem}")
        for path in figures.findings:
            print(f"{figures.target.name}: {path}; again: make fuzz-replay FUZZ_TARGET={figures.target.name} "
                  f"FUZZ_FILE={path.relative_to(ROOT)}")  # fmt: skip
    return 1 if failed or not targets else 0


def main() -> int:
    """Run it."""
    names = {target.name: target for target in TARGETS}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--replay", type=Path, metavar="FILE")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("targets", nargs="*", metavar="TARGET")
    words = parser.parse_args()
    if unknown := [name for name in words.targets if name not in names]:
        parser.error(f"there is no target {unknown[0]!r}; there are: {', '.join(names)}")
    chosen = [names[name] for name in words.targets] or list(TARGETS)
    if words.list:
        print("\n".join(f"{target.name}: {target.door}" for target in chosen))
        return 0
    if words.replay is not None:
        return played(chosen[0], words.replay.resolve())
    try:
        return all_of(chosen, words.seconds)
    except NoClang as exc:
        sys.stderr.write(f"{exc}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
