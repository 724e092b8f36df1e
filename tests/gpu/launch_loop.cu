// A CUDA program without Python: launches kernels and copies until its standard input closes.
#include <cstdio>
#include <poll.h>
#include <unistd.h>

__global__ void scale(float *values, int count, float factor) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) {
        values[i] *= factor;
    }
}

int main() {
    const int count = 1 << 20;
    float *device = nullptr, sum = 0, *host = nullptr;
    if (cudaMalloc(&device, count * sizeof(float)) != cudaSuccess || cudaMallocHost(&host, count * sizeof(float)) != cudaSuccess) {
        fprintf(stderr, "no CUDA device\n");
        return 1;
    }
    for (int i = 0; i < count; i++) {
        host[i] = 1;
    }
    printf("ready\n");
    fflush(stdout);
    long steps = 0;
    struct pollfd input = {STDIN_FILENO, POLLIN, 0};
    for (; poll(&input, 1, 0) == 0; steps++) {
        cudaMemcpy(device, host, count * sizeof(float), cudaMemcpyHostToDevice);
        for (int i = 0; i < 20; i++) {
            scale<<<count / 256, 256>>>(device, count, 1.5f);
        }
        for (int i = 0; i < 20; i++) {
            scale<<<count / 256, 256>>>(device, count, 1 / 1.5f);
        }
        cudaMemcpy(&sum, device, sizeof sum, cudaMemcpyDeviceToHost);
    }
    const bool right = cudaDeviceSynchronize() == cudaSuccess && sum > 0.99f && sum < 1.01f;
    printf("%ld steps, %s\n", steps, right ? "right" : "wrong");
    return right ? 0 : 1;
}
