// A CUDA graph launched by device code: device_graphs launch FOLDER. A program of its own, since CUPTI is left alone in
// whatever has such code in its file.
#include "graphs.cuh"

// A graph whose kernel launches another graph from the device.
__global__ void launch_from_device(cudaGraphExec_t other) { cudaGraphLaunch(other, cudaStreamGraphFireAndForget); }

static int device(Life &life, cudaStream_t stream) {
    uint32_t *values = numbers(), expected = 5;
    cudaGraphExec_t launched, launcher;
    instantiate(&launched, capture(stream, values, 6), cudaGraphInstantiateFlagDeviceLaunch);
    CUDA(cudaGraphUpload(launched, stream));
    CUDA(cudaStreamSynchronize(stream));
    cudaGraph_t graph;
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    launch_from_device<<<1, 1, 0, stream>>>(launched);
    CUDA(cudaStreamEndCapture(stream, &graph));
    instantiate(&launcher, graph);
    life.ready();
    do {
        for (int k = 0; k < 3; k++) {
            CUDA(cudaGraphLaunch(launcher, stream));
            CUDA(cudaStreamSynchronize(stream));
        }
        step(life, values, expected, 18);
    } while (life.tick());
    return life.close();
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: device_graphs launch FOLDER\n");
        return 2;
    }
    Life life(argv[2]);
    cudaStream_t stream;
    CUDA(cudaStreamCreate(&stream));
    return device(life, stream);
}
