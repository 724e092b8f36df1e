// What else happens in a process with CUDA: contexts, resets, forks, other processes, a full memory, its end: process MODE FOLDER.
#include <csignal>
#include <sys/wait.h>

#include <cuda.h>

#include "zoo.cuh"

#define DRIVER(call)                                                                                                   \
    do {                                                                                                               \
        CUresult result_ = (call);                                                                                     \
        if (result_ != CUDA_SUCCESS) {                                                                                 \
            fprintf(stderr, "%s:%d: %s: %d\n", __FILE__, __LINE__, #call, (int)result_);                               \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

static void step(Life &life, uint32_t *values, uint32_t &expected, int steps) {
    expected = after(expected, steps);
    life.check(sample(values) == expected, "a number is not what the CPU gets");
    if (life.due(200)) {
        life.digest_of_device(values, COUNT);
    }
}

// The device is reset in mid-life, every 300 iterations.
static int reset(Life &life) {
    uint32_t *values = numbers(), expected = 5;
    life.ready();
    do {
        if (life.count % 300 == 299) {
            std::vector<uint32_t> saved(COUNT);
            CUDA(cudaMemcpy(saved.data(), values, COUNT * sizeof(uint32_t), cudaMemcpyDeviceToHost));
            CUDA(cudaDeviceReset());
            CUDA(cudaMalloc(&values, COUNT * sizeof(uint32_t)));
            CUDA(cudaMemcpy(values, saved.data(), COUNT * sizeof(uint32_t), cudaMemcpyHostToDevice));
        }
        advance_on(0, values, 10);
        step(life, values, expected, 10);
    } while (life.tick());
    return life.close();
}

// Contexts of the driver API come and go beside the primary one.
static int contexts(Life &life) {
    uint32_t *values = numbers(), expected = 5;
    CUdevice device;
    CUcontext primary;
    DRIVER(cuDeviceGet(&device, 0));
    DRIVER(cuCtxGetCurrent(&primary));
    life.ready();
    do {
        if (life.count % 50 == 0) {
            CUcontext other;
#if CUDA_VERSION >= 13000
            DRIVER(cuCtxCreate(&other, nullptr, 0, device));
#else
            DRIVER(cuCtxCreate(&other, 0, device));
#endif
            uint32_t *inside = numbers();
            advance_on(0, inside, 7);
            life.check(sample(inside) == after(5, 7), "a number of another context is not what the CPU gets");
            CUDA(cudaFree(inside));
            DRIVER(cuCtxDestroy(other));
            DRIVER(cuCtxSetCurrent(primary));
        }
        advance_on(0, values, 10);
        step(life, values, expected, 10);
    } while (life.tick());
    return life.close();
}

// Children without exec, that compute on the CPU.
static int forks(Life &life) {
    uint32_t *values = numbers(), expected = 5;
    life.ready();
    do {
        if (life.count % 50 == 0) {
            const pid_t child = fork();
            if (child == 0) {
                _exit(after(1, 1000000) == after(after(1, 500000), 500000) ? 0 : 1);
            }
            int status = 1;
            waitpid(child, &status, 0);
            life.check(status == 0, "a forked child did not end well");
        }
        advance_on(0, values, 10);
        step(life, values, expected, 10);
    } while (life.tick());
    return life.close();
}

// The other process of `ipc`: works on the parent's memory whenever it is told.
static int ipc_other(const char *pipes) {
    int in, out;
    sscanf(pipes, "%d,%d", &in, &out);
    cudaIpcMemHandle_t handle;
    if (read(in, &handle, sizeof handle) != sizeof handle) {
        return 1;
    }
    uint32_t *values;
    CUDA(cudaIpcOpenMemHandle((void **)&values, handle, cudaIpcMemLazyEnablePeerAccess));
    char word;
    do {
        advance_on(0, values, 10);
        CUDA(cudaDeviceSynchronize());
    } while (write(out, "d", 1) == 1 && read(in, &word, 1) == 1);
    CUDA(cudaIpcCloseMemHandle(values));
    return 0;
}

// Two processes work on the same memory in turn.
static int ipc(Life &life, const char *self) {
    int down[2], up[2];
    if (pipe(down) != 0 || pipe(up) != 0) {
        return 1;
    }
    const pid_t other = fork();
    if (other == 0) {
        ::close(down[1]);
        ::close(up[0]);
        const std::string pipes = std::to_string(down[0]) + "," + std::to_string(up[1]);
        execl(self, self, "ipc-other", pipes.c_str(), (char *)nullptr);
        _exit(127);
    }
    ::close(down[0]);
    ::close(up[1]);
    uint32_t *values = numbers(), expected = 5;
    cudaIpcMemHandle_t handle;
    CUDA(cudaIpcGetMemHandle(&handle, values));
    char word;
    bool going = write(down[1], &handle, sizeof handle) == sizeof handle;
    life.check(going && read(up[0], &word, 1) == 1, "the other process did not come up");
    expected = after(expected, 10);
    life.ready(other);
    while (going) {
        advance_on(0, values, 10);
        CUDA(cudaDeviceSynchronize());
        life.check(write(down[1], "g", 1) == 1 && read(up[0], &word, 1) == 1, "the other process is gone");
        step(life, values, expected, 20);
        going = life.tick();
    }
    ::close(down[1]);
    int status = 1;
    waitpid(other, &status, 0);
    life.check(status == 0, "the other process did not end well");
    return life.close();
}

// All but a hundredth of the GPU's memory is in use.
static int full(Life &life) {
    const size_t size = 64u << 20;
    size_t left = 0, total = 0;
    std::vector<uint32_t *> parts;
    uint32_t *part;
    CUDA(cudaMemGetInfo(&left, &total));
    while (left > total / 100 + size && cudaMalloc(&part, size) == cudaSuccess) {
        number<<<(int)(size / sizeof(uint32_t) / BLOCK), BLOCK>>>(part, (int)(size / sizeof(uint32_t)));
        parts.push_back(part);
        CUDA(cudaMemGetInfo(&left, &total));
    }
    CUDA(cudaDeviceSynchronize());
    if (parts.empty()) {
        life.skip("no GPU memory is left");
    }
    life.event("memory", "\"left\": " + std::to_string(left) + ", \"total\": " + std::to_string(total));
    std::vector<uint32_t> expected(parts.size(), 5);
    life.ready();
    do {
        const size_t k = life.count % parts.size();
        advance_on(0, parts[k], 10, 1 << 22);
        expected[k] = after(expected[k], 10);
        life.check(sample(parts[k]) == expected[k], "a number is not what the CPU gets");
        if (life.due(500)) {
            life.digest_of_device(parts[0], COUNT);
        }
    } while (life.tick());
    return life.close();
}

// Ends by exit() after four seconds, with kernels under way.
static int ends(Life &life) {
    uint32_t *values = numbers(), expected = 5;
    const int64_t begin = Life::now();
    life.ready();
    do {
        advance_on(0, values, 10);
        step(life, values, expected, 10);
    } while (life.tick() && Life::now() - begin < 4000000000LL);
    life.close();
    advance_on(0, values, 200);
    exit(0);
}

static Life *ended_life;
static uint32_t *ended_values, ended_expected;
static volatile sig_atomic_t told = 0;

static void ended_by_signal() {
    advance_on(0, ended_values, 10);
    ended_life->check(sample(ended_values) == after(ended_expected, 10), "a number of the last work is not what the CPU gets");
    ended_life->event("handler", "\"value\": \"right\"");
}

// SIGTERM is followed by work on the GPU in a function of atexit().
static int term(Life &life) {
    uint32_t *values = numbers(), expected = 5;
    ended_life = &life;
    ended_values = values;
    signal(SIGTERM, [](int) { told = 1; });
    atexit(ended_by_signal);
    life.ready();
    do {
        advance_on(0, values, 10);
        step(life, values, expected, 10);
        ended_expected = expected;
    } while (life.tick() && !told);
    return life.close();
}

int main(int argc, char **argv) {
    const std::string mode = argc == 3 ? argv[1] : "";
    if (mode == "ipc-other") {
        return ipc_other(argv[2]);
    }
    static Life life(argc == 3 ? argv[2] : "."); // functions of atexit() use it
    if (mode == "ipc") {
        return ipc(life, argv[0]);
    }
    struct {
        const char *name;
        int (*run)(Life &);
    } const modes[] = {{"reset", reset}, {"contexts", contexts}, {"forks", forks},
                       {"full", full},   {"ends", ends},         {"term", term}};
    for (const auto &one : modes) {
        if (mode == one.name) {
            return one.run(life);
        }
    }
    fprintf(stderr, "usage: process reset|contexts|forks|ipc|full|ends|term FOLDER\n");
    return 2;
}
