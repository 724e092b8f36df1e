"""usage: python -m rootcause [--held-out] [--gpu] [--keep FOLDER] [--kept FOLDER] [NAME …]
       python -m rootcause --frameworks | --afterthoughts | --ranks [--keep FOLDER] [--kept FOLDER] [NAME …]

Runs each training program with its planted cause and without it, traces both by kinetod with default options, and
prints whether the findings name the cause. About 12 s for each cause; two cores that nothing else uses. With --gpu the
programs compute on an NVIDIA GPU that nothing else uses, with --jobs 2 on the first two GPUs, one program each.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from support.service.daemon import running_daemon

from rootcause.causes import AFTERTHOUGHTS, CAUSES, FRAMEWORKS, HELD_OUT, Cause
from rootcause.gpu_causes import GPU_CAUSES, GPU_HELD_OUT
from rootcause.judgement import Verdict
from rootcause.measure import CPU, Place
from rootcause.rank_table import run_ranks
from rootcause.runs import Runs, judge_again
from rootcause.table import HEADER, misses, row, summary

GPU_UNTRACED_S, GPU_TRACED_S = 1.2, 1.6  # steps are short, and such machines dear


def main() -> int:
    """Runs the named causes, or all. Returns 1 if a program failed, and 2 if the arguments make no sense here."""
    options = _arguments()
    if options.ranks:
        return run_ranks(options.names, options.keep, listing=options.list)
    families = (
        (options.gpu, GPU_HELD_OUT if options.held_out else GPU_CAUSES),
        (options.held_out, HELD_OUT),
        (options.frameworks, FRAMEWORKS),
        (options.afterthoughts, AFTERTHOUGHTS),
    )
    known = next((family for chosen_one, family in families if chosen_one), CAUSES)
    by_name = {cause.name: cause for cause in known}
    wanted = dict.fromkeys(options.names or by_name)
    chosen = [by_name[name] for name in wanted if name in by_name]
    if options.list or len(chosen) < len(wanted):
        print("\n".join(cause.name for cause in known))
        return 0 if options.list else 2
    places = [CPU] * options.jobs
    if options.kept is not None:
        return _table(chosen, lambda cause: judge_again(cause, options.kept))
    if options.gpu:
        missing, places = _gpus(options.jobs, options.device)
        if missing:
            print(f"--gpu: {missing}", file=sys.stderr)
            return 2
    with (
        tempfile.TemporaryDirectory(prefix="rootcause-") as folder,
        running_daemon() as daemon,
        Runs(daemon, Path(folder), places, options.pairs) as runs,
    ):
        runs.begin(chosen)
        return _table(chosen, lambda cause: runs.verdict(cause, options.keep))


def _table(chosen: Sequence[Cause], verdict_of: Callable[[Cause], Verdict]) -> int:
    """Prints the table as it grows. Returns 1 if a program failed."""
    verdicts: list[Verdict] = []
    print(HEADER, flush=True)
    for cause in chosen:
        try:
            verdict = verdict_of(cause)
        except RuntimeError as exc:
            print(f"{cause.name:<24}{exc}", flush=True)
            continue
        verdicts.append(verdict)
        print("\n".join([row(verdict), *misses(verdict)]), flush=True)
    print(summary(verdicts))
    return 1 if len(verdicts) < len(chosen) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m rootcause", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these, in this order")
    parser.add_argument("--keep", type=Path, help="keep traces and findings in this folder")
    parser.add_argument(
        "--kept", type=Path, metavar="FOLDER", help="run nothing: judge what --keep left in this folder again"
    )
    parser.add_argument("--pairs", action="store_true", help="run the control anew for each cause, not once a program")
    parser.add_argument(
        "--held-out", action="store_true", help="the causes that were written after the rules; also with --gpu"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--afterthoughts", action="store_true", help="the causes that were run after rules were mended")
    which.add_argument(
        "--frameworks", action="store_true", help="the causes in programs of frameworks that own the loop, if installed"
    )
    which.add_argument("--gpu", action="store_true", help="the causes of programs that use a GPU")
    which.add_argument("--ranks", action="store_true", help="jobs of two ranks, on two GPUs if there are so many")
    parser.add_argument("--jobs", type=int, default=1, help="programs at a time; with --gpu each has a GPU of its own")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="with --gpu: cpu looks for plain errors only"
    )
    parser.add_argument("--list", action="store_true", help="show the names")
    options = parser.parse_args()
    if options.held_out and (options.afterthoughts or options.frameworks or options.ranks):
        parser.error("--held-out can be combined with --gpu only: the other families have no held-out causes")
    return options


def _gpus(jobs: int, device: str) -> tuple[str, list[Place]]:
    """What is missing for so many programs at a time ("": nothing), and where they run."""
    place = Place(device=device, untraced_s=GPU_UNTRACED_S, traced_s=GPU_TRACED_S, analysed_beside=True)
    if device == "cpu":
        return "", [place] * jobs
    if shutil.which("nvidia-smi") is None:
        return "this machine has no nvidia-smi, so no NVIDIA GPU (--device cpu runs the programs without one)", []
    told = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    count = told.stdout.count("GPU ")
    if count < jobs:
        return f"{jobs} programs at a time need as many GPUs, and nvidia-smi shows {count}: {told.stderr.strip()}", []
    return "", [replace(place, gpu=number) for number in range(jobs)]


if __name__ == "__main__":
    sys.exit(main())
