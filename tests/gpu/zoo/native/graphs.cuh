// What programs with CUDA graphs share.
#pragma once
#include "zoo.cuh"

static void instantiate(cudaGraphExec_t *instance, cudaGraph_t graph, unsigned long long flags = 0) {
    CUDA(cudaGraphInstantiateWithFlags(instance, graph, flags));
}

// A graph of some kernels, captured from a stream.
static cudaGraph_t capture(cudaStream_t stream, uint32_t *values, int kernels) {
    cudaGraph_t graph;
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    advance_on(stream, values, kernels);
    CUDA(cudaStreamEndCapture(stream, &graph));
    return graph;
}

static void step(Life &life, uint32_t *values, uint32_t &expected, int steps) {
    expected = after(expected, steps);
    life.check(sample(values) == expected, "a number is not what the CPU gets");
    if (life.due(200)) {
        life.digest_of_device(values, COUNT);
    }
}
