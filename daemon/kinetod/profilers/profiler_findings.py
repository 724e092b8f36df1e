"""Other profilers as checks for people: what each is in the way of, and what to do. Pure."""

from collections.abc import Callable, Iterable, Sequence

from kinetod.attach.finding import Finding, Status
from kinetod.processes.profiler_signs import BY_PRODUCT, CUPTI_USER, DCGM, EXPORTER, Holds
from kinetod.profilers.dcgm import Profiling
from kinetod.profilers.profiler_scan import ProfilingTool, Scan

NAME = "profilers"
_MAX_NAMED = 5
_NEEDS = "traces need no hardware counters"
_PAUSE = "`dcgmi profile --pause` frees them for another tool, `dcgmi profile --resume` gives them back"
_ONE = "a process has room for one such tool: a trace of those that it profiles gets no GPU activities"
_LATER = "trace them when it has ended"
_TEXTS = {
    Holds.PROCESS: (_ONE, _LATER),
    Holds.COUNTERS: (f"it may hold the hardware counters of its GPUs; {_NEEDS}", ""),
    Holds.BOTH: (f"{_ONE}; {_NEEDS}, though it holds those, too", _LATER),
    Holds.PERHAPS: ("its library is loaded; while it profiles, that process gives no GPU activities", ""),
}


def findings(
    found: Scan, visible: Callable[[ProfilingTool], bool], dcgm: tuple[Profiling, str] | None
) -> tuple[Finding, ...]:
    """One for each tool. visible: whether its pid may be told; dcgm: what it said, None if nobody asked it."""
    products: dict[str, list[ProfilingTool]] = {}
    for each in found.profilers:
        products.setdefault(each.product, []).append(each)
    if not products:
        return (Finding(NAME, Status.OK, f"none found{_unseen(found)}"),)
    return tuple(_finding(product, users, visible, dcgm) for product, users in products.items())


def of_libraries(products: Sequence[str]) -> Finding:
    """The finding for one process that is to be traced, from the libraries that it has loaded."""
    found = {product: BY_PRODUCT[product].holds for product in products}
    hindering = [product for product, holds in found.items() if holds in (Holds.PROCESS, Holds.BOTH)]
    if hindering:
        detail = (
            f"{', '.join(hindering)} in it: a process has room for one such tool, so a trace gets no GPU activities"
        )
        return Finding(NAME, Status.NOTE, detail, "trace it when that tool has ended, or start it without that tool")
    loaded = [product for product in found if product != CUPTI_USER.product]
    return Finding(
        NAME, Status.OK, f"{', '.join(loaded)} loaded, which does not have to interfere" if loaded else "none in it"
    )


def _finding(
    product: str,
    users: Sequence[ProfilingTool],
    visible: Callable[[ProfilingTool], bool],
    dcgm: tuple[Profiling, str] | None,
) -> Finding:
    where = f"{product} ({named(users, visible)})"
    if product in (DCGM, EXPORTER):
        return _dcgm(where, *(dcgm or (Profiling.UNKNOWN, "it was not asked")))
    text, advice = _TEXTS[BY_PRODUCT[product].holds]
    return Finding(NAME, Status.NOTE, f"{where}: {text}", advice)


def _dcgm(where: str, state: Profiling, why: str) -> Finding:
    if state is Profiling.NOT_LOADED:
        return Finding(NAME, Status.OK, f"{where} runs, its profiling module does not: it holds no hardware counters")
    holds = "has its profiling module loaded: on GPUs before Hopper it may hold the hardware counters"
    if state is Profiling.UNKNOWN:
        holds = f"may hold hardware counters ({why})"
    detail = f"{where} {holds}, and Nsight Compute or CUPTI's own counters then fail; {_NEEDS}"
    return Finding(NAME, Status.NOTE, detail, _PAUSE)


def named(users: Iterable[ProfilingTool], visible: Callable[[ProfilingTool], bool]) -> str:
    """The processes as far as they may be told."""
    everybody = list(users)
    told = [_told(each) for each in everybody if each.pid and visible(each)]
    parts = told[:_MAX_NAMED]
    if len(told) > _MAX_NAMED:
        parts.append(f"{len(told) - _MAX_NAMED} more")
    others = sum(1 for each in everybody if each.pid and not visible(each))
    if others:
        parts.append(f"{others} process{'' if others == 1 else 'es'} of other users")
    return ", ".join(parts) or "it listens on this host"


def _told(profiler: ProfilingTool) -> str:
    gpus = f", with GPU {', '.join(map(str, profiler.gpus))} open" if profiler.gpus else ""
    return f"pid {profiler.pid}{gpus}"


def _unseen(found: Scan) -> str:
    if not found.hidden:
        return ""
    return f"; of {len(found.hidden)} processes of other users only the names were seen"
