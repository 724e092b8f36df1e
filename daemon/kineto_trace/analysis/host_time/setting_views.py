"""The view of the program's settings: what was set when it was recorded, and what is known to make it slower."""

from kineto_trace.analysis.host_time.setting_rules import SLOWS, facts_of, verdict
from kineto_trace.model.context import Context
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

NO_SETTINGS = "the program's settings are not in this trace: kinetod records them, other tools do not"
PER_THREAD = "torch keeps autocast, grad mode and inference mode for each thread by itself: they are not recorded"


@view(
    "settings",
    columns(
        (
            "setting",
            "text",
            "",
            "torch.*, dynamo.*, optimizer.*, python.*, and env.* for environment variables that are set",
        ),
        ("value", "text", "", "when the recording began"),
        ("effect", "text", "", '"slows" or "may slow"; null: not known to cost time'),
        ("judgement", "text", "", "what this value does, where it costs time"),
    ),
)
def settings(context: Context) -> Answer:
    """The settings of torch, Python and the environment when the recording began; those that cost time come first.

    Environment variables are read from an allow list, so that no secrets are recorded. `torch.num_threads` is what a
    new thread of the program would get. Optimizers are those that have stepped before; `parameters` counts tensors.
    """
    found, facts = context.trace.target.settings, facts_of(context.trace)
    judged = {name: verdict(name, value, facts) for name, value in found.items()}

    def order(name: str) -> tuple[int, str]:
        told = judged[name]
        return (2 if told is None else 0 if told.effect == SLOWS else 1), name

    names = sorted(found, key=order)
    values = {
        "setting": names,
        "value": [str(found[name]) for name in names],
        "effect": [told.effect if (told := judged[name]) is not None else None for name in names],
        "judgement": [told.text if (told := judged[name]) is not None else None for name in names],
    }
    if not names:
        return Answer(values, [NO_SETTINGS])
    return Answer(values, [PER_THREAD] if "torch.version" in found else [])
