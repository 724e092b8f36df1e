// A loop of short kernels beside one that spins while the file `hold` is there: hold MODE FOLDER.
// MODE: spin, or own: all of it in a context of cuCtxCreate, and no primary one.
#include "zoo.cuh"

#include <dlfcn.h>

#include <atomic>
#include <thread>

__global__ void spin(const volatile uint32_t *flag) {
    while (*flag == 0) {
    }
}

static bool make_context() {
    void *context, *cuda = dlopen("libcuda.so.1", RTLD_NOW);
    auto init = reinterpret_cast<int (*)(unsigned)>(dlsym(cuda, "cuInit"));
    auto create = reinterpret_cast<int (*)(void **, unsigned, int)>(dlsym(cuda, "cuCtxCreate_v2"));
    return init(0) == 0 && create(&context, 0, 0) == 0;
}

int main(int argc, char **argv) {
    const std::string mode = argc == 3 ? argv[1] : "";
    if (mode != "spin" && mode != "own") {
        fprintf(stderr, "usage: hold spin|own FOLDER\n");
        return 2;
    }
    Life life(argv[2]);
    if (mode == "own" && !make_context()) {
        fprintf(stderr, "cuCtxCreate failed\n");
        return 1;
    }
    const std::string hold = std::string(argv[2]) + "/hold";
    uint32_t *values = numbers(), expected = 5, *found, *flag;
    cudaStream_t loop, aside;
    CUDA(cudaHostAlloc(&found, 4096, cudaHostAllocMapped));
    flag = found + 512;
    CUDA(cudaStreamCreateWithFlags(&loop, cudaStreamNonBlocking));
    CUDA(cudaStreamCreateWithFlags(&aside, cudaStreamNonBlocking));
    *flag = 1;
    spin<<<1, 1, 0, aside>>>(flag); // loads the kernel
    advance_on(loop, values, 1);
    expected = after(expected, 1);
    CUDA(cudaDeviceSynchronize());
    std::atomic<bool> begun(false), ended(false);
    std::thread let_go([&] { // the loop may stand still
        while (!ended) {
            if (begun && access(hold.c_str(), F_OK) != 0) {
                begun = false;
                *(volatile uint32_t *)flag = 1;
                life.event("released", "\"by\": \"spin\"");
            }
            usleep(20000);
        }
    });
    life.ready();
    do {
        if (!begun && access(hold.c_str(), F_OK) == 0) {
            *(volatile uint32_t *)flag = 0;
            spin<<<1, 1, 0, aside>>>(flag);
            life.event("held", "\"by\": \"spin\"");
            begun = true;
        }
        advance_on(loop, values, 10);
        CUDA(cudaMemcpyAsync(found, values + 5, sizeof *found, cudaMemcpyDeviceToHost, loop));
        CUDA(cudaStreamSynchronize(loop));
        expected = after(expected, 10);
        life.check(*found == expected, "a number is not what the CPU gets");
        usleep(500);
    } while (life.tick());
    ended = true;
    let_go.join();
    *(volatile uint32_t *)flag = 1;
    return life.close();
}
