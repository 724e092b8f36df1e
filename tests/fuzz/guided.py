"""One Python target under libFuzzer: `python -m fuzz.guided NAME LIBFUZZER_WORDS…`, in a process of its own."""

import importlib
import os
import random
import sys
from collections.abc import Callable

from fuzz.mutate import damaged

CODEC_VARIABLE = "FUZZ_CODEC"  # the codec with sanitizers
OWN_SHARE = 0.5  # of changes that the target makes itself, where it knows the grammar


def blindly(module: object, data: bytes, rng: random.Random) -> bytes:
    """The data changed without libFuzzer's help."""
    own = getattr(module, "mutated", None)
    return bytes(own(data, rng) if own is not None and rng.random() < OWN_SHARE else damaged(data, rng))


def _mutator(module: object, atheris: object) -> Callable[[bytes, int, int], bytes] | None:
    own = getattr(module, "mutated", None)
    if own is None:
        return None

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < OWN_SHARE:
            return bytes(own(data, rng)[:most])
        return bytes(atheris.Mutate(data, most))  # type: ignore[attr-defined]  # atheris has no types

    return mutate


def main() -> None:
    """Does not return: libFuzzer ends the process."""
    from fuzz.table import PYTHON_TARGETS

    name, *words = sys.argv[1:]
    target = next(target for target in PYTHON_TARGETS if target.name == name)
    atheris = importlib.import_module("atheris")
    instrumented = atheris.instrument_imports(include=list(target.packages))
    instrumented.__enter__()  # for good: much is imported when it is needed
    if library := os.environ.get(CODEC_VARIABLE):
        codec = importlib.import_module("kineto_trace.arrays.codec")
        codec.load.__wrapped__.__defaults__ = (library,)
    module = importlib.import_module(target.module)
    mutate = _mutator(module, atheris)
    options = {} if mutate is None else {"custom_mutator": mutate}

    def one(data: bytes) -> None:
        module.play(data)

    atheris.Setup([name, *words], one, **options)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
