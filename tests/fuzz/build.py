"""The targets in C as programs: with clang's libFuzzer, or with whatever compiler there is and replay.c."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from support.machine.native import build, fake_cupti

from fuzz.table import NATIVE, ROOT, SERVICE, NativeTarget

SANITIZERS = "address,undefined"
INSTALL_CLANG = "apt-get install clang libclang-rt-14-dev (or your system's clang with its run-time libraries)"
BUILT = ROOT / "build" / "fuzz" / "native"
_FLAGS = ("-O1", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all", "-pthread")


class NoClang(Exception):
    """clang or its libFuzzer is missing. The text says what to install."""


def _sources(target: NativeTarget) -> list[Path]:
    own = [path for pattern in target.sources for path in sorted(target.folder.glob(pattern))]
    return [*own, NATIVE / f"{target.name}.c"]


def _options(target: NativeTarget) -> list[str]:
    options = ["-iquote", str(target.folder), f"-I{NATIVE}"]
    return [*options, f'-DFAKE_CUPTI="{fake_cupti()}"'] if target.fake_cupti else options


def replayer(target: NativeTarget) -> Path:
    """Plays files and blindly damaged copies of them, under sanitizers; any compiler that has these will do."""
    flags = [*_FLAGS, f"-fsanitize={SANITIZERS}", *_options(target)]
    return build(f"replay_{target.name}", [*_sources(target), NATIVE / "replay.c"], flags)


def fuzzer(target: NativeTarget) -> Path:
    """Looks for more, led by coverage. Raises NoClang."""
    BUILT.mkdir(parents=True, exist_ok=True)
    program = BUILT / target.name
    flags = ["-std=c11", *_FLAGS, f"-fsanitize=fuzzer,{SANITIZERS}", *_options(target)]
    _compile([*flags, *map(str, _sources(target))], program)
    return program


def codec() -> Path:
    """The trace codec as Python loads it, with sanitizers and for libFuzzer to see. Raises NoClang."""
    BUILT.mkdir(parents=True, exist_ok=True)
    library = BUILT / "libkineto_codec.so"
    flags = [
        "-std=c11",
        *_FLAGS,
        "-fPIC",
        "-shared",
        f"-fsanitize=fuzzer-no-link,{SANITIZERS}",
        "-iquote",
        str(SERVICE),
    ]
    _compile([*flags, *map(str, sorted(SERVICE.rglob("*.c")))], library)
    return library


def _compile(words: list[str], made: Path) -> None:
    command = [os.environ.get("CLANG", "clang"), *words, "-o", str(made), "-ldl"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise NoClang(f"there is no {command[0]}: {INSTALL_CLANG}") from None
    if "libclang_rt.fuzzer" in done.stderr:
        raise NoClang(f"{command[0]} has no libFuzzer: {INSTALL_CLANG}")
    if done.returncode != 0:
        raise AssertionError(done.stderr)


def environment(*, leaks: bool) -> dict[str, str]:
    """For programs with sanitizers."""
    # alloc_dealloc_mismatch: what is not built with ASan beside what is
    options = f"detect_leaks={int(leaks)}:allocator_may_return_null=1:alloc_dealloc_mismatch=0"
    return {**os.environ, "ASAN_OPTIONS": options}


def replay(target: NativeTarget, files: Sequence[Path], rounds: int) -> "subprocess.CompletedProcess[str]":
    """Plays these files, and so many damaged ones."""
    command = [str(replayer(target)), str(rounds), *map(str, files)]
    return subprocess.run(command, env=environment(leaks=True), capture_output=True, text=True, check=False)
