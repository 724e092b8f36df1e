"""Hardware counters on a real GPU, in some three minutes: `python tests/gpu/counters_proof.py`, see --help.

Needs an NVIDIA GPU, torch with CUDA, ncu and nvcc, and libkineto_counters.so (python agent/native/build_hook.py).
Prints one line of JSON for each measurement and a last line, PASS or FAIL with what failed.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PLACES = [str(ROOT / each) for each in ("agent", "daemon", "cli", "protos", "tests")]
sys.path[:0] = PLACES
os.environ["PYTHONPATH"] = os.pathsep.join([*PLACES, *filter(None, [os.environ.get("PYTHONPATH")])])

from kinetod.counters.backend_group import CHOICES, CUPTI  # noqa: E402
from support.counters import gpu_proof as proof  # noqa: E402

# By host-timed phases on an H200, libcupti 13.0: what a correct sampler sees, in per cent, within five points.
EXPECTED = {
    "matmul": {"GPU busy": 99.95, "SM busy": 96.2, "Tensor pipe": 93.3, "Occupancy": 14.8, "DRAM": 17.8},
    "copy": {"GPU busy": 99.97, "SM busy": 97.8, "Tensor pipe": 0.0, "Occupancy": 80.7, "DRAM": 86.7},
    "sleep": {"GPU busy": 0.02, "SM busy": 0.0, "Tensor pipe": 0.0, "DRAM": 0.0},
}
POINTS = 5.0  # also from what ncu says of the same kernels
FINE_S = 10.0  # of sampling every 100 us
TURN_S = 1.5  # of training, with sampling and without, in turns
PHASES = ("train", "steps", "launches")
MOST_SLOWDOWN = 1.003
# Shares of a core. CUPTI takes some 75 us for a sample of eight metrics, of which 22 us are for any one of the
# multiprocessors' counters.
LOST_TO_NCU_MS = 5.0  # its attempt to begin may cost samples, which are told
MOST_COST = {"cost_1ms": 0.15, "cost_100us": 0.8}


async def measure(kills: int, pairs: int, seconds: float, backend: str) -> dict[str, Any]:
    """All figures, each printed as soon as it is there; of another backend than the usual one, those that differ."""
    found: dict[str, Any] = {}
    began = time.monotonic()

    def note(name: str, figures: dict[str, Any]) -> None:
        found[name] = figures
        print(json.dumps({name: figures, "at_s": round(time.monotonic() - began, 1)}), flush=True)

    with proof.gpu_work() as work, tempfile.TemporaryDirectory() as folder:
        async with proof.sampler(backend) as (client, uuid):
            note("inventory", await proof.inventory(client, uuid))
            note("phases", await proof.phases(client, uuid, work))
            note("cost_1ms", await proof.cost(client, uuid, work, proof.MS, seconds))
            if backend != CUPTI:
                return found
            note("cost_100us", await proof.cost(client, uuid, work, proof.MS // 10, FINE_S))
            note("two_samplers", await proof.two_samplers(client, uuid))
            begun = await proof.recording(client, uuid, proof.MS)
            note("own_profiler", await work.do("profile", 0))
            await proof.stopped(begun)
            note("against_ncu", await proof.against_ncu(client, uuid, work))
            for phase in PHASES:
                note(phase, await proof.paired_steps(client, uuid, work, phase, pairs=pairs, seconds=TURN_S))
            note("ncu", await proof.beside_ncu(client, uuid, proof.build_kernels(Path(folder))))
            note("kills", await proof.kills(client, uuid, kills))
    return found


def problems(found: dict[str, Any]) -> list[str]:
    """What is not as it should be."""
    wrong = []
    for phase, expected in EXPECTED.items():
        for label, value in expected.items():
            seen = found["phases"][phase].get(label, float("nan"))
            if not abs(seen - value) <= POINTS:
                wrong.append(f"{phase}: {label} is {seen:.1f}, not {value}")
    for name, most in MOST_COST.items():
        if name in found and found[name]["cpu_share"] > most:
            wrong.append(f"{name}: {found[name]['cpu_share']:.3f} of a core, more than {most}")
    if found["cost_1ms"]["lost_ms"] or found["phases"]["losses"]["lost_ms"]:
        wrong.append("samples were lost at 1 ms")
    return [*wrong, *_problems_beside_others(found)] if "ncu" in found else wrong


def _problems_beside_others(found: dict[str, Any]) -> list[str]:
    wrong = []
    if "COUNTERS_BUSY" not in found["two_samplers"]["second"] or found["two_samplers"]["losses"]["lost_ms"]:
        wrong.append("two samplers")
    if found["own_profiler"]["kernels"] != 500:
        wrong.append(f"torch.profiler saw {found['own_profiler']['kernels']} of 500 kernels")
    for phase in PHASES:
        if found[phase]["ratio"] - found[phase]["half_interval"] > MOST_SLOWDOWN:
            wrong.append(f"{phase}: steps take {found[phase]['ratio']:.4f} times as long")
    for phase, labels in found["against_ncu"].items():
        clocks = labels["MHz"][0] / labels["MHz"][1]
        for label in labels.keys() - {"MHz"}:
            sampled, told = labels[label]
            if min(abs(sampled * by - told) for by in (1, clocks, 1 / clocks)) > POINTS:
                wrong.append(f"{phase}: {label} is {sampled}, and ncu says {told}")
    if found["kills"]["failed"]:
        wrong.append(f"{len(found['kills']['failed'])} starts after a kill failed")
    ncu = found["ncu"]
    if ncu["before"] or ncu["after"] or not ncu["during"][0] or ncu["losses"]["lost_ms"] > LOST_TO_NCU_MS:
        wrong.append("ncu before, during or after")
    if "Nsight Compute" not in ncu["busy"]:
        wrong.append(f"while ncu measures: {ncu['busy'] or 'not refused'}")
    return wrong


def main() -> int:
    """Exit status 0 if all is as it should be."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=10, help="of training with and without sampling")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each measurement of cost")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--backend", choices=CHOICES, default=CUPTI)
    options = parser.parse_args()
    found = asyncio.run(measure(options.kills, options.pairs, options.seconds, options.backend))
    if options.output:
        options.output.write_text(json.dumps(found, indent=1))
    wrong = problems(found)
    print(f"FAIL: {'; '.join(wrong)}" if wrong else "PASS")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
