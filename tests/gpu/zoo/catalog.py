"""What a program of the zoo is, and the list of all. No framework is imported here: the runner reads this, too."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gpu.zoo.life import Life

FAMILIES = (
    "torch_graphs",
    "torch_compile",
    "torch_training",
    "torch_distributed",
    "torch_life",
    "libraries",
    "science",
    "jax_programs",
    "other_python",
    "native_programs",
    "always_capturing",
    "holding",
    "stand_ins",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One program.

    run: what it does, in a Python process of its own; None: it is the program made from native/SOURCE.cu with these
    arguments. graphs: it replays CUDA graphs. deterministic: digests equal those of an untouched run. end: how it is
    ended, by the file `end` ("file"), by SIGTERM during a capture ("term") or by itself ("self"); status: with which
    exit status. alone: nothing else may run beside it. twin: an untouched one may run beside it. prefix: of the
    command. stand_in: for tests of the runner without a GPU, not part of the zoo. by_name: runs only where it is named.
    """

    name: str
    run: Callable[[Life], None] | None = None
    source: str = ""
    arguments: tuple[str, ...] = ()
    graphs: bool = False
    deterministic: bool = True
    end: str = "file"
    status: int = 0
    alone: bool = False
    twin: bool = True
    prefix: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    stand_in: bool = False
    by_name: bool = False


PROGRAMS: dict[str, Program] = {}


def add(program: Program) -> None:
    """Enter a program into the list."""
    assert program.name not in PROGRAMS, program.name
    PROGRAMS[program.name] = program


def program(
    *,
    graphs: bool = False,
    deterministic: bool = True,
    end: str = "file",
    status: int = 0,
    twin: bool = True,
    environ: Mapping[str, str] | None = None,
    stand_in: bool = False,
    by_name: bool = False,
) -> Callable[[Callable[[Life], None]], Callable[[Life], None]]:
    """A function as a program, by the function's name."""

    def enter(run: Callable[[Life], None]) -> Callable[[Life], None]:
        made = Program(
            name=run.__name__, run=run, graphs=graphs, deterministic=deterministic, end=end, status=status, twin=twin,
            environ=environ or {}, stand_in=stand_in, by_name=by_name,
        )  # fmt: skip
        add(made)
        return run

    return enter


def load() -> dict[str, Program]:
    """All programs by name."""
    for family in FAMILIES:
        importlib.import_module(f"gpu.zoo.programs.{family}")
    return PROGRAMS
