"""Large traces as Kineto writes them, for benchmarks: one rank of data-parallel training, any number of events.

    python -m support.trace_files.synthetic --events 1000000 --rank 0 trace.json

Theory of operation
    One training step is laid out once: a walk through the calls of a model advances the clocks of two host threads
    (forward with Python frames, backward) and of two streams (compute, NCCL), and writes each event into a template
    whose changing numbers are slots. The file is that template over and over: in every step a slot has its own
    value, base + step * increment - jitter. Jitter only shortens, and every event leaves that much room around its
    children, so that everything stays nested and no two kernels of a stream overlap.
"""

import argparse
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

PID, MAIN, BACKWARD = 4242, 4242, 4300
COMPUTE, NCCL = 7, 20
BASE_NS = 1_790_857_026_000_000_000
FIRST_NS = 4_306_452_000_000_000
LAYERS = 12
RANKS = 8
ROOM_NS = 400  # jitter is below that
KERNEL_NAMES = (
    "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn_align8>(cutlass::Params)",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, "
    "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul>)",
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>"
    "(int, float, c10::BFloat16 const*)",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>, true, false>(Flash_fwd_params)",
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda("
    "at::TensorIteratorBase&)::{lambda()#3}>(int)",
)
HEAD = {
    "schemaVersion": 1,
    "deviceProperties": [
        {
            "id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150109880320, "computeMajor": 9, "computeMinor": 0,
            "maxThreadsPerBlock": 1024, "maxThreadsPerMultiprocessor": 2048, "regsPerBlock": 65536, "warpSize": 32,
            "sharedMemPerBlock": 49152, "numSms": 132, "regsPerMultiprocessor": 65536,
            "sharedMemPerBlockOptin": 232448, "sharedMemPerMultiprocessor": 233472,
        }
    ],
    "cuda_runtime_version": 13000, "cuda_driver_version": 13000, "cupti_version": 130001,
    "record_shapes": 1, "with_stack": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": BASE_NS,
}  # fmt: skip


class Number(NamedTuple):
    """One value that differs from step to step. jitter: how much smaller it may be."""

    base: int
    increment: int = 0
    jitter: int = 0


class _Slot(NamedTuple):
    number: int  # place in the numbers
    part: int  # 0: the whole, 1: the thousands of it, 2: the rest


class Step:
    """The template of one step. Times are ns from the start of the step."""

    def __init__(self, rank: int, layers: int, stacks: bool) -> None:
        self.rank = rank
        self.stacks = stacks
        self.events = 0
        self.host = {MAIN: 1_000, BACKWARD: 0}
        self.stream = {COMPUTE: 0, NCCL: 0}
        self._text: list[str] = []
        self._numbers: list[Number] = []
        self._slots: list[_Slot] = []
        self._times: list[int] = []  # numbers that are times, which grow by the length of the step
        self._ids = dict.fromkeys(("external", "correlation", "flow", "python", "sequence"), 0)
        self._counted: list[tuple[int, str]] = []  # numbers that grow by how many ids of a sort a step has
        self._flows: list[tuple[int, int]] = []
        self._frames = [0]
        self._step(layers)
        self._finish()

    # ---- what is in a step

    def _step(self, layers: int) -> None:
        begin = self.host[MAIN]
        with self._annotation(f"ProfilerStep#{self._slot(Number(0, 1))}"), self._frame("train.py(88): train_step"):
            with (
                self._frame("torch/utils/data/dataloader.py(701): __next__"),
                self._annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"),
            ):
                self._op("aten::stack", "[[64, 512], [64, 512]]", None, MAIN, 30_000)
            self._op("aten::copy_", "[[64, 512], [64, 512]]", "Memcpy HtoD (Pinned -> Device)", MAIN)
            with self._frame("nn.Module: Transformer_0"):
                for layer in range(layers):
                    self._forward(layer)
            self.host[BACKWARD] = self.host[MAIN]
            for layer in reversed(range(layers)):
                self._backward(layer)
            self.host[MAIN] = self.host[BACKWARD] + 5_000
            with self._annotation("Optimizer.step#AdamW.step"), self._frame("torch/optim/adamw.py(212): step"):
                for _ in range(layers):
                    self._op("aten::_foreach_add_", f"[[{512}, 512]]", KERNEL_NAMES[3], MAIN)
            self._synchronize()
            self._advance(MAIN, 2_000)
        self.length = max(self.host[MAIN], *self.stream.values()) + 20_000
        self.length += -self.length % 1_000
        assert begin < self.length

    def _forward(self, layer: int) -> None:
        width = 512 + 64 * (layer % 5)
        with self._frame(f"nn.Module: Block_{layer}"):
            with self._frame("torch/nn/modules/normalization.py(217): forward"):
                self._op("aten::layer_norm", f"[[64, {width}], [], []]", KERNEL_NAMES[4], MAIN)
            for name in ("qkv", "proj", "up", "down"):
                with (
                    self._frame(f"nn.Module: Linear_{layer * 4}"),
                    self._frame("torch/nn/modules/linear.py(130): forward"),
                    self._frame("<built-in function linear>"),
                    self._cpu_op("aten::linear", f"[[64, {width}], [{width}, {width}], []]", MAIN, forward=True),
                ):
                    with self._cpu_op("aten::t", f"[[{width}, {width}]]", MAIN):
                        self._advance(MAIN, 1_500)
                    self._op("aten::addmm", f"[[{width}], [64, {width}], [{width}, {width}]]", self._gemm(name), MAIN)
            self._op("aten::scaled_dot_product_attention", f"[[8, 8, 64, {width}]]", KERNEL_NAMES[5], MAIN)
            self._memory(512 * width)

    def _backward(self, layer: int) -> None:
        width = 512 + 64 * (layer % 5)
        for name in ("down", "up", "proj", "qkv"):
            flow = self._flows.pop() if self._flows else None
            outer = "autograd::engine::evaluate_function: AddmmBackward0"
            with self._cpu_op(outer, None, BACKWARD, backward=flow), self._cpu_op("AddmmBackward0", None, BACKWARD):
                for _ in range(2):
                    self._op("aten::mm", f"[[{width}, 64], [64, {width}]]", self._gemm(name), BACKWARD)
        with self._cpu_op("nccl:all_reduce", f"[[{width * width}]]", BACKWARD):
            self._collective(width * width)
        self._memory(-512 * width)

    def _gemm(self, name: str) -> str:
        return KERNEL_NAMES[("qkv", "proj", "up", "down").index(name) % 3]

    # ---- events

    def _op(self, name: str, dims: str | None, kernel: str | None, thread: int, work_ns: int = 4_000) -> None:
        with self._cpu_op(name, dims, thread):
            self._advance(thread, work_ns)
            if kernel is not None:
                self._launch(kernel, thread)

    @contextmanager
    def _cpu_op(
        self,
        name: str,
        dims: str | None,
        thread: int,
        *,
        forward: bool = False,
        backward: tuple[int, int] | None = None,
    ) -> Iterator[None]:
        external = self._id("external")
        more = (
            "" if dims is None else f', "Input type": ["c10::BFloat16"], "Input Dims": {dims}, "Concrete Inputs": [""]'
        )
        if forward:
            sequence, flow = self._id("sequence"), self._id("flow")
            self._flows.append((self._ids["sequence"], self._ids["flow"]))
            more += f', "Sequence number": {sequence}, "Fwd thread id": 0'
            self._flow("s", "fwdbwd", flow, PID, thread, self.host[thread])
        if backward is not None:
            sequence = self._slot_of("sequence", backward[0])
            more += f', "Sequence number": {sequence}, "Fwd thread id": 1'
            self._flow("f", "fwdbwd", self._slot_of("flow", backward[1]), PID, thread, self.host[thread])
        arguments = f'"External id": {external},"Record function id": 0{more}, "Ev Idx": {self._ids["external"]}'
        with self._span("cpu_op", name, PID, thread, arguments):
            yield

    @contextmanager
    def _annotation(self, name: str) -> Iterator[None]:
        arguments = f'"External id": {self._id("external")},"Record function id": 0, "Ev Idx": 1'
        with self._span("user_annotation", name, PID, MAIN, arguments):
            yield

    @contextmanager
    def _frame(self, name: str) -> Iterator[None]:
        if not self.stacks:
            yield
            return
        parent = self._slot_of("python", self._frames[-1]) if self._frames[-1] else "null"
        arguments = f'"Python parent id": {parent}, "Python id": {self._id("python")}'
        if name.startswith("nn.Module"):
            arguments += ', "Python module id": 0'
        self._frames.append(self._ids["python"])
        with self._span("python_function", name, PID, MAIN, arguments + ', "Ev Idx": 7'):
            yield
        self._frames.pop()

    @contextmanager
    def _span(self, category: str, name: str, pid: int, thread: int, arguments: str) -> Iterator[None]:
        """An event around what the block adds; its template comes before theirs."""
        start = self.host[thread]
        marks = self._complete(category, name, pid, thread, start, ROOM_NS, arguments)
        self._advance(thread, 1_200)
        yield
        self._advance(thread, 2 * ROOM_NS)
        self._numbers[marks] = Number(self.host[thread] - start, 0, ROOM_NS)
        self._advance(thread, ROOM_NS)

    def _launch(self, kernel: str, thread: int) -> None:
        correlation, external = self._id("correlation"), self._slot_of("external", self._ids["external"])
        number = self._ids["correlation"]
        copy = kernel.startswith("Memcpy")
        start = self.host[thread]
        call = "cudaMemcpyAsync" if copy else "cudaLaunchKernel"
        common = f'"External id": {external}, "cbid": {41 if copy else 211}, "correlation": {correlation}'
        self._complete("cuda_runtime", call, PID, thread, start, 5_000, common)
        self._flow("s", "ac2g", self._slot_of("correlation", number), PID, thread, start)
        self._advance(thread, 6_000)
        begin = max(start + 7_000, self.stream[COMPUTE] + 1_000)
        length = 8_000 + 900 * (number % 7)
        self.stream[COMPUTE] = begin + length
        arguments = (
            f'"External id": {self._slot_of("external", self._ids["external"])}, "device": 0, "context": 1, '
            f'"stream": {COMPUTE}, "correlation": {self._slot_of("correlation", number)}, '
        )
        if copy:
            arguments += '"bytes": 131072, "memory bandwidth (GB/s)": 26.5974025974026'
        else:
            blocks = 16 * (1 + number % 9)
            arguments += (
                f'"queued": 0, "registers per thread": 128, "shared memory": 49152, '
                f'"blocks per SM": {blocks / 132:.6f}, '
                f'"warps per SM": {blocks * 8 / 132:.6f}, "grid": [{blocks}, 1, 1], "block": [256, 1, 1], '
                f'"est. achieved occupancy %": {min(100, blocks)}'
            )
        self._complete("gpu_memcpy" if copy else "kernel", kernel, 0, COMPUTE, begin, length, arguments)
        self._flow("f", "ac2g", self._slot_of("correlation", number), 0, COMPUTE, begin)

    def _collective(self, elements: int) -> None:
        correlation, external = self._id("correlation"), self._slot_of("external", self._ids["external"])
        number = self._ids["correlation"]
        start = self.host[BACKWARD]
        arguments = f'"External id": {external}, "cbid": 430, "correlation": {correlation}'
        self._complete("cuda_runtime", "cudaLaunchKernelExC", PID, BACKWARD, start, 5_000, arguments)
        self._flow("s", "ac2g", self._slot_of("correlation", number), PID, BACKWARD, start)
        self._advance(BACKWARD, 6_000)
        begin = max(start + 9_000, self.stream[COMPUTE], self.stream[NCCL] + 1_000)
        self.stream[NCCL] = begin + 60_000
        arguments = (
            f'"device": 0, "context": 1, "stream": {NCCL}, "correlation": {self._slot_of("correlation", number)}, '
            '"queued": 0, "registers per thread": 96, "shared memory": 92160, "blocks per SM": 0.181818, '
            '"warps per SM": 3.636364, "grid": [24, 1, 1], "block": [640, 1, 1], "est. achieved occupancy %": 6, '
            f'"Collective name": "allreduce", "In msg nelems": {elements}, "Out msg nelems": {elements}, '
            f'"Group size": {RANKS}, "dtype": "BFloat16", "In split size": "[]", "Out split size": "[]", '
            f'"Process Group Name": "0", "Process Group Description": "default_pg", '
            f'"Process Group Ranks": "{list(range(RANKS))}"'
        )
        name = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        self._complete("kernel", name, 0, NCCL, begin, 60_000, arguments)
        self._flow("f", "ac2g", self._slot_of("correlation", number), 0, NCCL, begin)

    def _synchronize(self) -> None:
        start, end = self.host[MAIN], max(self.host[MAIN] + 5_000, *self.stream.values()) + 2_000
        arguments = f'"cbid": 165, "correlation": {self._id("correlation")}'
        self._complete("cuda_runtime", "cudaDeviceSynchronize", PID, MAIN, start, end - start, arguments)
        self.host[MAIN] = end + ROOM_NS

    def _memory(self, size: int) -> None:
        time = self._time(self.host[MAIN])
        self._event(
            f'"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": {PID}, "tid": {MAIN}, '
            f'"ts": {time},\n    "args": {{\n      "Total Reserved": 20971520, "Total Allocated": {10**7 + size}, '
            f'"Bytes": {size}, "Device Id": 0, "Device Type": 1, '
            f'"Addr": {139_000_000_000 + abs(size)}, "Ev Idx": 3\n    }}'
        )
        self._advance(MAIN, ROOM_NS)

    # ---- templates

    def _complete(self, category: str, name: str, pid: int, tid: int, start: int, length: int, arguments: str) -> int:
        """Returns the number of its duration."""
        time = self._time(start)
        place = len(self._numbers)
        duration = self._time(length, jitter=ROOM_NS, relative=True)
        self._event(
            f'"ph": "X", "cat": "{category}", "name": "{name}", "pid": {pid}, "tid": {tid},\n'
            f'    "ts": {time}, "dur": {duration},\n    "args": {{\n      {arguments}\n    }}'
        )
        return place

    def _flow(self, phase: str, category: str, number: str, pid: int, tid: int, start: int) -> None:
        end = ', "bp": "e"' if phase == "f" else ""
        self._event(
            f'"ph": "{phase}", "id": {number}, "pid": {pid}, "tid": {tid}, "ts": {self._time(start)},\n'
            f'    "cat": "{category}", "name": "{category}"{end}'
        )

    def _event(self, text: str) -> None:
        self.events += 1
        self._text.append(f"  {{\n    {text}\n  }},\n")

    def _advance(self, thread: int, ns: int) -> None:
        self.host[thread] += ns

    def _time(self, ns: int, jitter: int = 0, relative: bool = False) -> str:
        """A time in microseconds with three digits."""
        number = len(self._numbers)
        self._numbers.append(Number(ns, 0, jitter))
        if not relative:
            self._times.append(number)
        return f"\0{number}:1\0.\0{number}:2\0"

    def _slot(self, number: Number) -> str:
        self._numbers.append(number)
        return f"\0{len(self._numbers) - 1}:0\0"

    def _id(self, sort: str) -> str:
        self._ids[sort] += 1
        return self._slot_of(sort, self._ids[sort])

    def _slot_of(self, sort: str, value: int) -> str:
        self._counted.append((len(self._numbers), sort))
        return self._slot(Number(value))

    def _finish(self) -> None:
        """Slots in the order of the text; what the numbers grow by."""
        pieces = "".join(self._text).replace("%", "%%").split("\0")
        self._slots = []
        for piece in pieces[1::2]:
            number, part = piece.split(":")
            self._slots.append(_Slot(int(number), int(part)))
        formats = {0: "%d", 1: "%d", 2: "%03d"}
        kinds = iter(self._slots)
        self.template = "".join(formats[next(kinds).part] if place % 2 else piece for place, piece in enumerate(pieces))
        self._base = np.array([number.base for number in self._numbers], np.int64)
        self._increment = np.array([number.increment for number in self._numbers], np.int64)
        self._jitter = np.array([number.jitter for number in self._numbers], np.int64)
        self._base[self._times] += FIRST_NS
        self._increment[self._times] = self.length
        for place, sort in self._counted:
            self._increment[place] = self._ids[sort]
        self._number = np.array([slot.number for slot in self._slots])
        self._part = np.array([slot.part for slot in self._slots])

    def text(self, step: int, random: np.random.Generator) -> str:
        """The events of one step as JSON, with a comma behind each."""
        values = self._base + step * self._increment
        values -= (random.random(len(values)) * self._jitter).astype(np.int64)
        chosen = values[self._number]
        chosen = np.where(self._part == 1, chosen // 1_000, np.where(self._part == 2, chosen % 1_000, chosen))
        return self.template % tuple(chosen.tolist())


def write(file: IO[str], events: int, *, rank: int = 0, stacks: bool = True, layers: int = LAYERS) -> int:
    """Writes a trace of about so many events (whole steps). Returns the number."""
    step = Step(rank, layers, stacks)
    random = np.random.default_rng(rank)
    head = {**HEAD, "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": RANKS}}
    file.write(json.dumps(head)[:-1] + ',\n  "traceEvents": [\n')
    count = max(1, round(events / step.events))
    for number in range(count):
        file.write(step.text(number, random))
    rest = _rest(FIRST_NS, FIRST_NS + count * step.length)
    file.write(",\n".join("  " + json.dumps(event) for event in rest))
    file.write('\n  ],\n  "traceName": "trace.json"\n}')
    return count * step.events + len(rest)


def _rest(start_ns: int, end_ns: int) -> list[dict[str, object]]:
    """Metadata and the span of the profiler."""
    found: list[dict[str, object]] = []
    start = start_ns / 1_000
    for pid, labels in ((PID, "CPU"), (0, "GPU 0")):
        common: dict[str, object] = {"ph": "M", "ts": start, "pid": pid, "tid": 0}
        found.append({"name": "process_name", **common, "args": {"name": "python3"}})
        found.append({"name": "process_labels", **common, "args": {"labels": labels}})
    for pid, tid, name in (
        (PID, MAIN, f"thread {MAIN} (python3)"),
        (PID, BACKWARD, f"thread {BACKWARD} (pt_autograd_0)"),
        (0, COMPUTE, f"stream {COMPUTE} "),
        (0, NCCL, f"stream {NCCL} "),
    ):
        found.append({"name": "thread_name", "ph": "M", "ts": start, "pid": pid, "tid": tid, "args": {"name": name}})
    span = {"ph": "X", "cat": "Trace", "ts": start, "dur": (end_ns - start_ns) / 1_000, "pid": "Spans"}
    found.append({**span, "tid": "PyTorch Profiler", "name": "PyTorch Profiler (0)", "args": {"Op count": 0}})
    window: dict[str, object] = {"name": "Record Window End", "ph": "i", "s": "g", "pid": "", "tid": ""}
    found.append({**window, "ts": end_ns / 1_000})
    return found


def text(events: int, *, rank: int = 0, stacks: bool = True, layers: int = LAYERS) -> str:
    """A small trace in memory."""
    file = io.StringIO()
    write(file, events, rank=rank, stacks=stacks, layers=layers)
    return file.getvalue()


def main() -> None:
    """Writes a synthetic trace to a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--no-stacks", action="store_true")
    options = parser.parse_args()
    with options.path.open("w") as file:
        print(write(file, options.events, rank=options.rank, stacks=not options.no_stacks), "events")


if __name__ == "__main__":
    main()
