"""Functions of the program that copy or convert tensors in the forward, which autograd then does once more backward."""

from collections.abc import Iterator

import numpy as np

from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.host_findings import remedies
from kineto_trace.analysis.host_findings.direct_operators import (
    backward_ns,
    called_directly,
    moments_of,
    outermost_names,
)
from kineto_trace.analysis.host_findings.host_figures import is_enough, margin, per_step, total_ns
from kineto_trace.analysis.host_time.moment_classes import moment_classes
from kineto_trace.analysis.host_time.user_calls import user_calls
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import gpu
from kineto_trace.structure.python.code_places import code_place

CONVERSIONS = ("aten::to", "aten::_to_copy", "aten::type_as")
COPIES = ("aten::clone", "aten::contiguous", "aten::copy_", "aten::repeat", "aten::repeat_interleave")
LEAST = 0.1  # of the steps: most models copy a little, and need it


def forward_copies(context: Context) -> Iterator[Finding]:
    """Yields a finding for each function whose copies and conversions take much of the steps."""
    if len(context.get(gpu)) or not len(context.get(user_calls)):
        return
    strings = context.trace.strings
    converts, copies = (np.isin(np.array(strings[:], object), names) for names in (CONVERSIONS, COPIES))
    rows, caller = called_directly(context)
    chosen = (converts | copies)[context.trace.table("cpu_op")["name"][rows]]
    rows, caller = rows[chosen], caller[chosen]
    functions, place = np.unique(caller, return_inverse=True)
    backward = backward_ns(context, rows, place.reshape(-1), len(functions))
    for number, function in enumerate(functions.tolist()):
        mine = moments_of(context, function)
        name = outermost_names(context, mine)
        mine, name = mine[name >= 0], name[name >= 0]
        mine, name = mine[(converts | copies)[name]], name[(converts | copies)[name]]
        weight = context.get(moment_classes).weight[mine]
        whole = float(weight.sum()) + float(backward[number])
        if whole < LEAST * total_ns(context) or not is_enough(context, whole, len(mine)):
            continue
        where = code_place(strings[function])
        converting = 2 * float(weight[converts[name]].sum()) > float(weight.sum())
        yield Finding(
            name="conversions_in_the_forward" if converting else "copies_in_the_forward",
            title=f"{where.short} {'converts tensors to other number types' if converting else 'copies tensors'}, "
            "forward and backward",
            saving_ns=int(whole),
            advice=remedies.CONVERSIONS if converting else remedies.COPIES,
            evidence=f"{per_step(context, float(weight.sum()))}, {margin(context, float(weight.sum()))}, and "
            f"{per_step(context, float(backward[number]))} in their backward; the saving assumes that none is needed",
            where=str(where),
        )
