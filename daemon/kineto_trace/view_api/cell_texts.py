"""Values, headings and titles of results as texts for people, the same on every surface."""

from collections.abc import Mapping, Sequence
from typing import Any

from kineto_trace.base.quantities import format_duration, format_size, shortened_apart
from kineto_trace.base.source_places import short_place
from kineto_trace.view_api.result_columns import ResultColumn

MAX_TEXT = 64
MAX_ITEMS = 64  # of a list
PROSE = frozenset({"meaning", "about", "title", "advice", "evidence", "why", "hides", "effect"})  # hold sentences
PLACES = frozenset({"what", "where", "function", "caller", "file", "place"})  # paths in these are shortened
MAX_PLACE = 128
_WORDS: Mapping[str, str] = {  # words in names of columns, as people write them
    "gpu": "GPU",
    "gpus": "GPUs",
    "cpu": "CPU",
    "sm": "SM",
    "dram": "DRAM",
    "pcie": "PCIe",
    "nvlink": "NVLink",
    "gil": "GIL",
    "sql": "SQL",
    "id": "ID",
    "op": "operator",
    "ops": "operators",
    "exec": "execution",
    "memcpy": "copies",
    "memset": "fills",
    "dtype": "data type",
    "dataloader": "data loader",
    "algbw": "algorithm bandwidth",
    "busbw": "bus bandwidth",
    "std": "standard deviation",
}
_UNIT_SUFFIXES = (
    "_us",
    "_ns",
    "_pct",
    "_bytes",
    "_gb_s",
    "_tflop_s",
    "_tflop",
    "_gflop",
    "_flop_byte",
    "_mhz",
    "_w",
    "_c",
)
# view -> title, sentence; others have their own name and description
HEADS: Mapping[str, tuple[str, str]] = {
    "ranks": ("Ranks", "Per step; the ranks that the others wait for longest come first."),
    "rank_time_causes": ("Where the step time goes", "Shares of the time of all GPUs, and the ranks with the "
                         "smallest and largest shares. Each moment has one cause, so they sum to 100 %."),
    "rank_what_if": ("What faster ranks or hidden transfers would save", "Estimated with a model of the job; the "
                     "savings overlap, so do not add them up."),
    "rank_waits": ("Who waits for whom", "Waits in collectives, derived from their durations; the longest come first."),
    "step_spread": ("Steps over ranks", "How long each step took on the host."),
    "time_causes": ("Where the step time goes, by GPU", "Each moment has one cause, so they sum to 100 %. Without "
                    "GPU activity: where the host's time goes."),
    "step_breakdown": ("Parts of a step", "Each moment counts towards the first of these that was active."),
    "findings": ("What to change", "Changes, each with the time that it would save."),
    "not_recorded": ("What was not recorded", "And the option that records it."),
    "flame_graph": ("Flame graph", "Identical stacks are merged across all ranks; the width of a frame is the time or "
                    "samples in it and its callees."),
    "gpu_summary": ("GPUs", "Utilization counts kernels only; busy also counts copies and fills."),
    "idle_causes": ("Why the GPUs were idle", "Share of the steps' time, or of the trace, in which a GPU did nothing."),
    "gpu_utilization": ("GPU utilization over time", "Share of each interval in which a kernel ran."),
    "kernels": ("Kernels", "By name, most time first."),
    "operators": ("Operators", "Self excludes the operators inside."),
    "python_samples": ("Python", "By line, from stack samples; the lines that ran most come first, idle threads last."),
    "threads": ("Threads", "Threads of the process by CPU time, including those without Python."),
    "collective_summary": ("Collectives", "Bandwidths use the factors of nccl-tests."),
    "memory_curve": ("Memory over time", "What the allocator handed out, and what it holds."),
    "memory_snapshot": ("Memory at one moment", "Block by block."),
    "memory_fragmentation": ("Reserved but unused memory", "What the allocator holds but has not handed out."),
    "memory_peak": ("What filled the memory at its peak", "By the operator that allocated it."),
    "diff_tree": ("Tree of differences", "Steps, modules, optimizer steps and data loading of two traces, matched in "
                  "order: one node and its children."),
    "diff_tree_operators": ("Operators of a node", "One node of the diff tree: sums over all steps of two traces."),
    "recommendations": ("Exceeded thresholds", "The rules of the TensorBoard plug-in."),
    "sm_efficiency": ("SM efficiency", ""),
    "overview": ("Overview", ""),
}  # fmt: skip
# special words in names of views
_VIEW_WORDS = {"cuda": "CUDA", "flops": "FLOPs", "comm": "communication", "comp": "computation"}
VERDICT = "verdict"  # the name of the first result of a report, and of its column
ON_RANKS = (" ranks)", " captures)")  # what the title of a finding that several traces have ends with
# Findings whose saving rests on an assumption, such as twice the speed, besides the time that was measured.
ASSUMED = frozenset(
    {
        "double_precision",
        "elementwise",
        "exposed_communication",
        "gpu_shared",
        "no_tensor_cores",
        "small_collectives",
        "small_grids",
        "small_kernels",
        "unfused_optimizer",
    }
)
MEASURED = 0.5  # of the saving: one that is known better than that counts as measured
_WHOLE_PCT = 10.0  # from here on without decimals
_LEAST_PCT = 0.05  # of an uncertainty that is shown


def heading(column: ResultColumn) -> str:
    """Returns the title of a column: its name without the unit, in words."""
    return f"{bare_heading(column)} %" if column.name.endswith("_pct") else bare_heading(column)


def bare_heading(column: ResultColumn) -> str:
    """Returns the title of a column whose unit is shown beside it."""
    name = next((column.name.removesuffix(end) for end in _UNIT_SUFFIXES if column.name.endswith(end)), column.name)
    return in_words(name)


def in_words(name: str) -> str:
    """Returns a name of several words as people write it."""
    return " ".join(_WORDS.get(word, word) for word in name.split("_"))


def headings(columns: Sequence[ResultColumn]) -> dict[str, str]:
    """Returns the titles of columns by name; equal ones get "time" or "size" added."""
    titles = [heading(column) for column in columns]
    return {
        column.name: f"{title} {KINDS[column.unit]}"
        if titles.count(title) > 1 and column.unit in KINDS and title != KINDS[column.unit]
        else title
        for title, column in zip(titles, columns, strict=True)
    }


KINDS: Mapping[str, str] = {"us": "time", "bytes": "size"}
UNITS: Mapping[str, str] = {
    "us": "time in µs, ms or s",
    "ns": "Unix time in ns",
    "%": "per cent",
    "bytes": "B, KiB, MiB or GiB",
}


def unit(column: ResultColumn) -> str:
    """Returns the unit in which the page shows a column's values."""
    if column.unit:
        return UNITS.get(column.unit, column.unit)
    return {"text": "text", "texts": "list", "bool": "yes or no"}.get(column.type, "number without a unit")


def cell(value: Any, column: ResultColumn) -> str:
    """Formats a value for people."""
    return cells([value], column)[0]


def cells(values: Sequence[Any], column: ResultColumn, most: int = 0) -> list[str]:
    """Formats the values of a column for people; long texts that differ still do.

    most: characters; 0: MAX_TEXT, or MAX_PLACE for places, but sentences are whole.
    """
    texts = [_cell(value, column) for value in values]
    if column.name in PROSE and not most:
        return texts
    return shortened_apart(texts, most or (MAX_PLACE if column.name in PLACES else MAX_TEXT))


def _cell(value: Any, column: ResultColumn) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if column.unit == "us":
        return format_duration(1000 * float(value))
    if column.unit == "bytes":
        return format_size(float(value))
    if isinstance(value, float):
        return f"{value:.1f} %" if column.unit == "%" else f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}" if column.unit != "ns" else str(value)
    text = _joined(value) if isinstance(value, list) else str(value)
    return short_place(text) if column.name in PLACES else text


def _joined(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values[:MAX_ITEMS])) + (", …" if len(values) > MAX_ITEMS else "")


def view_title(name: str) -> str:
    """Returns the title of a view."""
    if name in HEADS:
        return HEADS[name][0]
    text = " ".join(_VIEW_WORDS.get(word) or in_words(word) for word in name.split("_"))
    return text[:1].upper() + text[1:]


def view_sentence(name: str, description: str) -> str:
    """Returns a sentence about a view: by default the first paragraph of its description in one line."""
    told = HEADS[name][1] if name in HEADS else ""
    return told or " ".join(description.split("\n\n")[0].split())


def confidence(row: Mapping[str, Any]) -> str:
    """Returns how sure the saving of a row of view findings is: "measured", "likely" or "a rough estimate"."""
    if row["guess"]:
        return "a rough estimate"
    error = row["uncertainty_pct"]
    known = error is not None and error <= MEASURED * row["saving_pct"] and row["finding"] not in ASSUMED
    return "measured" if known else "likely"


def saving(row: Mapping[str, Any]) -> str:
    """Returns what a finding promises, and how sure that is: `could save up to 36 ms a step (72 %, likely)`.

    row: of view findings, with a saving.
    """
    each = row["saving_per_step_us"]
    took = f"{format_duration(1e3 * (each or row['saving_us']))} {'a step' if each else 'of the recorded time'}"
    return f"could save up to {took} ({percent(row['saving_pct'])}, {confidence(row)})"


def gain(row: Mapping[str, Any], *, several: bool) -> str:
    """Returns what a finding promises, how sure that is and, of several traces, its rank; "" if there is none of it."""
    parts = [saving(row)] if row["saving_us"] else []
    parts += [f"± {percent(row['uncertainty_pct'])}"] if (row["uncertainty_pct"] or 0.0) >= _LEAST_PCT else []
    if several and row["rank"] is not None:
        parts.append(f"most on rank {row['rank']}" if row["title"].endswith(ON_RANKS) else f"on rank {row['rank']}")
    return ", ".join(parts)


def percent(value: float) -> str:
    """Formats a share with two digits."""
    return f"{value:.0f} %" if value >= _WHOLE_PCT else f"{value:.1f} %"
