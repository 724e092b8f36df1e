"""Why the kernels of one rank take longer: more, larger or slower ones."""

from kineto_trace.analysis.distributed.rank_kernels import RankKernels, rank_kernels, slower_kernels
from support.trace_files.ranks import Event, context, event, launched, step

KINDS = {"aten::mm": (100.0, 64), "aten::gelu": (20.0, 1000)}  # us and blocks of each kernel


def rank(*, calls: int = 4, rows: float = 1.0, speed: float = 1.0) -> RankKernels:
    """Three steps. calls: of aten::mm; rows: times as many, which grids of aten::mm do not show; speed: of kernels."""
    events: list[Event] = []
    for number in range(3):
        at = 2_000.0 * number
        events.append(step(number, at, 1_990))
        for place, name in enumerate(["aten::mm"] * calls + ["aten::gelu"] * 4):
            us, blocks = KINDS[name]
            begin = at + 10 + 150 * place
            grid = [round(blocks * rows) if name == "aten::gelu" else blocks, 1, 1]
            events.append(event("cpu_op", name, begin, 8))
            events += launched("k", begin + 2, begin + 10, us * rows / speed, 100 * number + place + 1, grid=grid)
    return context(events, rank=0, size=2).get(rank_kernels)


def test_an_operator_that_is_called_more_often_is_named() -> None:
    assert slower_kernels(rank(calls=6), [rank()]) == "6 kernels of aten::mm a step, the others 4"


def test_larger_grids_are_more_data_although_not_all_kernels_show_it() -> None:
    assert slower_kernels(rank(rows=1.6), [rank()]) == "its kernels work on 1.60 times as much data"


def test_equal_calls_and_grids_that_take_longer_are_slower_kernels() -> None:
    assert slower_kernels(rank(speed=0.8), [rank()]) == "its kernels take 1.25 times as long with equal grids"


def test_a_rank_whose_kernels_take_no_longer_has_no_reason() -> None:
    assert slower_kernels(rank(), [rank(speed=0.9)]) is None
    assert slower_kernels(rank(), []) is None
