// A graph is captured in every iteration, launched and destroyed; lost captures are counted: captures MODE FOLDER.
#include "zoo.cuh"

static const int KERNELS = 8;

// Captures and launches once. The name of the call that failed, or nullptr.
static const char *once(cudaStream_t stream, cudaStreamCaptureMode mode, uint32_t *values, cudaError_t &error) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t instance = nullptr;
    const char *failed = nullptr;
    if ((error = cudaStreamBeginCapture(stream, mode)) != cudaSuccess) {
        return "cudaStreamBeginCapture";
    }
    advance_on(stream, values, KERNELS);
    if ((error = cudaStreamEndCapture(stream, &graph)) != cudaSuccess) {
        failed = "cudaStreamEndCapture";
    } else if ((error = cudaGraphInstantiateWithFlags(&instance, graph, 0)) != cudaSuccess) {
        failed = "cudaGraphInstantiateWithFlags";
    } else if ((error = cudaGraphLaunch(instance, stream)) != cudaSuccess) {
        failed = "cudaGraphLaunch";
    } else if ((error = cudaStreamSynchronize(stream)) != cudaSuccess) {
        failed = "cudaStreamSynchronize";
    }
    if (instance) {
        cudaGraphExecDestroy(instance);
    }
    if (graph) {
        cudaGraphDestroy(graph);
    }
    return failed;
}

static int run(Life &life, cudaStreamCaptureMode mode) {
    uint32_t *values = numbers(), expected = 5;
    cudaStream_t stream;
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    advance_on(stream, values, KERNELS); // the kernel is loaded before the first capture
    CUDA(cudaStreamSynchronize(stream));
    expected = after(expected, KERNELS);
    life.ready();
    do {
        cudaError_t error = cudaSuccess;
        const char *failed = once(stream, mode, values, error);
        if (failed) {
            cudaGetLastError();
            life.event("lost", std::string("\"what\": \"") + failed + ": " + cudaGetErrorString(error) + "\"");
            expected = sample(values);
            continue;
        }
        expected = after(expected, KERNELS);
        life.check(sample(values) == expected, "a number is not what the CPU gets");
    } while (life.tick());
    return life.close();
}

int main(int argc, char **argv) {
    const std::string mode = argc == 3 ? argv[1] : "";
    Life life(argc == 3 ? argv[2] : ".");
    struct {
        const char *name;
        cudaStreamCaptureMode mode;
    } const modes[] = {{"global", cudaStreamCaptureModeGlobal},
                       {"thread_local", cudaStreamCaptureModeThreadLocal},
                       {"relaxed", cudaStreamCaptureModeRelaxed}};
    for (const auto &one : modes) {
        if (mode == one.name) {
            return run(life, one.mode);
        }
    }
    fprintf(stderr, "usage: captures global|thread_local|relaxed FOLDER\n");
    return 2;
}
