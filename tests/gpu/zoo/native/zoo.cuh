// What life.py is to the programs in Python: the files `events` and `times` in a folder, and the file `end` in it.
// Every program works on arrays of unsigned numbers that go through x -> x * 1664525 + 1013904223, so that the CPU knows
// each result to the bit.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <time.h>
#include <unistd.h>
#include <vector>

#include <cuda_runtime.h>

#define CUDA(call)                                                                                                     \
    do {                                                                                                               \
        cudaError_t result_ = (call);                                                                                  \
        if (result_ != cudaSuccess) {                                                                                  \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(result_));                \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

static const int COUNT = 1 << 18, BLOCK = 256;
static const double MOST_S = 1800;  // nobody is left behind by a runner that was killed

__host__ __device__ inline uint32_t next_of(uint32_t value) { return value * 1664525u + 1013904223u; }

inline uint32_t after(uint32_t value, int steps) {
    for (int i = 0; i < steps; i++) {
        value = next_of(value);
    }
    return value;
}

__global__ void advance(uint32_t *values, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) {
        values[i] = next_of(values[i]);
    }
}

__global__ void number(uint32_t *values, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) {
        values[i] = i;
    }
}

class Life {
  public:
    explicit Life(const char *folder) : folder_(folder), stop_ns_(now() + (int64_t)(MOST_S * 1e9)) {}

    static int64_t now() {
        struct timespec at;
        clock_gettime(CLOCK_REALTIME, &at);
        return at.tv_sec * 1000000000LL + at.tv_nsec;
    }

    void event(const char *name, const std::string &rest) {
        FILE *file = fopen((folder_ + "/events").c_str(), "a");
        fprintf(file, "{\"event\": \"%s\", \"at_ns\": %lld, %s}\n", name, (long long)now(), rest.c_str());
        fclose(file);
    }

    void ready(int other = 0) {
        event("ready", "\"pids\": [" + std::to_string(getpid()) + (other ? ", " + std::to_string(other) : "") + "]");
    }

    // The end of an iteration; false: it was the last one.
    bool tick() {
        count++;
        const int64_t at = now();
        times_.push_back(at);
        if (at - flushed_ns_ > 200000000) {
            flush();
            flushed_ns_ = at;
        }
        return access((folder_ + "/end").c_str(), F_OK) != 0 && at < stop_ns_;
    }

    // Every so many iterations the digest of the state is written.
    bool due(int every) const { return count % every == 0; }

    void digest(const void *bytes, size_t size) {
        uint64_t hash = 14695981039346656037ULL;
        for (size_t i = 0; i < size; i++) {
            hash = (hash ^ ((const unsigned char *)bytes)[i]) * 1099511628211ULL;
        }
        char text[80];
        snprintf(text, sizeof text, "\"iteration\": %ld, \"value\": \"%016llx\"", count, (unsigned long long)hash);
        event("digest", text);
    }

    void digest_of_device(const uint32_t *device, int numbers) {
        std::vector<uint32_t> host(numbers);
        CUDA(cudaMemcpy(host.data(), device, numbers * sizeof(uint32_t), cudaMemcpyDeviceToHost));
        digest(host.data(), numbers * sizeof(uint32_t));
    }

    void check(bool right, const char *what) {
        if (!right) {
            event("wrong", "\"what\": \"" + std::string(what) + "\", \"iteration\": " + std::to_string(count));
            exit(3);
        }
    }

    [[noreturn]] void skip(const std::string &reason) {
        event("skip", "\"reason\": \"" + reason + "\"");
        exit(77);
    }

    int close() {
        flush();
        event("end", "\"iterations\": " + std::to_string(count));
        return 0;
    }

    void flush() {
        FILE *file = fopen((folder_ + "/times").c_str(), "ab");
        fwrite(times_.data(), sizeof(int64_t), times_.size(), file);
        fclose(file);
        times_.clear();
    }

    long count = 0;

  private:
    std::string folder_;
    int64_t stop_ns_, flushed_ns_ = 0;
    std::vector<int64_t> times_;
};

// An array on the device whose element i is i after no step.
inline uint32_t *numbers(int count = COUNT) {
    uint32_t *values;
    CUDA(cudaMalloc(&values, count * sizeof(uint32_t)));
    number<<<(count + BLOCK - 1) / BLOCK, BLOCK>>>(values, count);
    CUDA(cudaDeviceSynchronize());
    return values;
}

// Element 5 of an array on the device.
inline uint32_t sample(const uint32_t *values) {
    uint32_t found = 0;
    CUDA(cudaMemcpy(&found, values + 5, sizeof found, cudaMemcpyDeviceToHost));
    return found;
}

inline void advance_on(cudaStream_t stream, uint32_t *values, int times, int count = COUNT) {
    for (int i = 0; i < times; i++) {
        advance<<<count / BLOCK, BLOCK, 0, stream>>>(values, count);
    }
}
