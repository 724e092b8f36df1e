"""Checks that HTA and the TensorBoard plug-in see the same in our traces as in Kineto's of the same workloads.

usage: read_traces.py FOLDER      (in an environment with HolisticTraceAnalysis and torch-tb-profiler; `make campaign`)

"ours" are traces of runs other than Kineto's: the numbers of kernels and launches must agree, but times need not.
"merged" are Kineto's runs written by us, including operators: everything must agree, including times, operators and
their kernels. "back" are other people's traces ("public") after they were exported as .pftrace and that as a Chrome
trace: everything must agree, too, and a reader that fails on the one must fail on the other.
"""

import logging
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORKLOADS = ("mlp", "graph", "streams")
# HTA takes these for kernels; Kineto's traces were made without cuda_sync.
SYNCHRONIZATIONS = {"Stream Wait Event", "Event Sync", "Stream Sync", "Context Sync"}


def with_hta(trace: Path) -> dict[str, Any]:
    """What HTA counts and, under "whole", what it makes of the times."""
    from hta.trace_analysis import TraceAnalysis

    analysis = TraceAnalysis(trace_files={0: str(trace)})
    _, kernels = analysis.get_gpu_kernel_breakdown(visualize=False, num_kernels=1000)
    breakdown = analysis.get_temporal_breakdown(visualize=False)
    (launches,) = analysis.get_cuda_kernel_launch_stats(visualize=False).values()
    times = ["duration", "cpu_duration", "gpu_duration"]
    return {
        "kernel names": sorted(set(kernels["name"]) - SYNCHRONIZATIONS),
        "kernel launches": len(launches),
        "temporal breakdown of": len(breakdown),
        "whole": {
            "kernels": sorted(map(_line, kernels.to_dict("records"))),
            "temporal breakdown": breakdown.to_dict("records"),
            "launches": {name: int(launches[name].sum()) for name in times if name in launches},
            "operators": _operators(analysis),
        },
    }


def _operators(analysis: Any) -> dict[str, int]:
    """The kernels that HTA finds under each operator."""
    frame = analysis.t.get_trace(0)
    names = analysis.t.symbol_table.get_sym_table()
    categories = frame["cat"].map(lambda number: names[number])
    shown = frame[categories.isin(["cpu_op", "user_annotation", "cuda_runtime"])]
    return {names[number]: int(count) for number, count in shown["name"].value_counts().items()}


def with_plugin(trace: Path) -> dict[str, Any]:
    """What the TensorBoard plug-in counts and, under "whole", its views."""
    from torch_tb_profiler.io.cache import Cache
    from torch_tb_profiler.profiler.loader import RunLoader

    run = trace.parent / "run"
    run.mkdir()
    shutil.copy(trace, run / "host_1.1700000000000.pt.trace.json.gz")
    (profile,) = RunLoader("run", str(run), Cache()).load().profiles.values()
    data = profile.kernel_table["data"]
    calls = [column["name"] for column in data["columns"]].index("Calls")
    return {
        "kernel calls": {row[0]: row[calls] for row in data["rows"]},
        "whole": {
            "kernels": sorted(map(_line, data["rows"])),
            "kernels of operators": sorted(map(_line, profile.kernel_op_table["data"]["rows"])),
            "operators": sorted(map(_without_stack, profile.operation_table_by_name["data"])),
            "operators by input": sorted(map(_without_stack, profile.operation_table_by_name_input["data"])),
            "performance": profile.overview["performance"],
        },
    }


def _line(value: Any) -> str:
    """A row as text. 36 and 36.0 are equal, and so are sums that were added up in another order."""
    if isinstance(value, dict):
        return repr({name: _line(each) for name, each in value.items()})
    if isinstance(value, list):
        return repr([_line(each) for each in value])
    return f"{value:.9g}" if isinstance(value, (int, float)) and not isinstance(value, bool) else repr(value)


def _without_stack(row: dict[str, Any]) -> str:
    return repr(sorted((name, value) for name, value in row.items() if not isinstance(value, (list, dict))))


def differences(first: Any, second: Any, path: str = "") -> list[str]:
    """Differences between two results, one line each."""
    if isinstance(first, dict) and isinstance(second, dict):
        names = sorted(set(first) | set(second), key=str)
        return [line for name in names for line in differences(first.get(name), second.get(name), f"{path}/{name}")]
    return [] if first == second else [f"  {path}\n    ours   {first!r:.600}\n    kineto {second!r:.600}"]


def main() -> int:
    """Prints one line for each reader and workload; returns 1 if a pair differs."""
    folder, differ = Path(sys.argv[1]).resolve(), 0  # HTA refuses a relative path
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    for workload in WORKLOADS:
        for reader in (with_hta, with_plugin):
            kinetos, ours, merged = (
                reader(folder / f"{who}-{workload}" / "trace.json.gz") for who in ("kineto", "ours", "merged")
            )
            found = differences(ours | {"whole": None}, kinetos | {"whole": None}, "ours")
            found += differences(merged, kinetos, "merged")
            print(f"{reader.__name__:<12} {workload:<8} {'DIFFERS' if found else 'same'}", *found, sep="\n")
            differ += bool(found)
    for public in sorted(folder.glob("public-*")):
        back = folder / f"back-{public.name.removeprefix('public-')}"
        for reader in (with_hta, with_plugin):
            first, second = (attempt(reader, path / "trace.json.gz") for path in (back, public))
            found = differences(first, second, "back")
            failed = first.get("fails", "same")
            print(f"{reader.__name__:<12} {public.name:<60.60} {'DIFFERS' if found else failed}", *found, sep="\n")
            differ += bool(found)
    return 1 if differ else 0


def attempt(reader: Callable[[Path], dict[str, Any]], trace: Path) -> dict[str, Any]:
    """What a reader sees in a trace, or how it fails."""
    try:
        return reader(trace)
    except Exception as exc:
        return {"fails": f"the reader fails: {type(exc).__name__}"}


if __name__ == "__main__":
    sys.exit(main())
