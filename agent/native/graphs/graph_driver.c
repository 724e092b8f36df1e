/* See graph_driver.h.
 *
 * CUDA permits every operation on a graph under capture except destroying it and removing nodes; these only read. None
 * of them is among the calls that a capture in the mode "global" or "thread_local" forbids, none adds a node, none
 * waits for the GPU. torch is queried for a thread's stream by device number, so that it makes no CUDA call.
 *
 * Threads: those of the program that capture.
 * Blocks: in the driver, which has locks of its own; in the loader when the functions are looked for.
 */
#define _GNU_SOURCE
#include "graphs/graph_driver.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "common/export.h"

enum { CAPTURE_ACTIVE = 1, NODE_KERNEL = 0 };

struct wanted {
    void *place;
    const char *name;
    const char *other; /* used if the first one is missing; NULL: it is required, "": it is optional */
};

static int find(const char *path, const struct wanted *wanted, size_t count, char *error, size_t error_bytes) {
    void *library = dlopen(path, RTLD_NOLOAD | RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        snprintf(error, error_bytes, "%s is not loaded", path);
        return KC_LIBRARY;
    }
    for (size_t i = 0; i < count; i++) {
        void *found = dlsym(library, wanted[i].name);
        if (found == NULL && wanted[i].other != NULL && wanted[i].other[0] != '\0') {
            found = dlsym(library, wanted[i].other);
        }
        if (found == NULL && (wanted[i].other == NULL || wanted[i].other[0] != '\0')) {
            snprintf(error, error_bytes, "%s has no function %s", path, wanted[i].name);
            dlclose(library);
            return KC_LIBRARY;
        }
        memcpy(wanted[i].place, &found, sizeof found);
    }
    return 0; /* the library stays loaded */
}

int graph_driver_open(struct graph_driver *driver, const char *cuda, const char *c10_cuda, char *error,
                      size_t error_bytes) {
    const struct wanted of_cuda[] = {
        {&driver->capture_info, "cuStreamGetCaptureInfo_v2", NULL},
        {&driver->graph_nodes, "cuGraphGetNodes", NULL},
        {&driver->dependencies, "cuGraphNodeGetDependencies", ""},
        {&driver->node_type, "cuGraphNodeGetType", NULL},
        {&driver->kernel_params, "cuGraphKernelNodeGetParams_v2", "cuGraphKernelNodeGetParams"},
        {&driver->function_name, "cuFuncGetName", NULL}, /* CUDA 12.3 */
        {&driver->kernel_name, "cuKernelGetName", ""},
    };
    const struct wanted of_torch[] = {
        {&driver->current_stream, "_ZN3c104cuda20getCurrentCUDAStreamEa", NULL},
        {&driver->raw_stream, "_ZNK3c104cuda10CUDAStream6streamEv", NULL},
    };
    const int code = find(cuda, of_cuda, sizeof of_cuda / sizeof of_cuda[0], error, error_bytes);
    return code != 0 ? code : find(c10_cuda, of_torch, sizeof of_torch / sizeof of_torch[0], error, error_bytes);
}

bool graph_driver_captures(const struct graph_driver *driver, void *stream, struct graph_under_capture *found) {
    int status = 0;
    const void **last = NULL;
    size_t count = 0;
    if (stream == NULL) {
        return false;
    }
    int code = driver->capture_info(stream, &status, &found->id, &found->graph, &last, &count);
    if (code != 0) { /* this function cannot return dependencies with more data */
        count = 0;
        code = driver->capture_info(stream, &status, &found->id, &found->graph, NULL, NULL);
    }
    found->last = code == 0 && status == CAPTURE_ACTIVE && count == 1 ? last[0] : NULL;
    return code == 0 && status == CAPTURE_ACTIVE && found->graph != NULL;
}

size_t graph_driver_chain(const struct graph_driver *driver, const void *last, const void *before, const void **nodes,
                          size_t most) {
    if (driver->dependencies == NULL) {
        return 0;
    }
    void *node = (void *)(uintptr_t)last; // NOLINT: the driver takes its handle as it gave it
    for (size_t i = 0; i < most; i++) {
        size_t number = 0;
        nodes[i] = node;
        if (driver->dependencies(node, NULL, &number) != 0 || number != 1 ||
            driver->dependencies(node, &node, &number) != 0) {
            return 0;
        }
        if (node == before) {
            return i + 1;
        }
    }
    return 0;
}

void *graph_driver_current(const struct graph_driver *driver, int8_t device) {
    const struct graph_stream stream = driver->current_stream(device);
    return driver->raw_stream(&stream);
}

bool graph_driver_count(const struct graph_driver *driver, void *graph, size_t *count) {
    *count = 0;
    return driver->graph_nodes(graph, NULL, count) == 0;
}

bool graph_driver_nodes(const struct graph_driver *driver, void *graph, void **nodes, size_t count) {
    size_t got = count;
    return driver->graph_nodes(graph, nodes, &got) == 0 && got == count;
}

int graph_driver_describe(const struct graph_driver *driver, void *node, struct graph_kernel *kernel) {
    int type = -1;
    struct graph_kernel_params params;
    memset(kernel, 0, sizeof *kernel);
    memset(&params, 0, sizeof params);
    if (driver->node_type(node, &type) != 0) {
        return -1;
    }
    if (type != NODE_KERNEL || driver->kernel_params(node, &params) != 0) {
        return type;
    }
    memcpy(kernel->grid, params.grid, sizeof kernel->grid);
    memcpy(kernel->block, params.block, sizeof kernel->block);
    const int code = params.function != NULL ? driver->function_name(&kernel->name, params.function)
                     : params.kernel != NULL && driver->kernel_name != NULL
                         ? driver->kernel_name(&kernel->name, params.kernel)
                         : -1;
    if (code != 0) {
        kernel->name = NULL;
    }
    return type;
}
