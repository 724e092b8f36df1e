"""Other ways to the GPU from Python: CuPy, Triton, Numba, ONNX Runtime, TensorRT."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from gpu.zoo.catalog import program
from gpu.zoo.life import Life, Skip, digest_of, need
from gpu.zoo.programs.torch_common import batches, bits, same, torch_of

CUPY_KERNEL = r"""
extern "C" __global__ void next(unsigned *values, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) values[i] = values[i] * 1664525u + 1013904223u;
}
"""
COUNT, MODULUS = 1 << 18, 1 << 32
# A file of its own: Triton reads the source of its kernels.
TRITON_SOURCE = """
import triton
import triton.language as tl

@triton.jit
def descend(weights, gradients, rate, count, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    old = tl.load(weights + places, mask=inside)
    new = old - rate * tl.load(gradients + places, mask=inside)
    tl.store(weights + places, new, mask=inside)

@triton.jit
def activate(source, target, count, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + places, mask=places < count)
    tl.store(target + places, value * tl.sigmoid(value), mask=places < count)

def blocks(count):
    return (triton.cdiv(count, 1024),)
"""


def needs_gpu(life: Life) -> None:
    """Raises Skip where there is none."""
    if life.device != "cuda":
        raise Skip("needs a GPU")


def after(value: int, steps: int) -> int:
    """What the kernel above makes of a value."""
    for _ in range(steps):
        value = (value * 1664525 + 1013904223) % MODULUS
    return value


def cupy_of(life: Life) -> tuple[Any, Any]:
    """cupy and the kernel."""
    needs_gpu(life)
    cupy = need("cupy")
    return cupy, cupy.RawKernel(CUPY_KERNEL, "next")


@program()
def cupy_streams(life: Life) -> None:
    cupy, kernel = cupy_of(life)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    values = [cupy.arange(k, COUNT + k, dtype=cupy.uint32) for k in range(4)]
    factors = cupy.random.RandomState(1).rand(256, 256)
    golden = factors @ factors
    expected = list(range(4))
    cupy.cuda.Device().synchronize()
    for _ in life.loop(lambda: digest_of(cupy.asnumpy(value).tobytes() for value in values)):
        for stream, value in zip(streams, values, strict=True):
            with stream:
                for _ in range(5):
                    kernel((COUNT // 256,), (256,), (value, cupy.int32(COUNT)))
        for stream in streams:
            stream.synchronize()
        expected = [after(value, 5) for value in expected]
        life.check([int(value[0]) for value in values] == expected, "the values are not what the CPU gets")
        life.check(bool((factors @ factors == golden).all()), "the product is not what it was at first")


@program(graphs=True)
def cupy_graph(life: Life) -> None:
    cupy, kernel = cupy_of(life)
    stream = cupy.cuda.Stream(non_blocking=True)
    values = cupy.arange(COUNT, dtype=cupy.uint32)
    expected = 0
    with stream:
        kernel((COUNT // 256,), (256,), (values, cupy.int32(COUNT)))
        expected = after(expected, 1)
        stream.synchronize()
        stream.begin_capture()
        for _ in range(10):
            kernel((COUNT // 256,), (256,), (values, cupy.int32(COUNT)))
        graph = stream.end_capture()
    for _ in life.loop(lambda: digest_of([cupy.asnumpy(values).tobytes()]), 200):
        for _ in range(3):
            graph.launch(stream)
        stream.synchronize()
        expected = after(expected, 30)
        life.check(int(values[0]) == expected, "the values are not what the CPU gets")


@program()
def triton_training(life: Life) -> None:
    """Weights are updated by a Triton kernel, activations are computed by another."""
    needs_gpu(life)
    torch = torch_of(life)
    need("triton")
    path = life.folder / "zoo_triton_kernels.py"
    path.write_text(TRITON_SOURCE)
    spec = importlib.util.spec_from_file_location("zoo_triton_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    kernels = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = kernels
    spec.loader.exec_module(kernels)
    data = batches(torch, life, 64, 256)
    weights = (batches(torch, life, 256, 256)[0] / 16).contiguous()
    source = data[0].contiguous()
    target = torch.empty_like(source)
    kernels.activate[kernels.blocks(source.numel())](source, target, source.numel(), BLOCK=1024)
    golden = target.clone()
    for number in life.loop(lambda: bits(torch, [weights]), 200):
        batch = data[number % len(data)]
        error = torch.tanh(batch @ weights) - batch
        gradient = (batch.T @ error / 64).contiguous()
        kernels.descend[kernels.blocks(weights.numel())](weights, gradient, 1e-3, weights.numel(), BLOCK=1024)
        kernels.activate[kernels.blocks(source.numel())](source, target, source.numel(), BLOCK=1024)
        same(torch, life, target, golden, "the activation")


@program()
def numba_kernels(life: Life) -> None:
    needs_gpu(life)
    numpy = need("numpy")
    if not hasattr(numpy, "row_stack"):
        numpy.row_stack = numpy.vstack  # numba asks numpy 2 for it
    cuda = need("numba.cuda")
    if not cuda.is_available():
        raise Skip("numba.cuda is not available")

    @cuda.jit  # type: ignore[untyped-decorator]  # numba has no types
    def advance(values: Any, steps: int) -> None:
        place = cuda.grid(1)
        if place < values.size:
            value = values[place]
            for _ in range(steps):
                value = (value * 1664525 + 1013904223) & 0xFFFFFFFF
            values[place] = value

    values = cuda.to_device(numpy.arange(COUNT, dtype=numpy.int64))
    try:
        advance[COUNT // 256, 256](values, 0)
    except Exception as exc:  # its own errors, and those of the toolkit that it finds
        raise Skip(f"numba.cuda makes no device code here: {exc}") from exc
    expected = 0
    for _ in life.loop(lambda: digest_of([values.copy_to_host().tobytes()])):
        for _ in range(5):
            advance[COUNT // 256, 256](values, 2)
        expected = after(expected, 10)
        life.check(int(values[:1].copy_to_host()[0]) == expected, "the values are not what the CPU gets")


@program(deterministic=False)
def onnxruntime_inference(life: Life) -> None:
    onnxruntime, onnx, numpy = need("onnxruntime"), need("onnx"), need("numpy")
    wanted = "CUDAExecutionProvider" if life.device == "cuda" else "CPUExecutionProvider"
    if wanted not in onnxruntime.get_available_providers():
        raise Skip(f"this onnxruntime has no {wanted}")
    helper = onnx.helper
    weights = numpy.random.default_rng(1).standard_normal((256, 256)).astype("float32") / 16
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Tanh", ["y"], ["z"])]
    one = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes, "zoo", [helper.make_tensor_value_info("x", one, [64, 256])],
        [helper.make_tensor_value_info("z", one, [64, 256])], [onnx.numpy_helper.from_array(weights, "w")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=[wanted])
    batch = numpy.random.default_rng(2).standard_normal((64, 256)).astype("float32")
    (golden,) = session.run(None, {"x": batch})
    for _ in life.loop(lambda: digest_of([golden.tobytes()]), 200):
        (found,) = session.run(None, {"x": batch})
        life.check(bool((found == golden).all()), "the result is not what it was at first")


@program(deterministic=False)
def tensorrt_inference(life: Life) -> None:
    needs_gpu(life)
    torch, tensorrt = torch_of(life), need("tensorrt")
    logger = tensorrt.Logger(tensorrt.Logger.ERROR)
    builder = tensorrt.Builder(logger)
    network = builder.create_network(0)
    source = network.add_input("x", tensorrt.float32, (64, 256))
    tanh = network.add_activation(source, tensorrt.ActivationType.TANH).get_output(0)
    tanh.name = "y"
    network.mark_output(tanh)
    plan = builder.build_serialized_network(network, builder.create_builder_config())
    context = tensorrt.Runtime(logger).deserialize_cuda_engine(plan).create_execution_context()
    batch = batches(torch, life, 64, 256)[0]
    found = torch.empty_like(batch)
    context.set_tensor_address("x", batch.data_ptr())
    context.set_tensor_address("y", found.data_ptr())
    stream = torch.cuda.Stream()
    golden = None
    for _ in life.loop(every=500):
        context.execute_async_v3(stream.cuda_stream)
        stream.synchronize()
        golden = found.clone() if golden is None else golden
        same(torch, life, found, golden, "the result")
