"""The planted causes that need a GPU: `python -m rootcause --gpu`. See causes.py for what the columns mean."""

from rootcause.causes import of_program

GPU_CAUSES = (
    *of_program(
        "gpu.decoder",
        ("item_each_micro_step", r"item|note|_local_scalar_dense", r"\.item\(\)|from the GPU|one number"),
        ("clip_with_item", r"item|clip_each|_local_scalar_dense", r"\.item\(\)|clip_grad_norm_|GPU|one number"),
        ("print_cuda_tensor", r"\bshow\b|print", r"print"),
        ("float32_head", r"mm|linear|product", r"bfloat16|autocast|TF32"),
        ("empty_cache", r"memory|cudaMalloc|cudaFree|empty_cache", r"empty_cache"),
        ("evaluation", r"validate", r"less often|[Ee]valuat"),
    ),
    *of_program(
        "gpu.deep",
        ("synchronize_each_layer", r"[sS]ynchronize|wait_for_layer", r"synchroni[sz]|results from the GPU"),
        ("item_each_layer", r"item|note_mean|_local_scalar_dense", r"\.item\(\)|from the GPU|one number"),
        ("unfused_optimizer", r"optimizer|AdamW", r"fused=True|foreach"),
        ("tiny_kernels", r"penalty", r"vectoris|fewer|fuse|larger"),
        ("upload_each_step", r"cop(?:y|ies)", r"on the (?:GPU|device)|prefetch|ahead"),
        ("checkpoint", r"\bsave\b|serialization", r"checkpoint|sav"),
        ("gil", r"GIL|global lock|crunch", r"process"),
        ("gpu_neighbour", r"process|program", r"other (?:process|program)|share"),
    ),
    *of_program(
        "gpu.images",
        ("no_channels_last", r"conv|nchw|layout|channels", r"channels_last"),
        ("cudnn_benchmark_off", r"conv|cudnn", r"cudnn\.benchmark"),
        ("no_workers", r"augment|__getitem__|batch|DataLoader", r"num_workers"),
        ("too_few_workers", r"DataLoader|next batch", r"num_workers"),
        ("pageable_copies", r"pageable", r"pin_memory|[Pp]in"),
        ("few_cores", r"core|CPU|processor", r"core|affinity|CPU"),
    ),
    *of_program(
        "gpu.compiled",
        ("graph_breaks", r"compil|graph break|forward", r"graph break|fullgraph|out of compiled|compiled code"),
    ),
    *of_program("gpu.shapes", ("shape_churn", r"compil", r"dynamic")),
    *of_program(
        "gpu.jax_regression",
        ("host_callback", r"host_weights|callback", r"callback|on the GPU|to the GPU"),
        ("jit_in_the_loop", r"norms|compil|jit", r"once|outside|compil"),
    ),
)

# Written after the rules, by somebody who had not read them: `python -m rootcause --gpu --held-out`.
GPU_HELD_OUT = (
    *of_program(
        "gpu.held_out",
        (
            "confusion_in_numpy",
            r"\bupdate\b|Confusion|numpy",
            r"results from the GPU|on the (?:GPU|device)|vectoris|less often|bincount",
        ),
        (
            "class_balanced_loss",
            r"class_balanced|nonzero|masked_select|aten::index\b",
            r"results from the GPU|vectoris|larger operators|fewer|synchroni[sz]|torch\.where|mask",
        ),
        (
            "balanced_until_converged",
            r"balanced_targets|is_nonzero|_local_scalar_dense|__bool__",
            r"results from the GPU|\.item\(\)|synchroni[sz]|fixed number|on the (?:GPU|device)",
        ),
        (
            "predictions_as_json",
            r"\bappend\b|PredictionLog|json|tolist",
            r"less often|serialis|JSON|another (?:thread|process)|results from the GPU|tolist",
        ),
        (
            "gradient_histograms",
            r"log_gradients|GradientLogger|histc|histogram",
            r"less often|fewer|results from the GPU|tolist|every",
        ),
        ("ends_saved", r"save_ends|fsync|torch\.save|serialization", r"checkpoint|sav|less often|another thread"),
        (
            "idle_teacher",
            r"teacher|\bloss\b.*forward|without (?:a )?(?:backward|gradient)|no_grad",
            r"less often|cache|precomput|smaller|no longer need|not need",
        ),
    ),
    *of_program(
        "gpu.held_out_lm",
        (
            "hard_tokens",
            r"hardest_tokens|tolist",
            r"results from the GPU|on the (?:GPU|device)|vectoris|quantile|topk|tolist",
        ),
        ("double_loss", r"careful_loss|float64|double", r"float32|bfloat16|precision|dtype"),
        (
            "time_loop",
            r"\brecur\b|Summary|small kernels|tiny|short kernels",
            r"vectoris|fewer|fuse|larger operators|CUDA graph|torch\.compile|scan",
        ),
        (
            "tokenise_in_step",
            r"\bencode\b|\bpieces\b|next_tokens|WordPieces",
            r"num_workers|worker|DataLoader|ahead|another (?:thread|process)|tokeni|once|cache",
        ),
        ("metrics_lock", r"\bpublish\b|Board|send_forever", r"\block\b|queue"),
    ),
)
