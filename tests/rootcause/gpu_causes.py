"""The planted causes that need a GPU: `python -m rootcause --gpu`. See causes.py for what the columns mean."""

from rootcause.causes import of_program

GPU_CAUSES = (
    *of_program(
        "gpu.decoder",
        ("item_each_micro_step", r"item|note|_local_scalar_dense", r"\.item\(\)|results of the GPU"),
        ("clip_with_item", r"item|clip_each|_local_scalar_dense", r"\.item\(\)|clip_grad_norm_|results of the GPU"),
        ("print_cuda_tensor", r"\bshow\b|print", r"print"),
        ("float32_head", r"mm|linear|product", r"bfloat16|autocast|TF32"),
        ("empty_cache", r"memory|cudaMalloc|cudaFree|empty_cache", r"empty_cache"),
        ("evaluation", r"validate", r"less often|[Ee]valuat"),
    ),
    *of_program(
        "gpu.deep",
        ("synchronize_each_layer", r"[sS]ynchronize|wait_for_layer", r"synchroni[sz]|results of the GPU"),
        ("item_each_layer", r"item|note_mean|_local_scalar_dense", r"\.item\(\)|results of the GPU"),
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
