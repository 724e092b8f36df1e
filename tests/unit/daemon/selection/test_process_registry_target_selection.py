"""Which of the selected processes are meant. A process is its pid, its ancestors and its command line."""

import pytest
from kinetod.selection.process_registry import Member, leading, leading_of_families

TRAIN = ("python", "train.py")
TORCHRUN = ("python", "torchrun", "train.py")
SPAWNED = ("python", "-c", "from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5)")
SERVER = ("python", "-c", "from multiprocessing.forkserver import main; main(7, 8)")
TRACKER = ("python", "-c", "from multiprocessing.resource_tracker import main;main(6)")
LOKY = ("python", "-m", "joblib.externals.loky.backend.popen_loky_posix", "--pipe", "19")
COMPILER = ("python", "/v/lib/torch/_inductor/compile_worker/__main__.py", "--parent=10")


def member(pid: int, command: tuple[str, ...] = TRAIN, *ancestors: int, gpus: str = "", **facts: bool) -> Member:
    return Member(pid=pid, command=command, ancestors=ancestors, gpus=frozenset(map(int, gpus)), **facts)


def held(pid: int, command: tuple[str, ...] = TRAIN, *ancestors: int, gpus: str) -> Member:
    return member(pid, command, *ancestors, gpus=gpus, holds=True)


@pytest.mark.parametrize(
    ("members", "meant"),
    [
        pytest.param([], set(), id="nothing"),
        pytest.param([member(10), member(11)], {10, 11}, id="strangers"),
        pytest.param([member(10, TORCHRUN), member(11, TRAIN, 10), member(12, TRAIN, 10)], {11, 12}, id="launcher"),
        pytest.param([member(10, TORCHRUN), member(11, TRAIN, 5, 10, 1)], {11}, id="launcher-with-a-shell-between"),
        pytest.param([member(10), member(11, TRAIN, 10), member(12, TRAIN, 11, 10)], {10}, id="forks-of-forks"),
        pytest.param(
            [member(10, TORCHRUN), *(member(pid, TRAIN, 10) for pid in (11, 12)), member(13, TRAIN, 11, 10)],
            {11, 12},
            id="launcher-trainers-and-a-worker",
        ),
        pytest.param([member(10), member(11, SPAWNED, 10), member(12, TRACKER, 10)], {10}, id="spawned-workers"),
        pytest.param([member(10), member(11, SERVER, 10), member(12, SERVER, 11, 10)], {10}, id="fork-server"),
        pytest.param([member(10), member(11, LOKY, 10), member(12, COMPILER, 10)], {10}, id="other-pools"),
        pytest.param([member(11, SPAWNED), member(12, SPAWNED)], {11, 12}, id="workers-alone-were-asked-for"),
        pytest.param([member(10), member(11, ("python", "eval.py"), 10)], {11}, id="what-starts-others-launches-them"),
        pytest.param(
            [member(10, trains=True), member(11, ("python", "eval.py"), 10)], {10, 11}, id="who-iterates-trains"
        ),
        pytest.param([member(10), member(11, TRAIN, 10, trains=True)], {11}, id="ranks-that-were-forked-and-iterate"),
    ],
)
def test_without_contexts_relations_tell(members: list[Member], meant: set[int]) -> None:
    assert leading(members) == meant


@pytest.mark.parametrize(
    ("members", "meant"),
    [
        pytest.param([member(10, gpus="0"), member(11, TRAIN, 10, gpus="0")], {10}, id="inherited-by-a-fork"),
        pytest.param(
            [member(10), member(11, TRAIN, 10, gpus="0"), member(12, TRAIN, 10, gpus="1")], {11, 12}, id="forked"
        ),
        pytest.param([member(10), *(member(p, SPAWNED, 10, gpus="0") for p in (11, 12))], {11, 12}, id="spawned-ranks"),
        pytest.param([member(10, gpus="0"), member(11, ("python", "log.py"), 10)], {10}, id="a-helper-of-its-own"),
        pytest.param([member(10, gpus="0"), member(11, ("python", "log.py"))], {10}, id="a-program-beside-it"),
        pytest.param(
            [member(10, TORCHRUN, gpus="01"), member(11, TRAIN, 10, gpus="01"), member(12, TRAIN, 10, gpus="01")],
            {11, 12},
            id="a-launcher-that-has-counted-the-gpus",
        ),
    ],
)
def test_without_contexts_open_gpus_count_more_than_relations(members: list[Member], meant: set[int]) -> None:
    assert leading(members) == meant


@pytest.mark.parametrize(
    ("members", "meant"),
    [
        pytest.param(
            [member(10, TORCHRUN, gpus="01"), held(11, TRAIN, 10, gpus="0"), member(12, TRAIN, 11, 10, gpus="0")],
            {11},
            id="launcher-and-worker-have-the-device-open",
        ),
        pytest.param([member(10), held(11, TRAIN, 10, gpus="0")], {11}, id="forked-rank"),
        pytest.param([member(10), held(11, SPAWNED, 10, gpus="0")], {11}, id="spawned-rank"),
        pytest.param([held(10, gpus="0"), held(11, SPAWNED, 10, gpus="0")], {10, 11}, id="a-worker-on-the-gpu"),
        pytest.param([held(10, gpus="0"), member(11, ("python", "cpu.py"))], {10}, id="not-on-the-gpu"),
        pytest.param(
            [held(11, TRAIN, 10, gpus="0"), member(12, TRAIN, 10), member(13, TRAIN, 12, 10)],
            {11, 12},
            id="a-rank-that-has-not-come-so-far",
        ),
        pytest.param([held(10, gpus="0"), member(11, ("python", "cpu.py"), trains=True)], {10, 11}, id="it-iterates"),
    ],
)
def test_who_holds_a_context_is_meant(members: list[Member], meant: set[int]) -> None:
    assert leading(members) == meant


def test_a_family_is_judged_by_itself() -> None:
    on_cpu = [member(20), member(21, TRAIN, 20), member(30, TORCHRUN), member(31, TRAIN, 5, 30, 1)]
    assert leading_of_families([held(10, gpus="0"), member(11, TRAIN, 10), *on_cpu]) == {10, 20, 31}
    assert leading_of_families([]) == set()
