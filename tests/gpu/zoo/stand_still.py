"""Captures of programs beside whose healthy loop the GPU has work that does not end: nothing may stand still.

    python tests/gpu/zoo/stand_still.py --output OUT [--programs spin,value] [--part 1/2] [--twin] [--budget-s 560]

Each program (hold_* of the zoo) runs its loop, first untouched with such work for a while: that is its own reference.
Then, in three phases, the work begins before a capture, during it, and after it; it is let go, and a last capture must
have the GPU's records again. With --twin an untouched process does the same beside it, too; both share the GPU then.

Printed for each phase: the verdict and reason code of the capture that met the work, its records of the GPU and in all,
whether the work was really there, the longest step of the loop from the request until 0.5 s after the file, the same
of the reference, and verdict and GPU records of the capture after the work has ended. The exit status is 1 if a loop
stood still for more than --bound-ms longer than the reference, a capture that met the work is DONE without the GPU's
records, other records are missing, or the capture after it has no records of the GPU.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(TESTS)

from gpu.zoo.captures import DEFAULTS, Capture, Tracer  # noqa: E402
from gpu.zoo.catalog import Program, load  # noqa: E402
from gpu.zoo.figures import longest_ms  # noqa: E402
from gpu.zoo.life import Skip  # noqa: E402
from gpu.zoo.process import Ended, Running  # noqa: E402
from gpu.zoo.toolchain import Toolchain  # noqa: E402
from support.service.daemon import running_daemon  # noqa: E402

PHASES = ("before", "during", "after")
HEALTHY = "healthy"  # a capture at first that meets nothing
TAIL_S, SETTLE_S, UNTOUCHED_S = 0.5, 0.3, 1.5
COMES_WITHIN_S = 20.0
MOST_LEFT_S = 20.0  # of the budget, without which no phase is begun
Window = tuple[int, int]


@dataclass(slots=True, kw_only=True)
class Phase:
    """What one phase of one program has shown. met: the capture that met the work; then: the one after its end."""

    program: str
    phase: str
    met: str = ""
    met_gpu: int = 0
    met_records: int = 0
    reason: str = ""
    held: bool = True
    longest: float = 0.0
    reference: float = 0.0
    twin: float = 0.0
    then: str = ""
    then_gpu: int = 0
    seconds: float = 0.0
    problem: str = ""

    def line(self) -> str:
        """One line of the report."""
        return (
            f"{self.program:<34}{self.phase:<8}{self.met:<30}{self.met_gpu:>7}{self.met_records:>8}"
            f"{'yes' if self.held else 'NO':>5}{self.longest:>9.1f}{self.reference:>9.1f}{self.twin:>9.1f}  "
            f"{self.then:<22}{self.then_gpu:>7}{self.seconds:>6.1f} {self.problem}"
        )


HEAD = (
    f"{'program':<34}{'phase':<8}{'capture that met it':<30}{'GPU':>7}{'records':>8}{'held':>5}{'longest':>9}"
    f"{'(untch)':>9}{'(twin)':>9}  {'afterwards':<22}{'GPU':>7}{'s':>6}"
)


def verdict(capture: Capture) -> str:
    """Verdict and code."""
    return " ".join(filter(None, (capture.verdict, capture.reason_code)))


class Player:
    """One program, and a twin if one is wanted."""

    def __init__(self, program: Program, options: argparse.Namespace, tracer: Tracer, toolchain: Toolchain) -> None:
        self.program, self.options, self.tracer = program, options, tracer
        self.folder = Path(tempfile.mkdtemp(prefix="stand-still-"))
        most_s = options.budget_s + 60
        names = ("traced", "twin") if options.twin else ("traced",)
        self.running = [Running(program, self.folder / name, toolchain, options.device, most_s) for name in names]
        self.pids: list[int] = []
        self._changes = 0

    def close(self) -> None:
        """Ends the processes."""
        for running in self.running:
            running.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def wait_ready(self) -> None:
        """Raises Skip, Ended or TimeoutError."""
        deadline = time.monotonic() + self.options.ready_s
        self.pids = [running.await_ready(deadline)[0] for running in self.running]

    def hold(self, wanted: bool) -> bool:
        """Asks all for work that does not end, or to let it go. Whether the traced one did it in time."""
        self._changes += wanted
        for running in self.running:
            if wanted:
                (running.folder / "hold").touch()
            else:
                (running.folder / "hold").unlink(missing_ok=True)
        end = time.monotonic() + COMES_WITHIN_S
        name = "held" if wanted else "released"
        while time.monotonic() < end and self.running[0].alive():
            if len(self.running[0].events(name)) >= self._changes:
                return True
            time.sleep(0.02)
        return False

    def capture(self, collecting: Callable[[], object] | None = None) -> Capture:
        """One capture of the traced process. collecting: called once it records."""
        return self.tracer.capture(self.pids[:1], self.options.kind, self.options.keep_agent_s, collecting)

    def longest(self, window: Window, of: int = 0) -> float:
        """The longest step in the window, in ms."""
        time.sleep(0.25)  # the program writes its times so often
        return longest_ms(self.running[of].times(), window) if of < len(self.running) else 0.0

    def untouched(self) -> float:
        """The longest step of a while with the work, in ms, the agent not yet there."""
        begin = time.time_ns()
        self.hold(True)
        time.sleep(UNTOUCHED_S)
        self.hold(False)
        time.sleep(TAIL_S)
        return self.longest((begin, time.time_ns()))

    def phase(self, name: str, reference: float) -> Phase:
        """Plays one phase."""
        row, began = Phase(program=self.program.name, phase=name, reference=reference), time.monotonic()
        captures: list[Capture] = []
        held: list[bool] = []
        begin = time.time_ns()
        if name == "before":
            row.held = self.hold(True)
            time.sleep(SETTLE_S)
            captures.append(self.capture())
        elif name == "during":
            captures.append(self.capture(lambda: held.append(self.hold(True))))
            row.held = all(held) and bool(held)
        elif name == "after":
            captures.append(self.capture())
            row.held = self.hold(True)
        else:
            captures.append(self.capture())
        time.sleep(TAIL_S)
        window = begin, time.time_ns()
        row.longest, row.twin = self.longest(window), self.longest(window, 1)
        if name != HEALTHY:
            if not self.hold(False):
                row.problem = "the loop did not let it go"
            time.sleep(self.options.drain_s)
            last = self.capture()
            row.then, row.then_gpu = verdict(last), last.kernels
        met = captures[0]
        row.met, row.met_gpu, row.met_records, row.reason = verdict(met), met.kernels, met.records, met.reason
        row.seconds = time.monotonic() - began
        self._judge(row, met)
        return row

    def _judge(self, row: Phase, met: Capture) -> None:
        problems = [row.problem] if row.problem else []
        reference = max(row.reference, row.twin)
        if row.longest > reference + self.options.bound_ms:
            problems.append(f"STOOD STILL {row.longest - reference:.0f} ms longer")
        if not row.held:
            problems.append("the work did not begin in time")
        gpu = self.options.device == "cuda"
        if gpu and met.verdict == "DONE" and not met.kernels:
            problems.append("DONE without records of the GPU")
        if row.phase in (HEALTHY, "after") and met.verdict != "DONE":
            problems.append("a healthy capture is not DONE")
        if row.phase == "before" and gpu and not met.kernels and met.reason_code != "GPU_DOES_NOT_DRAIN":
            problems.append("not GPU_DOES_NOT_DRAIN")
        if met.records - met.kernels <= 0 and not self.program.source:  # a program in C++ has nothing else to record
            problems.append("no other records")
        if gpu and row.then and not row.then_gpu:
            problems.append("no records of the GPU after its end")
        if not self.running[0].alive():
            problems.append(f"THE PROGRAM HAS ENDED: {self.running[0].stderr_tail()[-200:]}")
        row.problem = "; ".join(problems)


def play(player: Player, deadline: float, tell: Callable[[Phase], None]) -> None:
    """All phases of one program."""
    name = player.program.name
    try:
        player.wait_ready()
        time.sleep(SETTLE_S)
        reference = player.untouched()
        for phase in (HEALTHY, *PHASES):
            if time.monotonic() > deadline - MOST_LEFT_S:
                tell(Phase(program=name, phase=phase, problem="not run: the time was over"))
            elif player.running[0].alive():
                tell(player.phase(phase, reference))
    except Skip as exc:
        tell(Phase(program=name, phase="skipped", reason=str(exc), met=str(exc)[:80]))
    except (Ended, TimeoutError) as exc:
        tail = player.running[0].stderr_tail()[-300:]
        tell(Phase(program=name, phase="start", problem=f"did not come up: {type(exc).__name__} {tail}"))
    finally:
        player.close()


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("stand-still-output"))
    parser.add_argument("--programs", default="", help="parts of names, separated by commas; default: all")
    parser.add_argument("--part", default="1/1", metavar="K/N")
    parser.add_argument("--kind", default=DEFAULTS, help="activity types of all captures; default: the daemon's")
    parser.add_argument("--duration-s", type=float, default=0.4)
    parser.add_argument("--keep-agent-s", type=float, help="default: the daemon's")
    parser.add_argument("--drain-s", type=float, default=0.7, help="after a release, until queued work has ended")
    parser.add_argument("--bound-ms", type=float, default=30.0)
    parser.add_argument("--ready-s", type=float, default=120.0)
    parser.add_argument("--budget-s", type=float, default=540.0)
    parser.add_argument("--twin", action="store_true", help="with an untouched process beside each")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the stand-in, to try this script"
    )
    return parser.parse_args(words)


def chosen(options: argparse.Namespace) -> list[Program]:
    """The programs."""
    prefix = "hold_" if options.device == "cuda" else "stand_in_holds"
    found = [one for one in load().values() if one.name.startswith(prefix)]
    found = [one for one in found if any(part in one.name for part in options.programs.split(","))]
    part, parts = map(int, options.part.split("/"))
    return found[part - 1 :: parts]


def main(words: list[str] | None = None) -> int:
    """The exit status."""
    options = arguments(words)
    deadline = time.monotonic() + options.budget_s
    options.output.mkdir(parents=True, exist_ok=True)
    rows: list[Phase] = []

    def tell(row: Phase) -> None:
        rows.append(row)
        print(row.line(), flush=True)
        (options.output / "stand_still.json").write_text(json.dumps([asdict(each) for each in rows], indent=1))

    print(HEAD, flush=True)
    many_at_once = {"KINETOD_ACCESS_REQUESTS_PER_SECOND": "1000"}
    with tempfile.TemporaryDirectory() as made, running_daemon(environ=many_at_once) as daemon:
        tracer, toolchain = Tracer(daemon, options.duration_s), Toolchain(Path(made))
        try:
            for program in chosen(options):
                try:
                    player = Player(program, options, tracer, toolchain)
                except Skip as exc:
                    tell(Phase(program=program.name, phase="skipped", met=str(exc)[:80], reason=str(exc)))
                    continue
                play(player, deadline, tell)
        finally:
            (options.output / "kinetod.log").write_text(daemon.log())
    reasons = dict.fromkeys(row.reason for row in rows if row.reason)
    print("\n".join(f"reason: {reason[:200]}" for reason in reasons))
    bad = sum(bool(row.problem) for row in rows)
    print(f"{len(rows)} phases, {bad} with problems", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
