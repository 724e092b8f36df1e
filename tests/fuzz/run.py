"""Runs targets one after the other under libFuzzer and reads what it says.

What is new to the corpus is kept in build/fuzz/corpus, findings in build/fuzz/findings; only what is mended, and its
input made small, goes into the repository.
"""

import importlib.util
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from fuzz.build import codec, environment, fuzzer
from fuzz.guided import CODEC_VARIABLE
from fuzz.table import CORPUS, ROOT, NativeTarget, PythonTarget, Target

WORK = ROOT / "build" / "fuzz"
CODEC_PACKAGE = "kineto_trace"  # what calls the codec
START_S = 120  # what loading and the corpus may add
_LAST = re.compile(r"cov: (\d+) ft: (\d+)")
_STAT = re.compile(r"stat::(\w+):\s+(\d+)")
_FOUND = re.compile(r"Test unit written to (\S+)")
_SLOW = re.compile(r"Slowest unit: (\d+) s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What became of one target. findings: files that do it again; problem: it could not run."""

    target: Target
    seconds: int
    executions: int = 0
    coverage: int = 0
    features: int = 0
    new_inputs: int = 0
    peak_mb: int = 0
    slowest_s: int = 0
    findings: tuple[Path, ...] = ()
    problem: str = ""

    @property
    def failed(self) -> bool:
        """Whether something is to be mended."""
        return bool(self.findings or self.problem)


def run(target: Target, seconds: int) -> Figures:
    """So long. Raises build.NoClang."""
    kept, findings = WORK / "corpus" / target.name, WORK / "findings" / target.name
    for folder in (kept, findings):
        folder.mkdir(parents=True, exist_ok=True)
    log = WORK / f"{target.name}.log"
    known = set(findings.iterdir())
    words = [
        f"-max_total_time={seconds}", f"-timeout={target.slowest_s}", f"-rss_limit_mb={target.memory_mb}",
        f"-malloc_limit_mb={target.memory_mb}", f"-max_len={target.longest}", f"-artifact_prefix={findings}/",
        "-print_final_stats=1", str(kept), str(CORPUS / target.name),
    ]  # fmt: skip
    with log.open("wb") as file:
        try:
            status = subprocess.run(
                [*_command(target), *words], env=_environment(target), cwd=ROOT / "tests", stdout=file, stderr=file,
                timeout=seconds + START_S + target.slowest_s, check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            status = 124
    return _figures(target, seconds, status, log, tuple(sorted(set(findings.iterdir()) - known)))


def _command(target: Target) -> list[str]:
    if isinstance(target, NativeTarget):
        return [str(fuzzer(target))]
    assert isinstance(target, PythonTarget)
    return [sys.executable, "-m", "fuzz.guided", target.name]


def _environment(target: Target) -> dict[str, str]:
    if isinstance(target, NativeTarget):
        return environment(leaks=True)
    assert isinstance(target, PythonTarget)
    environ = {**environment(leaks=False), "PYTHONWARNINGS": "ignore"}
    if CODEC_PACKAGE in target.packages:
        environ |= {CODEC_VARIABLE: str(codec()), "LD_PRELOAD": str(_preloaded())}
    return environ


def _preloaded() -> Path:
    """ASan's run-time library with libFuzzer, which atheris brings along: Python itself is built without."""
    found = importlib.util.find_spec("atheris")
    assert found is not None and found.origin is not None
    return Path(found.origin).parents[1] / "asan_with_fuzzer.so"


def _figures(target: Target, seconds: int, status: int, log: Path, findings: tuple[Path, ...]) -> Figures:
    text = log.read_text(errors="replace")
    stats = {name: int(number) for name, number in _STAT.findall(text)}
    last = _LAST.findall(text)[-1:] or [("0", "0")]
    problem = "" if status == 0 or findings else f"ended with status {status}; see {log}"
    return Figures(
        target=target,
        seconds=seconds,
        executions=stats.get("number_of_executed_units", 0),
        coverage=int(last[0][0]),
        features=int(last[0][1]),
        new_inputs=stats.get("new_units_added", 0),
        peak_mb=stats.get("peak_rss_mb", 0),
        slowest_s=stats.get("slowest_unit_time_sec", 0),
        findings=findings,
        problem=problem,
    )
