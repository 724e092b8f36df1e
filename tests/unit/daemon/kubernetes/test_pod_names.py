import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from kinetod.kubernetes.api_server import ApiError
from kinetod.kubernetes.pod_names import (
    ContainerRef,
    Held,
    KubeletError,
    KubeletGpuHolders,
    PodNames,
    matched,
    uuids_by_minor,
)
from kinetod.processes.containers import Container, Names
from kinetod.processes.identity import ProcessKey
from kinetod.processes.process_info import ProcessFacts

A, B, C = (Container(id=letter * 64, pod_uid=f"uid-{letter}") for letter in "abc")
LLAMA, MISTRAL, JUPYTER = (ContainerRef("ml", name, "main") for name in ("llama-0", "mistral-0", "ada"))
FACTS = ProcessFacts(
    key=ProcessKey(7, 1), uid=0, user="root", command=("python",), gpus=(), rank=None, world_size=None, job_id="",
    is_python=True,
)  # fmt: skip


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("used", "held", "found"),
    [
        ({A: ["0"]}, {"0": (LLAMA,)}, {A: LLAMA}),
        ({A: ["0", "1"], B: ["2"]}, {"0": (LLAMA,), "1": (LLAMA,), "2": (MISTRAL,)}, {A: LLAMA, B: MISTRAL}),
        ({A: ["0"]}, {"0": (LLAMA, MISTRAL)}, {}),  # in shares
        ({A: ["0", "1"]}, {"0": (LLAMA, MISTRAL), "1": (MISTRAL,)}, {A: MISTRAL}),
        # what is known of one tells the other
        ({A: ["0"], B: ["0", "1"]}, {"0": (LLAMA, MISTRAL), "1": (MISTRAL,)}, {A: LLAMA, B: MISTRAL}),
        ({A: ["0", "7"]}, {"0": (LLAMA,)}, {}),  # 7 was given to nobody: a privileged pod
        ({A: ["0"], B: ["0"]}, {"0": (LLAMA,)}, {}),  # one of them is not the one that it was given to
        ({A: []}, {"0": (LLAMA,)}, {}),
        ({A: ["0"]}, {}, {}),
    ],
)
def test_a_container_that_uses_gpus_is_the_one_that_was_given_them_if_only_one_can_be(
    used: Mapping[Container, list[str]], held: Held, found: Mapping[Container, ContainerRef]
) -> None:
    assert matched(used, held) == found


def test_the_kubelet_is_asked_at_most_every_few_seconds() -> None:
    clock, asked = Clock(), list[float]()

    async def ask() -> Held:
        asked.append(clock.now)
        return {"0": (LLAMA,)}

    async def look() -> None:
        holders = KubeletGpuHolders(ask, clock)
        for clock.now in (0, 1, 4.9, 5.0, 6):
            assert await holders.current() == {"0": (LLAMA,)}

    asyncio.run(look())
    assert asked == [0, 5.0]


def test_a_kubelet_that_cannot_be_asked_is_told_once_and_asked_again_later(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    answers: list[KubeletError | Held] = [KubeletError("no socket"), KubeletError("no socket"), {"0": (LLAMA,)}]

    async def ask() -> Held:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def look() -> list[Held]:
        holders = KubeletGpuHolders(ask, clock)
        seen = []
        for clock.now in (0, 29, 30, 60):
            seen.append(await holders.current())
        return seen

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(look()) == [{}, {}, {}, {"0": (LLAMA,)}]
    assert [record.getMessage() for record in caplog.records] == [
        "GPUs are shown without the pods that hold them: no socket"
    ]


def test_nobody_waits_long_for_a_kubelet_that_is_late() -> None:
    async def look() -> tuple[Held, Held]:
        answer: asyncio.Future[Held] = asyncio.get_running_loop().create_future()

        async def ask() -> Held:
            return await answer

        holders = KubeletGpuHolders(ask)
        before = await holders.current(wait_s=0.01)
        answer.set_result({"0": (LLAMA,)})
        return before, await holders.current()

    assert asyncio.run(look()) == ({}, {"0": (LLAMA,)})


def test_another_thread_reads_what_the_loop_has() -> None:
    async def ask() -> Held:
        return {"0": (LLAMA,)}

    async def look() -> Held:
        read = KubeletGpuHolders(ask).reader(asyncio.get_running_loop(), 5)
        return await asyncio.to_thread(read)

    assert asyncio.run(look()) == {"0": (LLAMA,)}


def nvidia(folder: Path, **minors: str) -> Path:
    for bus, uuid in minors.items():
        (folder / bus).mkdir()
        minor = bus.removeprefix("bus")
        (folder / bus / "information").write_text(
            f"Model: \t\t NVIDIA H200\nGPU UUID: \t {uuid}\nDevice Minor: \t {minor}\nGPU Excluded:\t No\n"
        )
    return folder


def test_the_kernels_driver_says_which_gpu_has_which_device(tmp_path: Path) -> None:
    nvidia(tmp_path, bus0="GPU-a", bus3="GPU-b")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/information").write_text("GPU UUID: GPU-x\n")
    assert uuids_by_minor(tmp_path) == {0: "GPU-a", 3: "GPU-b"}


async def pods() -> Mapping[str, tuple[str, str]]:
    return {A.pod_uid: ("ml", "llama-0"), B.pod_uid: ("ml", "sidecar")}


async def no_pods() -> Mapping[str, tuple[str, str]]:
    raise ApiError("it does not answer")


async def held() -> Held:
    return {"GPU-a": (LLAMA,), "GPU-b": (MISTRAL,)}


def named(names: PodNames, *facts: ProcessFacts) -> list[Names | None]:
    return [each.names for each in asyncio.run(names.named(facts))]


def test_processes_have_the_names_that_the_kubelet_and_the_api_server_say(tmp_path: Path) -> None:
    gpus = nvidia(tmp_path, bus0="GPU-a", bus1="GPU-b")
    processes = [
        replace(FACTS, container=A, gpus=(0,)),
        replace(FACTS, container=B),
        replace(FACTS, container=C, gpus=(1,)),
        replace(FACTS, container=Container(id="d" * 64), gpus=(0,)),  # in no pod
        FACTS,
    ]
    trainer = Names(pod="llama-0", namespace="ml", container="main")
    sidecar = Names(pod="sidecar", namespace="ml")
    mistral = Names(pod="mistral-0", namespace="ml", container="main")
    both = PodNames(KubeletGpuHolders(held), pods, gpus=gpus)
    assert named(both, *processes) == [trainer, sidecar, mistral, None, None]
    assert named(PodNames(KubeletGpuHolders(held), gpus=gpus), *processes) == [trainer, None, mistral, None, None]
    assert named(PodNames(None, pods), *processes)[:3] == [Names(pod="llama-0", namespace="ml"), sidecar, None]
    assert named(PodNames(None, no_pods), *processes) == [None] * 5
