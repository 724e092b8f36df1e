"""A finding, and what to do about the common ones."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kineto_trace.base.quantities import format_duration
from kineto_trace.structure.library_calls import CallKind

# Causes whose possible saving is unknown.
GUESSES = frozenset(
    {
        "kernel_gaps",
        "queued",
        "unknown_idle",
        "unmeasured_convolutions",
        "busy_function",
        "framework_work",
        "memory_bound",
        "compute_bound",
        "latency_bound",
        "throttled_clock",
    }
)
ON_RANKS = (" ranks)", " captures)")  # what the title of a finding that several traces have ends with
_WHOLE_PCT = 10.0  # from here on without decimals
_LESS = "do it less often, or in another thread or process"
REMEDIES = {
    CallKind.NONE: f"Look at this line: {_LESS}; work on single numbers is faster as operations on whole tensors, and "
    "batches can be prepared in worker processes of a DataLoader (num_workers).",
    CallKind.TENSOR_PRINT: "Do not print tensors in the loop: to format them reads every number. Print a figure every "
    "so many steps.",
    CallKind.LOGGING: "Log less often, or hand the records to another thread (logging.handlers.QueueHandler); a "
    "handler that flushes or syncs keeps the training waiting for the disk.",
    CallKind.CHECKPOINT: "Save checkpoints less often, or copy the state and save it in another thread or process "
    "(torch.distributed.checkpoint.async_save).",
    CallKind.COPY: "Do not make deep copies in the loop: update a copy that exists in place (torch._foreach_copy_, "
    "torch.optim.swa_utils.AveragedModel), or copy less often.",
    CallKind.JSON: f"Serialise less (a JSON text of numbers is slow): send figures, not tensors; {_LESS}.",
    CallKind.PICKLE: f"Pickle less: send figures, not tensors or models; {_LESS}.",
    CallKind.SUBPROCESS: "Do not start a process in each step: read the same from /proc or a library, or ask in "
    "another thread, every few seconds.",
    CallKind.IMPORT: "Import modules once, before the loop: importing, reloading or looking for one again reads files "
    "and runs the module.",
    CallKind.TOKENS: "Tokenise before the training, or in worker processes of a DataLoader (num_workers); regular "
    "expressions in Python run one text at a time, a compiled tokenizer many.",
    CallKind.ARCHIVE: f"Do not compress or unpack in the step: {_LESS}; for input, store it unpacked or read it in "
    "worker processes of a DataLoader (num_workers).",
    CallKind.IMAGE: "Decode and augment images in worker processes of a DataLoader (num_workers), on whole batches, or "
    "once before the training.",
    CallKind.NETWORK: f"Do not wait for the network in the step: {_LESS}.",
    CallKind.FILE: f"Do not wait for files in the step: read them ahead in another thread or in worker processes of a "
    f"DataLoader (num_workers), keep them on faster storage; to write, {_LESS}.",
    CallKind.WAIT: "The step waits for another thread or process (a lock, a queue, a result): give it the work without "
    "waiting for the answer, hold locks for a shorter time, or make the other side faster.",
    CallKind.TABLES: "Keep tables out of the loop: convert them to tensors once, before the training.",
    CallKind.SLEEP: "Remove the sleep, or sleep in another thread: the step waits for it.",
    CallKind.ITEM: "Do not read single numbers of tensors in Python (.item(), .tolist()): compute on whole tensors "
    "(vectorised) and read one result.",
    CallKind.GARBAGE: "Collect garbage every so many steps: call gc.freeze() once the model and the data are there, so "
    "that they are not looked at again, and gc.disable() before the loop with a gc.collect() every so many steps, in "
    "all ranks at once; or raise gc.set_threshold(). If the line itself calls gc.collect(), call it less often.",
    CallKind.COLLECTIVE: "Run fewer and larger collectives, and overlap them with computation: let "
    "DistributedDataParallel or FSDP reduce gradients in buckets during the backward, put several small tensors into "
    "one, reduce metrics every so many steps and read them later (async_op=True). Waiting for other ranks is "
    "not counted as a saving; see rank_what_if.",
    CallKind.CLIP: "Clip all gradients at once (torch.nn.utils.clip_grad_norm_ with foreach=True, or a fused optimizer "
    "that clips), and not at all if their norm never reaches the limit; with gradient accumulation, once for each step "
    "of the optimizer.",
    CallKind.HASH: f"Hash less, since a digest reads every byte: {_LESS}; where nobody attacks, a checksum "
    "(zlib.crc32, xxhash) is faster.",
    CallKind.DATABASE: "Do not wait for a database in the step: write many rows in one transaction (executemany, one "
    f"commit); {_LESS}.",
    CallKind.CONVERT: "Keep numbers in arrays or tensors from the beginning: making one from a Python list reads one "
    "object at a time. Convert once, before the training, or in worker processes of a DataLoader (num_workers).",
}
HOLDER_OF_THE_GIL = (
    "Move the other thread's work to a process of its own (multiprocessing), into code that releases the GIL, or let "
    "it sleep between small pieces of work."
)
PINNING = (
    "This thread of the DataLoader copies batches into pinned memory, and releases the workers' memory with the GIL. "
    "Give it less to do: smaller types (uint8 images, 16 bits), fewer and larger tensors in a batch, or less in a "
    "worker's batch that the training does not need."
)
COLLECTIVES_OF_THE_HOST = (
    "Use the NCCL backend for tensors on the GPU, and keep barriers and object collectives out of the loop."
)
BLOCKED = (
    "The thread waits here without using a processor: in a sleep, for a lock, for a file or the network. Remove the "
    "wait, do it in another thread, or prepare what it waits for ahead (a queue, worker processes of a DataLoader)."
)
BUSY = (
    "Look at this line: work on single numbers is faster as operations on whole arrays or tensors; what is computed "
    "again with the same result can be kept, and independent work can run in other processes."
)
FRAMEWORK = (
    "This is what the framework does around the training itself. Leave out callbacks, hooks, metrics and logs that are "
    "not needed in each step, or let a step do more (a larger batch, several batches for each step of the optimizer)."
)
PAGING = (
    "Its memory was swapped out, or belongs to a file mapped into memory (numpy.memmap, Arrow), and is read from "
    "storage page by page. Look for swapping (free, vmstat, the memory limit of the container), use less memory (fewer "
    "workers, smaller caches) or more of it; read mapped files ahead in worker processes."
)
LOADING = "Load ahead and in parallel: DataLoader(num_workers=…, persistent_workers=True, prefetch_factor=…). {more}"
EVALUATION_ADVICE = (
    "Evaluate less often, or on less data. If these are fixed features or a teacher, compute them once and keep them."
)
SMALL_OPERATORS = (
    "Use fewer and larger operators: vectorised ones on whole tensors instead of a loop (torch._foreach_* and "
    "torch.nn.utils.clip_grad_norm_ for lists of parameters), or do it less often."
)
CONVERSION_ADVICE = (
    "Convert tensors once, where the data is made, and keep one number type (dtype) through the model: each .to(), "
    ".float() or .double() writes the whole tensor anew, and its gradient once more."
)
COPY_ADVICE = "Copy less, or less often: reuse buffers (copy_ into one that exists), keep views instead of clones."


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
        """Whether the possible saving is unknown; such findings come last."""
        return self.name in GUESSES


def saving(row: Mapping[str, Any]) -> str:
    """Returns what a finding promises: `save up to 36 ms a step (72 %)`. row: of view findings, with a saving."""
    each = row["saving_per_step_us"]
    took = f"{format_duration(1e3 * (each or row['saving_us']))} {'a step' if each else 'of the recorded time'}"
    return f"save up to {took} ({percent(row['saving_pct'])})"


def percent(value: float) -> str:
    """Formats a share with two digits."""
    return f"{value:.0f} %" if value >= _WHOLE_PCT else f"{value:.1f} %"
