"""The planted causes of jobs of two ranks. A finding names one as in causes.py, and the rank, if only one has it."""

from dataclasses import dataclass

from rootcause.causes import Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCause(Cause):
    """A cause in a job. rank: of the one that has it; None: all. needs_gpu: on the CPU it is no cause."""

    rank: int | None = None
    needs_gpu: bool = False

    @property
    def job(self) -> str:
        """What the program is to run."""
        return f"{self.program}/{self.name.partition('_')[2]}"


RANK_CAUSES = tuple(
    RankCause(name=f"{program}_{name}", program=program, rank=rank, where=where, remedy=remedy, needs_gpu=needs_gpu)
    for program, name, rank, where, remedy, needs_gpu in (
        ("fsdp", "sleep", 1, r"wait_for_license", r"sleep", False),
        ("ddp", "sleep", 1, r"wait_for_license", r"sleep", False),
        ("ddp", "compute", 1, r"auxiliary_task|aten::mm\b", r"work|kernels|balance|equal", False),
        ("ddp", "slow_input", 1, r"__getitem__|unpack|next batch|DataLoader", r"num_workers|load", False),
        ("ddp", "imbalance", 1, r"rank 1: its kernels work on", r"balance|equal|batch", False),
        ("ddp", "evaluation", 0, r"evaluate", r"evaluat|all ranks|other ranks|less often", False),
        ("ddp", "checkpoint", 0, r"\bsave\b", r"checkpoint|asynchronous|save", False),
        ("ddp", "host_group", None, r"collective on the host|reduce_statistics|gloo", r"NCCL", True),
        ("deep", "small_buckets", None, r"small|bucket|all_reduce", r"bucket", False),
        ("deep", "unoverlapped", None, r"reduce_gradients|all_reduce|hidden", r"overlap|bucket|coalesc", False),
        ("deep", "metrics", None, r"log_metrics|item", r"item|every N steps|less often|fewer", False),
    )
)
