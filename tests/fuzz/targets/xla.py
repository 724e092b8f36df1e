"""XLA's profiles and compiled modules through their decoders, and kernels compared with the modules."""

import random
from collections.abc import Iterator

from kineto_agent.protocol.records import PART_HEAD
from kineto_trace.decode.xplane import hlo_modules, xplane
from kineto_trace.decode.xplane.parts import parts
from kineto_trace.model.trace import StringTable
from kineto_trace.structure.hlo.hlo_kernels import with_hlo
from support.fuzz import mutate
from support.trace_files.traces import table
from support.xla.messages import Op, PlaneMaker, begun_at, module, recorded, source, space

from fuzz.parts import joined, parted

KERNELS = ("fusion_1", "fusion_2", "body", "sm90_gemm", "memcpy128", "wrapped_transpose")


def play(data: bytes) -> None:
    profile, compiled = parted(data, 2)
    strings = StringTable()
    found = xplane.decode(source([profile], xplane.FORMAT), strings)
    for each in found.tables.values():
        assert len(each) == 0 or int(each["start"].min()) >= 0
        assert len(each) == 0 or int(each["duration"].min()) >= 0
    modules = hlo_modules.decode(source([compiled], hlo_modules.FORMAT), strings).hlo_modules
    rows = [{"name": name, "start": at, "duration": 1, "correlation": at, "hlo": ""} for at, name in enumerate(KERNELS)]
    kernels = with_hlo({"kernel": table("kernel", rows, strings)}, modules, strings)["kernel"]
    assert -1 <= int(kernels["hlo"].min()) <= int(kernels["hlo"].max()) < len(strings.strings)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """One of both."""
    both = parted(data, 2)
    at = rng.randrange(2)
    both[at] = mutate.damaged(both[at], rng, 6)
    return joined(*both)


def seeds() -> Iterator[bytes]:
    """A profile of a CPU with one of a device, a module with a loop, and small real ones."""
    host, device = PlaneMaker("/host:CPU"), PlaneMaker("/device:TPU:0")
    host.line(
        "python", [("train", 0, 9, {"_r": 1, "step_num": 3}), ("dot", 1, 2, {"hlo_op": "dot", "hlo_module": "f"})]
    )
    device.line("XLA Ops", [("fusion.1", 0, 5, {"hlo_op": "fusion.1", "hlo_module": "f"})])
    device.line("Stream #3(Compute)", [("MemcpyH2D", 5, 1, {"memcpy_details": "size:4"})], row=2)
    looped = module(
        "jit_f",
        {
            1: [
                Op("fusion.1", alike="fusion.1", op_name="jit(f)/add", source="a.py", line=3),
                Op("w", "while", called=(2, 3)),
            ],
            2: [Op("body"), Op("gemm", "custom-call")],
            3: [Op("fusion.2", alike="fusion.1")],
        },
    )
    yield joined(space(host, device, begun_at(1_795_163_478_000_000_000)), looped)
    small = min(parts(recorded("jax-graphs-modules")), key=len)
    yield joined(recorded("jax-graphs-xspace")[:3000], small)
    yield joined(b"", PART_HEAD.pack(3))
