/* The client of rocprofiler-sdk that torch for ROCm is: a library that exports rocprofiler_configure, as libtorch_cpu.so
 * does. It is configured when HIP registers, dormant until the program's own profiler begins.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>

#include "fake_rocm.h"

#define EXPORT __attribute__((visibility("default")))
#define BUFFER_BYTES (256u << 10)

static struct {
    uint64_t context, buffer, kernels;
    int (*start)(uint64_t);
    int (*stop)(uint64_t);
    int (*flush)(uint64_t);
} kineto;

static void *function(const char *name) {
    void *library = dlopen("librocprofiler-sdk.so.1", RTLD_LAZY | RTLD_NOLOAD);
    library = library != NULL ? library : dlopen("librocprofiler-sdk.so", RTLD_LAZY | RTLD_NOLOAD);
    void *found = library == NULL ? NULL : dlsym(library, name);
    if (found == NULL) {
        abort();
    }
    return found;
}

static void count(uint64_t context, uint64_t buffer, struct record_header **headers, size_t records, void *data,
                  uint64_t dropped) {
    (void)context, (void)buffer, (void)data, (void)dropped;
    for (size_t i = 0; i < records; i++) {
        kineto.kernels += headers[i]->kind == BUF_KERNEL_DISPATCH;
    }
}

static int initialize(finalize_fn finalize, void *data) {
    int (*create_context)(uint64_t *);
    int (*create_buffer)(uint64_t, size_t, size_t, int, buffer_fn, void *, uint64_t *);
    int (*trace)(uint64_t, int, const int32_t *, size_t, uint64_t);
    (void)finalize, (void)data;
    *(void **)&create_context = function("rocprofiler_create_context");
    *(void **)&create_buffer = function("rocprofiler_create_buffer");
    *(void **)&trace = function("rocprofiler_configure_buffer_tracing_service");
    *(void **)&kineto.start = function("rocprofiler_start_context");
    *(void **)&kineto.stop = function("rocprofiler_stop_context");
    *(void **)&kineto.flush = function("rocprofiler_flush_buffer");
    return create_context(&kineto.context) != OK ||
           create_buffer(kineto.context, BUFFER_BYTES, BUFFER_BYTES / 2, POLICY_LOSSLESS, count, NULL,
                         &kineto.buffer) != OK ||
           trace(kineto.context, BUF_KERNEL_DISPATCH, NULL, 0, kineto.buffer) != OK;
}

EXPORT struct tool *rocprofiler_configure(uint32_t version, const char *text, uint32_t priority,
                                          struct client_id *client) {
    static struct tool tool = {sizeof tool, initialize, NULL, NULL};
    (void)version, (void)text, (void)priority;
    client->name = "kineto of torch";
    return &tool;
}

EXPORT int fake_kineto_begin(void) { return kineto.start == NULL ? -1 : kineto.start(kineto.context); }

/* The number of kernels that it has seen. */
EXPORT uint64_t fake_kineto_end(void) {
    (void)kineto.stop(kineto.context);
    (void)kineto.flush(kineto.buffer);
    return kineto.kernels;
}
