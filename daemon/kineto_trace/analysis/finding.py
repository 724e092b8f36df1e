"""A finding, and what to do about the common ones."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kineto_trace.structure.library_calls import CallKind

# Causes whose possible saving is unknown, or that end by themselves.
GUESSES = frozenset(
    {
        "kernel_gaps",
        "queued",
        "unknown_idle",
        "unmeasured_convolutions",
        "busy_function",
        "compile_warm_up",
        "framework_work",
        "recurrent_cells",
        "memory_bound",
        "compute_bound",
        "latency_bound",
        "throttled_clock",
    }
)
# Causes whose remedy only shows what to change, and saves nothing by itself.
DIAGNOSED = frozenset({"host_annotation", "waiting_in_collectives"})
_SENTENCE = re.compile(r"[.!?] (?=[^a-z])")  # between sentences
_ASIDE = re.compile(r" \((?:[^()]|\([^()]*\))*\)")
_WORKERS = "in DataLoader workers (num_workers)"
_LESS = "do this less often, or in another thread or process"
REMEDIES = {
    CallKind.NONE: "Run this line less often, or in another thread or process. Replace element-by-element work with "
    f"operations on whole tensors, and prepare batches {_WORKERS}.",
    CallKind.TENSOR_PRINT: "Do not print tensors in the loop: formatting one reads every number in it. Print a single "
    "number every N steps.",
    CallKind.LOGGING: "Log less often, or hand the records to another thread (logging.handlers.QueueHandler); a "
    "handler that flushes or syncs makes training wait for the disk.",
    CallKind.CHECKPOINT: "Save checkpoints less often, or copy the state and save it in another thread or process "
    "(torch.distributed.checkpoint.async_save).",
    CallKind.COPY: "Do not make deep copies in the loop: update an existing copy in place (torch._foreach_copy_, "
    "torch.optim.swa_utils.AveragedModel), or copy less often.",
    CallKind.JSON: f"Serialise less (JSON is slow for numbers): send summary values, not tensors; {_LESS}.",
    CallKind.PICKLE: f"Pickle less: send summary values, not tensors or models; {_LESS}.",
    CallKind.SUBPROCESS: "Do not start a process in every step: get the same information from /proc or a library, or "
    "query it every few seconds from another thread.",
    CallKind.IMPORT: "Import modules once, before the loop: each further import, reload or search for a module reads "
    "files, and may run the module again.",
    CallKind.TOKENS: f"Tokenise before training, or {_WORKERS}. Python's regular expressions process one string at a "
    "time; a compiled tokenizer processes many.",
    CallKind.ARCHIVE: f"Do not compress or unpack in the step: {_LESS}; store input data uncompressed, or read it "
    f"{_WORKERS}.",
    CallKind.IMAGE: f"Decode and augment images {_WORKERS}, in whole batches, or once before training.",
    CallKind.NETWORK: "Do not wait for the network in the step: use it less often, or from another thread or process.",
    CallKind.FILE: f"Do not wait for files in the step: read them ahead of time in another thread or {_WORKERS}, or "
    "keep them on faster storage; write less often, or in another thread or process.",
    CallKind.WAIT: "Hand over work without waiting for the result, hold locks for less time, or make the other thread "
    "or process faster. The step waits for it (a lock, a queue, a result).",
    CallKind.TABLES: "Keep tables out of the loop: convert them to tensors once, before training.",
    CallKind.SLEEP: "Remove the sleep, or sleep in another thread: the step waits for it.",
    CallKind.ITEM: "Do not read tensors one number at a time in Python (.item(), .tolist()): vectorise the "
    "computation, and read one result.",
    CallKind.GARBAGE: "Collect garbage only every N steps, in the same step on all ranks: call gc.freeze() once the "
    "model and the data are loaded (the collector then skips them), gc.disable() before the loop, and gc.collect() "
    "every N steps. Alternatively, raise the thresholds (gc.set_threshold). If the line itself calls gc.collect(), "
    "call it less often.",
    CallKind.COLLECTIVE: "Run fewer, larger collectives, and overlap them with computation: let "
    "DistributedDataParallel or FSDP reduce gradients in buckets during the backward pass, combine small tensors into "
    "one, reduce metrics only every N steps and read them later (async_op=True). Waiting for other ranks is "
    "not counted as a saving; see rank_what_if.",
    CallKind.CLIP: "Clip all gradients at once with torch.nn.utils.clip_grad_norm_(…, foreach=True) or a fused "
    "optimizer that clips, or not at all if their norm never reaches the limit; with gradient accumulation, clip once "
    "per optimizer step.",
    CallKind.HASH: "Hash less often, or in another thread or process: a digest reads every byte. Where tampering is no "
    "concern, a checksum (zlib.crc32, xxhash) is faster.",
    CallKind.DATABASE: "Do not wait for a database in the step: write many rows in one transaction (executemany, one "
    "commit); access it less often, or from another thread or process.",
    CallKind.CONVERT: "Keep numbers in arrays or tensors from the start: converting a Python list reads one object at "
    f"a time. Convert once, before training, or {_WORKERS}.",
}
HOLDER_OF_THE_GIL = (
    "Move the other thread's work to a process of its own (multiprocessing) or into code that releases the GIL, or let "
    "that thread sleep between small pieces of work."
)
PINNING = (
    "Give this DataLoader thread less to do: smaller types (uint8 images, 16-bit numbers), fewer, larger tensors "
    "per batch, and nothing in a batch that the training does not need. It copies batches into pinned memory, and "
    "holds the GIL while it frees the workers' memory."
)
COLLECTIVES_OF_THE_HOST = (
    "Use the NCCL backend for tensors on the GPU, and keep barriers and object collectives out of the loop."
)
BLOCKED = (
    "Remove the wait, move it to another thread, or prepare ahead of time what the thread waits for (a queue, "
    "DataLoader workers). The thread is off the CPU here: it sleeps, or waits for a lock, a file or the network."
)
BUSY = (
    "Make this line faster: replace element-by-element work with operations on whole arrays or tensors, cache results "
    "that would otherwise be recomputed, and run independent work in other processes."
)
FRAMEWORK = (
    "Leave out callbacks, hooks, metrics and logs that are not needed in every step, or do more per step (a larger "
    "batch, several batches per optimizer step). This is what the framework does around the training itself."
)
PAGING = (
    "Check for swapping (free, vmstat, the memory limit of the container), use less memory (fewer workers, smaller "
    "caches) or add memory, and read mapped files ahead of time in worker processes. This memory was swapped out, or "
    "belongs to a memory-mapped file (numpy.memmap, Arrow), and is read from storage page by page."
)
LOADING = (
    "Load batches ahead of time and in parallel: DataLoader(num_workers=…, persistent_workers=True, prefetch_factor=…)."
    " {more}"
)
EVALUATION_ADVICE = (
    "Evaluate less often, or on less data. If this computes fixed features or the outputs of a teacher, compute them "
    "once and keep them."
)
SMALL_OPERATORS = (
    "Use fewer, larger operators: vectorise over whole tensors instead of looping (torch._foreach_* and "
    "torch.nn.utils.clip_grad_norm_ for lists of parameters), or run this less often."
)
CONVERSION_ADVICE = (
    "Convert tensors once, where the data is created, and keep one dtype throughout the model: each .to(), .float() or "
    ".double() rewrites the whole tensor, and its gradient in the backward pass."
)
COPY_ADVICE = "Copy less, or less often: reuse buffers (copy_ into an existing one) and use views instead of clones."


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding.

    saving_ns: over all steps that its rule evaluates, as the mean of the GPUs.
    causes: the causes of view time_causes that it would reduce; the saving never exceeds their time.
    op: row of cpu_op that shows it best, or -1.
    frame: row of python_function that shows it best, or -1.
    kernels: names, the longest first.
    where: function, file and line of the program's own code; "" if none.
    replayed: whether the saving comes from replaying the steps without the finding's work and without the cost of
        recording.
    """

    name: str
    title: str
    saving_ns: int
    advice: str
    evidence: str
    causes: tuple[str, ...] = ()
    op: int = -1
    frame: int = -1
    kernels: tuple[str, ...] = ()
    where: str = ""
    replayed: bool = False

    @property
    def guess(self) -> bool:
        """Whether the possible saving is unknown, or the cause ends by itself; such findings come last."""
        return self.name in GUESSES


def remedy(row: Mapping[str, Any]) -> str:
    """Returns what a row of view findings says to do, in a sentence; "" if it says nothing."""
    first = _SENTENCE.split(row["advice"] or "", maxsplit=1)[0]
    return _ASIDE.sub("", first).partition("; ")[0].rstrip(".")
