"""What targets recorded through XLA: a profile of a CPU and a device, and the modules whose kernels ran there."""

import json

from kineto_agent.protocol.records import HLO_MODULES_FORMAT, PART_HEAD, XPLANE_FORMAT
from support.trace_files.h200 import RECORDINGS, recording, target_of
from support.xla.messages import Op, PlaneMaker, begun_at, module, space

from fuzz.records import Original, Source

KERNELS = ("fusion_1", "less", "body", "sm90_gemm", "less", "fusion_1", "memcpy128")


def profiled() -> Original:
    """The kernels do not say which HLO they ran: the module, with a loop, does."""
    info = json.loads(target_of(recording(RECORDINGS[0])).to_json())
    start = info["window_start_ns"]
    host, device = PlaneMaker("/host:CPU"), PlaneMaker("/device:GPU:0")
    dot = {"hlo_op": "dot", "hlo_module": "jit_f", "program_id": 3}
    host.line("python", [("train", 0, 9000, {"_r": 1, "step_num": 3}), ("dot", 10, 200, dot), ("load", 500, 100, {})])
    host.line("tf_XLAEigen/7", [("ThreadpoolListener::Record", 5, 0, {}), ("dot.2", 700, 10, dot)], row=2)
    events = [(name, at * 100, 50, {"correlation_id": at + 1}) for at, name in enumerate(KERNELS)]
    device.line("Stream #3(Compute)", [*events, ("MemcpyH2D", 900, 5, {"memcpy_details": "size:4"})])
    device.line("Steps", [("3", 0, 800, {})], row=2)
    compiled = module(
        "jit_f",
        {
            1: [
                Op("fusion.1", alike="fusion.1", op_name="jit(f)/add", source="a.py", line=3),
                Op("w", "while", called=(2, 3)),
                Op("fusion.4", alike="fusion.1"),
            ],
            2: [Op("body"), Op("gemm", "custom-call")],
            3: [Op("less")],
        },
    )
    profile = space(host, device, begun_at(start))
    sources = (("jax", XPLANE_FORMAT, profile), ("hlo_modules", HLO_MODULES_FORMAT, compiled))
    return Original(info=info, sources=tuple(_source(*each) for each in sources))


def _source(name: str, format_: str, message: bytes) -> Source:
    whole = PART_HEAD.pack(len(message)) + message
    half = len(whole) // 2
    metadata = {"threads": {"python": [7]}}
    return Source(
        name=name, format=format_, metadata=metadata, record_bytes={}, buffers=(whole[:half], whole[half:]), strings=b""
    )
