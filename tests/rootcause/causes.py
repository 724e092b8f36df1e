"""The planted causes: the program of each, and what a finding must say to have named it.

A finding names a cause if its place (title, function, file, line, operator) fits `where`, and its advice fits `remedy`:
both were written down before any rule that finds them. What cannot be known from a trace with default options says so
in `unknowable`; such a cause still counts. Where an option of `kinetoctl trace` records what is needed, `options` has
it.
"""

from dataclasses import dataclass

_NO_TYPES = "the types and strides of tensors are recorded only with --record-shapes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One cause. where, remedy: regular expressions. unknowable: why default traces cannot tell; "": they can."""

    name: str
    program: str
    where: str
    remedy: str
    unknowable: str = ""
    options: tuple[str, ...] = ()


def of_program(program: str, *rows: tuple[str, ...]) -> tuple[Cause, ...]:
    """The causes of one program. rows: name, where, remedy, and if it cannot be known, why."""
    return tuple(
        Cause(
            name=row[0],
            program=program,
            where=row[1],
            remedy=row[2],
            unknowable=row[3] if len(row) > 3 else "",
            options=("--record-shapes",) if _NO_TYPES in row else (),
        )
        for row in rows
    )


CAUSES = (
    *of_program(
        "vision",
        ("slow_storage", r"read_shard|__getitem__", r"num_workers"),
        ("slow_collate", r"slow_collate", r"collate|num_workers"),
        ("augmentation", r"augment", r"num_workers|augment"),
        ("print_tensor", r"\bshow\b", r"print"),
        ("synchronous_logging", r"histogram_of|emit", r"log"),
        ("float64", r"float64|double", r"float32", _NO_TYPES),
        ("no_channels_last", r"conv", r"channels_last", _NO_TYPES),
    ),
    *of_program(
        "workers",
        ("too_few_workers", r"DataLoader|next batch", r"num_workers"),
        ("worker_start_per_epoch", r"DataLoader|start", r"persistent_workers"),
        ("slow_sampler", r"\bdraw\b|__iter__", r"sampl|vectoris|num_workers"),
        ("no_workers", r"__getitem__", r"num_workers"),
    ),
    *of_program(
        "language",
        ("deepcopy", r"deepcopy|lambda", r"cop(?:y|ies)"),
        ("json", r"publish", r"JSON|json|serialis"),
        ("pickle", r"hand_over", r"pickl|serialis|tolist"),
        ("checkpoint", r"lambda|torch\.save|serialization", r"checkpoint|sav"),
        ("hashing", r"fingerprint", r"less often|another thread|hash"),
        ("compression", r"lambda", r"less often|another thread|compress"),
        ("metric", r"word_error", r"item|vectoris"),
        ("tokenisation", r"tokens_of", r"regular expression|tokeni|worker|another thread"),
    ),
    *of_program(
        "gradients",
        ("clip_in_python", r"clip_gradients", r"clip_grad_norm_|foreach|fuse|fewer"),
        ("unfused_optimizer", r"optimizer|AdamW", r"fused|foreach"),
        ("anomaly_mode", r"anomaly", r"anomaly"),
        ("double_backward", r"log_norms", r"backward|gradient"),
        ("tiny_operators", r"penalty", r"vectoris|fewer|batch"),
        ("finite_checks", r"check_finite", r"fewer|less often|foreach|vectoris"),
        ("evaluation", r"validate", r"less often|evaluat"),
    ),
    *of_program(
        "services",
        ("sleep", r"after_step", r"sleep|wait"),
        ("garbage_collection", r"after_step|collector|gc", r"gc|garbage"),
        ("imports", r"after_step", r"import"),
        ("subprocess", r"after_step", r"process"),
        ("slow_share", r"after_step", r"read|file|storage"),
        ("slow_volume", r"after_step", r"read|file|storage"),
        ("lock", r"after_step", r"lock|wait"),
        ("queue", r"after_step", r"queue|wait|thread"),
        ("gil", r"crunch|metrics", r"process|GIL"),
        ("too_many_threads", r"thread", r"set_num_threads|OMP_NUM_THREADS|threads"),
        ("one_core", r"core|CPU", r"core|affinity|CPU|threads"),
        ("cpu_quota", r"CPU|core", r"quota|limit|cgroup|CPU"),
    ),
    *of_program("lookups", ("swap", r"memory", r"swap")),
    *of_program(
        "compiled",
        ("recompiles", r"compil", r"dynamic"),
        ("compile_in_the_loop", r"compil", r"once|outside"),
    ),
    *of_program("gates", ("graph_breaks", r"forward", r"graph break|fullgraph")),
    *of_program("buckets", ("jit_warm_up", r"compil", r"warm.?up|later")),
)

# Written after the rules, to check them: `python -m rootcause --held-out`.
HELD_OUT = (
    *of_program(
        "held_out",
        ("moving_average", r"MovingAverage|on_batch_end", r"larger operators|foreach|AveragedModel"),
        ("ledger", r"Ledger|on_batch_end", r"wait|sleep|disk|file"),
        ("tracker", r"Tracker|on_batch_end", r"network"),
        ("who_calls", r"WhoCalls|on_batch_end", r"less often"),
        ("histogram", r"Histogram|on_batch_end", r"less often|vectoris|whole tensors"),
        ("table", r"Table|on_batch_end", r"less often|file|disk"),
        ("retries", r"call|send|retried", r"wait|sleep"),
        ("layer_hooks", r"note", r"item|larger operators|less often"),
        ("unpacking", r"unpack", r"num_workers"),
    ),
    *of_program(
        "habits",
        ("formatted_tensors", r"log_tensors|_tensor_str", r"log|print|format|less often"),
        ("best_weights", r"remember_best|deepcopy", r"cop(?:y|ies)"),
        ("loss_by_sample", r"contrastive", r"vectoris|larger operators|batch|fewer"),
        ("own_function", r"Doubled|backward", r"vectoris|larger operators|batch|fewer"),
        ("needless_copies", r"\bsafe\b", r"cop(?:y|ies)|contiguous|clone"),
        ("casts", r"\bcast\b", r"conver|dtype|cast|precision"),
        ("zero_by_hand", r"reset_gradients", r"zero_grad|set_to_none|foreach|larger operators|fewer"),
        ("warnings", r"warn", r"warn|log|less often"),
        ("progress_bar", r"draw_progress", r"less often|print|log"),
        ("polling", r"watch", r"process|GIL|wait"),
        ("confusion", r"confusion", r"vectoris|less often|item|whole tensors"),
        ("vectorize", r"moving_rank|lambda|vectorize", r"vectoris|less often|whole"),
        ("safe_checkpoint", r"save_safely|torch\.save|serialization", r"checkpoint|sav"),
        ("collect_each_step", r"free_memory|collector|gc", r"gc|garbage"),
        ("norms", r"norms", r"item|foreach|less often|larger operators"),
        ("profiler_left_on", r"profil", r"profil"),
    ),
    *of_program(
        "records",
        ("json_lines", r"parse|__getitem__", r"num_workers"),
        ("patterns", r"__getitem__", r"num_workers"),
        ("rows_of_a_data_base", r"__getitem__", r"num_workers"),
        ("rows_of_a_service", r"fetch|__getitem__", r"num_workers"),
        ("stream", r"DataLoader|next batch|clean", r"num_workers"),
        ("padding", r"pad_and_mask", r"collate|num_workers"),
        ("seen_before", r"Seen|__call__", r"less often|another thread|hash"),
    ),
)

# Written before the rules were mended by a look at HELD_OUT, and run after that: `python -m rootcause --afterthoughts`.
AFTERTHOUGHTS = of_program(
    "afterthoughts",
    ("averaged_model", r"mix|average|update_parameters", r"foreach|multi_avg_fn|larger operators|fewer"),
    ("settings", r"describe|asdict", r"less often|cop(?:y|ies)"),
    ("latest_file", r"latest_file|glob", r"less often|file|disk"),
    ("other_process", r"\bsend\b", r"wait|process|queue|serialis|pickl"),
    ("hardest", r"hardest|lambda", r"item|vectoris|whole"),
    ("heads_one_by_one", r"\bhead\b|Attention|forward", r"vectoris|larger operators|batch|fewer"),
)

# Programs of frameworks that the project does not depend on: `python -m rootcause --frameworks`.
FRAMEWORKS = (
    *of_program(
        "frameworks_hf",
        ("trainer_tokens", r"tokenize|__getitem__", r"num_workers"),
        ("trainer_collator", r"mask_tokens", r"collate|num_workers"),
        ("trainer_callback", r"Weights|on_step_end", r"vectoris|less often|whole tensors"),
        ("trainer_loss", r"compute_loss", r"vectoris|larger operators|batch|fewer"),
        ("trainer_saves", r"save", r"checkpoint|sav"),
        ("trainer_evaluates", r"evaluat|metrics", r"less often|evaluat"),
        ("trainer_logs", r"log", r"log|less often"),
    ),
    *of_program(
        "frameworks_pl",
        ("pandas_rows", r"__getitem__", r"num_workers"),
        ("pil", r"decode|__getitem__", r"num_workers"),
        ("pl_logs", r"training_step|log", r"log|less often"),
        ("pl_metric", r"accuracy", r"item|vectoris"),
        ("pl_copies", r"Average|on_train_batch_end|deepcopy", r"cop(?:y|ies)"),
        ("pl_saves", r"sav|checkpoint", r"checkpoint|sav"),
        ("pl_validates", r"validat|evaluat", r"less often|evaluat"),
        ("pl_gradients", r"Gradients|on_after_backward", r"item|larger operators|less often|foreach"),
    ),
    *of_program(
        "loops.ignite_engine",
        ("ignite_saves", r"sav|checkpoint", r"checkpoint|sav"),
        ("ignite_evaluates", r"lambda|evaluat|Engine\.run", r"less often|evaluat"),
        ("ignite_handler", r"note_weights|histogram", r"vectoris|less often|whole tensors"),
    ),
    *of_program(
        "loops.skorch_net",
        ("skorch_saves", r"sav|checkpoint", r"checkpoint|sav"),
        ("skorch_evaluates", r"valid|evaluat|scor", r"less often|evaluat"),
        ("skorch_callback", r"Weights|on_batch_end|histogram", r"vectoris|less often|whole tensors"),
    ),
    *of_program(
        "loops.keras_model",
        ("keras_saves", r"sav|checkpoint", r"checkpoint|sav"),
        ("keras_evaluates", r"evaluat|test", r"less often|evaluat"),
        ("keras_callback", r"Weights|on_train_batch_end|histogram", r"vectoris|less often|whole tensors"),
    ),
    *of_program(
        "loops.fastai_learner",
        ("fastai_saves", r"sav|checkpoint", r"checkpoint|sav"),
        ("fastai_evaluates", r"valid|evaluat", r"less often|evaluat"),
        ("fastai_callback", r"Weights|after_batch|histogram", r"vectoris|less often|whole tensors"),
    ),
)
