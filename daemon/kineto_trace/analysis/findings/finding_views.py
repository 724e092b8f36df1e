"""The view of what to change first."""

from kineto_trace.analysis.findings.finding_rules import LEAST, findings, stack_of, uncertainty
from kineto_trace.analysis.gpu_time.gpu_events import NO_GPU
from kineto_trace.analysis.idle.idle_gaps import idle_gaps
from kineto_trace.model.context import Context
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

_EVIDENCE = {
    "cpu_op": "the trace has no operators",
    "python_function": "the trace has no Python functions",
}  # by activity type


@view(
    "findings",
    columns(
        ("place", "int", "", "rank of the finding; 1 saves most"),
        ("finding", "text", "", "short name of this kind of finding"),
        ("title", "text", "", "what is wrong"),
        ("saving_us", "float", "us", "time that the change would save, over all measured steps"),
        ("saving_pct", "float", "%", "share of the time of all measured steps"),
        ("saving_per_step_us", "float", "us", "the same per training step"),
        (
            "uncertainty_pct",
            "float",
            "%",
            "95 % interval of saving_pct, plus or minus, by how much its causes differ from step to step; missing with "
            "fewer than 3 steps",
        ),
        ("advice", "text", "", "what to do"),
        ("evidence", "text", "", "what was observed, and what the estimate of the saving assumes"),
        ("op", "text", "", "operator with the most of this time"),
        ("call_stack", "text", "", "Python frames around that operator, innermost first"),
        ("kernels", "texts", "", "kernels or copies that take most of this time"),
        ("where", "text", "", "function, file and line of the program's own code, for findings about the host"),
        ("guess", "bool", "", "whether nobody can say how much of this time can be saved; such findings come last"),
    ),
)
def findings_view(context: Context, *, top: int = 10) -> Answer:
    """What to change first, with the time that each change would save and the evidence.

    The view looks for GPU idle time by cause (view time_causes; Python functions, annotations and operators by name),
    processors that the host does not get, communication and copies that no computation hides, other programs that take
    turns on the GPU, models that run without a backward in a program that trains, changes of the layout of images,
    matrix products without tensor cores, double precision, elementwise kernels that could be fused, many small kernels
    of one function or of the optimizer, and kernels that leave part of the GPU without work; with hardware counters
    (kinetoctl trace --counters), which take precedence over estimates, also kernels that are bound by memory, by tensor
    cores or by latency, and clocks that are held down. What functions, waits,
    allocations and small kernels would save is found by running the host and the GPU of the steps again without them;
    other savings are no larger than the time that view time_causes gives to their cause. All are shares of the time
    that the steps take without being recorded, if that is known. The advice is what the GPUs of the trace can follow.
    First steps that do not show the pace of the program, and findings that would save less than half a per cent, are
    left out; time of which it is not known how much can be saved comes last. Without a GPU, the view looks for what the
    host loses time on: the program's own functions, loading, the optimizer, threads that share the GIL or the
    processors.

    Options:
    - top: the maximum number of findings.
    """
    found = context.get(findings)
    chosen = found.findings[: max(top, 0)]
    ops, strings = context.trace.table("cpu_op"), context.trace.strings
    notes = [] if context.get(idle_gaps).windows else [NO_GPU]
    if not found.findings:
        notes.append(f"no finding would save {100 * LEAST:g} % of the time of the steps or more")
        notes += [
            f"{missing}, so causes that they show were not looked for: record {kind}"
            for kind, missing in _EVIDENCE.items()
            if not len(context.trace.table(kind))
        ]
    notes += [note for note in (found.left_out, found.recording) if note]
    if len(chosen) < len(found.findings):
        notes.append(f"{len(found.findings) - len(chosen)} more: kinetoctl report --view findings")
    if len(chosen) > 1:
        notes.append("the savings overlap and must not be added up")
    return Answer(
        {
            "place": list(range(1, len(chosen) + 1)),
            "finding": [finding.name for finding in chosen],
            "title": [finding.title for finding in chosen],
            "saving_us": [finding.saving_ns / 1e3 for finding in chosen],
            "saving_pct": [100 * finding.saving_ns / found.window_ns for finding in chosen],
            "saving_per_step_us": [
                finding.saving_ns / 1e3 / found.steps if found.steps else None for finding in chosen
            ],
            "uncertainty_pct": [uncertainty(context, finding) for finding in chosen],
            "advice": [finding.advice for finding in chosen],
            "evidence": [finding.evidence for finding in chosen],
            "op": [strings[int(ops["name"][finding.op])] if finding.op >= 0 else None for finding in chosen],
            "call_stack": [stack_of(context, finding) for finding in chosen],
            "kernels": [list(finding.kernels) for finding in chosen],
            "where": [finding.where or None for finding in chosen],
            "guess": [finding.guess for finding in chosen],
        },
        notes,
    )
