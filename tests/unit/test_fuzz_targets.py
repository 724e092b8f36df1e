"""Every target of `make fuzz` over its corpus, and a few hundred blind changes of it: without clang and atheris."""

import importlib
import random
import subprocess
import sys
import time

import pytest
from fuzz.build import SANITIZERS, replay
from fuzz.guided import blindly
from fuzz.table import CORPUS, NATIVE, NATIVE_TARGETS, PYTHON_TARGETS, ROOT, TARGETS, NativeTarget, PythonTarget, corpus
from support.machine.native import has_sanitizer

MOST_CORPUS_BYTES = 64 << 10  # of one target: the repository is no place for what a fuzzer collects
BLIND = 40
NATIVE_ROUNDS = {"nest": 300, "spill": 50, "serve": 60}  # slower than the others
OTHERS_ROUNDS = 1000


@pytest.mark.slow
@pytest.mark.parametrize("target", PYTHON_TARGETS, ids=lambda target: target.name)
def test_a_door_takes_its_corpus_and_damaged_copies_of_it(target: PythonTarget) -> None:
    module = importlib.import_module(target.module)
    known = [path.read_bytes() for path in corpus(target)]
    rng = random.Random(7)
    for data in [*known, *(blindly(module, rng.choice(known), rng) for _ in range(BLIND))]:
        before = time.process_time()
        module.play(data)
        assert time.process_time() - before < target.slowest_s


@pytest.mark.slow
@pytest.mark.skipif(not has_sanitizer(SANITIZERS), reason="this compiler has no sanitizers")
@pytest.mark.parametrize("target", NATIVE_TARGETS, ids=lambda target: target.name)
def test_damaged_input_never_reads_or_writes_out_of_bounds(target: NativeTarget) -> None:
    done = replay(target, corpus(target), NATIVE_ROUNDS.get(target.name, OTHERS_ROUNDS))
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def test_every_target_has_a_small_corpus_and_nothing_else_has() -> None:
    assert {path.name for path in CORPUS.iterdir()} == {target.name for target in TARGETS}
    for target in TARGETS:
        inputs = corpus(target)
        assert inputs and sum(path.stat().st_size for path in inputs) <= MOST_CORPUS_BYTES, target.name
        assert all(path.stat().st_size <= target.longest for path in inputs), target.name


def test_every_target_has_its_file() -> None:
    natives = {path.stem for path in NATIVE.glob("*.c")} - {"replay"}
    assert natives == {target.name for target in NATIVE_TARGETS}
    files = [path.relative_to(ROOT / "tests").with_suffix("") for path in (ROOT / "tests/fuzz/targets").rglob("*.py")]
    modules = {".".join(file.parts) for file in files if file.stem != "__init__"}
    assert modules == {target.module for target in PYTHON_TARGETS}


@pytest.mark.slow
def test_modules_of_targets_leave_nothing_open_at_the_end() -> None:
    code = f"import {', '.join(target.module for target in PYTHON_TARGETS)}"
    command = [sys.executable, "-W", "default::ResourceWarning", "-c", code]
    done = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_the_documentation_lists_the_targets() -> None:
    text = (ROOT / "docs/fuzzing.md").read_text()
    for target in TARGETS:
        language = "C" if isinstance(target, NativeTarget) else "Python"
        assert f"| `{target.name}` | {language} | {target.door} |" in text
