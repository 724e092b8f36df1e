"""Titles and sentences of views, the same on every surface."""

from collections.abc import Mapping

from kineto_trace.view_api.cell_texts import in_words

# view -> title, sentence; others have their own name and description
HEADS: Mapping[str, tuple[str, str]] = {
    "ranks": ("Ranks", "Per step; those for which the others wait longest come first."),
    "rank_time_causes": ("Where the step time goes", "Shares of the time of all GPUs, and of the ranks with the "
                         "least and the most of each; one cause at each moment, so they sum to 100 %."),
    "rank_what_if": ("What faster ranks or hidden transfers would save", "By a model of the job; savings overlap and "
                     "must not be added up."),
    "rank_waits": ("Who waits for whom", "In collectives, told by their durations; the longest waits come first."),
    "step_spread": ("Steps over ranks", "Lengths on the host."),
    "time_causes": ("Where the step time goes, by GPU", "One cause at each moment, so they sum to 100 %. Without "
                    "GPU activity: where the host's time goes."),
    "step_breakdown": ("Parts of a step", "Each moment counts for the first of these that was active then."),
    "findings": ("What to change", "Each with the time that the change would save."),
    "not_recorded": ("What was not recorded", "And which option records it."),
    "flame_graph": ("Flame graph", "Equal stacks are one, of all ranks together; a frame is as wide as the time or "
                    "samples in it and in what it called."),
    "gpu_summary": ("GPUs", "Utilization counts kernels; busy counts copies and fills, too."),
    "idle_causes": ("Why the GPUs were idle", "Share of the steps' time, or of the trace, in which a GPU did nothing."),
    "gpu_utilization": ("GPU utilization over time", "Share of each interval in which a kernel ran."),
    "kernels": ("Kernels", "By name; the one with the most time comes first."),
    "operators": ("Operators", "Self: without the operators inside."),
    "python_samples": ("Python", "By line, from samples of the stacks; what ran most comes first, idle threads last."),
    "threads": ("Threads", "Of the process, by CPU time; those without Python, too."),
    "collective_summary": ("Collectives", "Bandwidths by the factors of nccl-tests."),
    "memory_curve": ("Memory over time", "What the allocator gave out, and what it holds."),
    "memory_snapshot": ("Memory at one moment", "Block by block."),
    "memory_fragmentation": ("Reserved but unused memory", "What the allocator holds and has not given out."),
    "memory_peak": ("What filled the memory at its peak", "By the operator that allocated it."),
    "diff_tree": ("Tree of differences", "Steps, modules, optimizer steps and data loading of two traces, matched in "
                  "order: one node, and what is inside of it."),
    "diff_tree_operators": ("Operators of a node", "Of the tree of differences: sums over all steps of two traces."),
    "recommendations": ("Thresholds that are exceeded", "The rules of the TensorBoard plug-in."),
    "sm_efficiency": ("SM efficiency", ""),
    "overview": ("Overview", ""),
}  # fmt: skip
# special words in names of views
_WORDS = {"cuda": "CUDA", "flops": "FLOPs", "comm": "communication", "comp": "computation"}


def view_title(name: str) -> str:
    """Returns the title of a view."""
    if name in HEADS:
        return HEADS[name][0]
    text = " ".join(_WORDS.get(word) or in_words(word) for word in name.split("_"))
    return text[:1].upper() + text[1:]


def view_sentence(name: str, description: str) -> str:
    """Returns a sentence about a view: by default the first paragraph of its description in one line."""
    told = HEADS[name][1] if name in HEADS else ""
    return told or " ".join(description.split("\n\n")[0].split())
