/* The controls of the fake ROCm: what a test programs, and how the fake HIP and the fake rocprofiler-sdk meet.
 *
 * See fake_rocprofiler.c and fake_hip.c.
 */
#ifndef FAKE_ROCM_H
#define FAKE_ROCM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include "rocprofiler_abi.h"

/* ---- of the fake rocprofiler-sdk ---- */

/* Programmable, also for a whole process by KINETO_FAKE_ROCPROFILER=key=value,key=value: version (10302), hang_ms (the
 * device stands still for so long when a context with dispatches starts, as 1.3.2 does), extra_dispatch_bytes,
 * shifted_kinds (kinds are numbered as in 0.6), deaf_again (no callbacks of calls after a second start), busy_flushes,
 * start_delay_ms, flush_delay_ms, old_register (no replay). -1 for an unknown key. */
int fake_rocprofiler_set(const char *key, long value);
uint64_t fake_rocprofiler_emitted(int kind); /* records put into buffers since the library was loaded */
uint64_t fake_rocprofiler_misused(void);     /* what breaks the real one: finalising, starting contexts in a child, … */
uint64_t fake_rocprofiler_lost(void);        /* records that found no room: policy DISCARD, after its first flush */
int fake_rocprofiler_active(void);           /* contexts that are started */
int fake_rocprofiler_clients(void);
uint64_t fake_rocprofiler_blocked_ns(void); /* how long producers waited for room, in all */

/* ---- of the fake HIP ---- */

struct fake_entry { /* what happened, in the log of truth; CLOCK_BOOTTIME ns */
    uint32_t what;  /* FAKE_… */
    uint32_t thread;
    uint64_t stream; /* hipStream_t */
    uint64_t call_start, call_end, start, end, bytes;
    struct dim3 grid, block; /* grid in work-items */
    char name[64];           /* of a kernel as compiled, or of a call */
};
enum { FAKE_KERNEL = 1, FAKE_COPY = 2, FAKE_ALLOCATION = 3, FAKE_FREE = 4, FAKE_CALL = 5 };

typedef int hip_error;
typedef void *hip_stream;
typedef void *hip_function;
typedef void *hip_module;

hip_error hipInit(unsigned flags);
hip_error hipStreamCreate(hip_stream *stream);
hip_error hipLaunchKernel(const void *function, struct dim3 grid, struct dim3 block, void **arguments, size_t shared,
                          hip_stream stream);
hip_error hipModuleLoadData(hip_module *module, const void *image); /* image: NUL-separated names, ended by "" */
hip_error hipModuleGetFunction(hip_function *function, hip_module module, const char *name);
hip_error hipModuleUnload(hip_module module);
hip_error hipModuleLaunchKernel(hip_function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                                hip_stream stream, void **arguments, void **extra);
hip_error hipMemcpyAsync(void *to, const void *from, size_t bytes, int kind, hip_stream stream);
hip_error hipMalloc(void **memory, size_t bytes);
hip_error hipFree(void *memory);
hip_error hipStreamSynchronize(hip_stream stream);
hip_error hipDeviceSynchronize(void);
hip_error hipGetDevice(int *device);
hip_error hipGraphLaunch(void *graph, hip_stream stream); /* of three kernels: those of the first host function */
const char *hipKernelNameRef(hip_function function);
const char *hipKernelNameRefByPtr(const void *function, hip_stream stream);
hip_error __hipPushCallConfiguration(struct dim3 grid, struct dim3 block, size_t shared, hip_stream stream);
const void *fake_hip_register(const char *name); /* as __hipRegisterFunction: the host function's address */
void fake_hip_durations(uint64_t kernel_ns, uint64_t copy_ns);
int fake_hip_log(const char *path, uint64_t entries); /* from now on everything is logged there; 0 or an errno */
uint64_t fake_hip_logged(void);

/* ---- between the two, where the real ones have dispatch tables ---- */

enum { TABLE_HIP_RUNTIME = 1, TABLE_HIP_COMPILER = 2, TABLE_HSA = 3 };

struct fake_call { /* of one API function, on the thread that makes it */
    int table;
    int32_t operation;
    const void *arguments;
    size_t argument_bytes;
    uint64_t contexts; /* the rest is the SDK's */
    uint64_t internal, ancestor;
    uint64_t user[32];
    uint64_t start;
};

struct fake_work { /* on the device */
    uint64_t call; /* internal correlation id of the call around it; 0: none is traced */
    uint64_t kernel_object, stream, queue, start, end, bytes;
    struct dim3 grid, block; /* grid in work-items */
    int copy;                /* 0: a kernel; else the operation of MEMORY_COPY */
};

struct fake_hooks {
    void (*enter)(struct fake_call *call);
    void (*leave)(struct fake_call *call);
    bool (*enqueued)(const struct fake_work *work, void (*over)(void *), void *argument); /* false: nobody records */
    void (*loaded)(const char *const *names, const uint64_t *objects, size_t count);
    void (*allocated)(int operation, uint64_t address, uint64_t bytes, uint64_t start, uint64_t end);
};

/* Of the SDK, called by "librocprofiler-register" (in the fake HIP) when the runtime registers, and at each replay. */
int rocprofiler_set_api_table(const char *name, uint64_t version, uint64_t instance, void **tables, uint64_t count);
/* Of librocprofiler-register, called by the SDK for a replay. */
int rocprofiler_register_invoke_all_registrations(void);

static inline uint64_t fake_boottime_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_BOOTTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

#endif
