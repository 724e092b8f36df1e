// A program that uses CUPTI itself: cupti_user activity|subscriber FOLDER. libcupti is loaded as any library; the few
// declarations below are all that is needed, so that no header of CUPTI has to be there.
#include <atomic>
#include <dlfcn.h>
#include <glob.h>

#include "zoo.cuh"

typedef int (*RegisterCallbacks)(void (*)(uint8_t **, size_t *, size_t *), void (*)(void *, uint32_t, uint8_t *, size_t, size_t));
typedef int (*OfKind)(int);
typedef int (*NextRecord)(uint8_t *, size_t, void **);
typedef int (*FlushAll)(uint32_t);
typedef void (*Callback)(void *, int, uint32_t, const void *);
typedef int (*Subscribe)(void **, Callback, void *);

static const int CONCURRENT_KERNEL = 10, RUNTIME_DOMAIN = 2;
static const size_t BUFFER = 1 << 20;
static NextRecord next_record;
static std::atomic<long> kernels(0), calls(0);

static void *library(Life &life) {
    void *found = dlopen("libcupti.so.13", RTLD_NOW);
    const char *patterns[] = {"/usr/local/cuda/extras/CUPTI/lib64/libcupti.so*", "/usr/local/cuda/lib64/libcupti.so*",
                              "/usr/local/cuda/targets/*/lib/libcupti.so*",
                              "/opt/torch/.venv/lib/python3*/site-packages/nvidia/*/lib/libcupti.so*"};
    for (const char *pattern : patterns) {
        glob_t paths;
        if (!found && glob(pattern, 0, nullptr, &paths) == 0) {
            found = dlopen(paths.gl_pathv[0], RTLD_NOW);
            globfree(&paths);
        }
    }
    if (!found) {
        life.skip("no libcupti is found");
    }
    return found;
}

static void requested(uint8_t **buffer, size_t *size, size_t *most) {
    *buffer = (uint8_t *)aligned_alloc(8, BUFFER);
    *size = BUFFER;
    *most = 0;
}

static void completed(void *, uint32_t, uint8_t *buffer, size_t, size_t valid) {
    void *record = nullptr;
    while (valid && next_record(buffer, valid, &record) == 0) {
        kernels += *(const int *)record == CONCURRENT_KERNEL;
    }
    free(buffer);
}

static void called(void *, int, uint32_t, const void *) { calls++; }

// Records its own kernels in windows of a hundred iterations; each must hold as many as were launched.
static int activity(Life &life) {
    void *cupti = library(life);
    const auto enable = (OfKind)dlsym(cupti, "cuptiActivityEnable"), disable = (OfKind)dlsym(cupti, "cuptiActivityDisable");
    const auto flush = (FlushAll)dlsym(cupti, "cuptiActivityFlushAll");
    next_record = (NextRecord)dlsym(cupti, "cuptiActivityGetNextRecord");
    if (((RegisterCallbacks)dlsym(cupti, "cuptiActivityRegisterCallbacks"))(requested, completed) != 0) {
        life.skip("CUPTI takes no buffers");
    }
    uint32_t *values = numbers(), expected = 5;
    life.ready();
    bool going = true;
    while (going) {
        const int window = (int)(life.count % 300);
        if (window == 100) {
            kernels = 0;
            if (enable(CONCURRENT_KERNEL) != 0) {
                life.event("own", "\"count\": -1");
            }
        }
        advance_on(0, values, 10);
        CUDA(cudaDeviceSynchronize());
        if (window == 199) {
            flush(1);
            disable(CONCURRENT_KERNEL);
            life.event("own", "\"count\": " + std::to_string(kernels.load()));
        }
        expected = after(expected, 10);
        life.check(sample(values) == expected, "a number is not what the CPU gets");
        going = life.tick();
    }
    return life.close();
}

// Holds the one subscriber for all its life and counts the calls of the runtime API that it makes.
static int subscriber(Life &life) {
    void *cupti = library(life), *handle = nullptr;
    uint32_t *values = numbers(), expected = 5;
    if (((Subscribe)dlsym(cupti, "cuptiSubscribe"))(&handle, called, nullptr) != 0) {
        life.skip("CUPTI takes no subscriber");
    }
    ((int (*)(uint32_t, void *, int))dlsym(cupti, "cuptiEnableDomain"))(1, handle, RUNTIME_DOMAIN);
    life.ready();
    bool going = true;
    while (going) {
        const long before = calls;
        advance_on(0, values, 10);
        CUDA(cudaDeviceSynchronize());
        if (life.count % 300 == 0) {
            life.event("own", "\"count\": " + std::to_string(calls - before));
        }
        expected = after(expected, 10);
        life.check(sample(values) == expected, "a number is not what the CPU gets");
        going = life.tick();
    }
    return life.close();
}

int main(int argc, char **argv) {
    const std::string mode = argc == 3 ? argv[1] : "";
    Life life(argc == 3 ? argv[2] : ".");
    if (mode == "activity") {
        return activity(life);
    }
    if (mode == "subscriber") {
        return subscriber(life);
    }
    fprintf(stderr, "usage: cupti_user activity|subscriber FOLDER\n");
    return 2;
}
