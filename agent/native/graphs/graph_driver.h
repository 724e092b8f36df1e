/* Driver queries for the contents of a CUDA graph under capture, and for the stream that a torch thread uses. */
#ifndef KINETO_GRAPH_DRIVER_H
#define KINETO_GRAPH_DRIVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* c10::cuda::CUDAStream: device type and index, id. Passed in two registers. */
struct graph_stream {
    int64_t device;
    int64_t id;
};

/* CUDA_KERNEL_NODE_PARAMS_v2 */
struct graph_kernel_params {
    void *function;
    uint32_t grid[3];
    uint32_t block[3];
    uint32_t shared_bytes;
    void **arguments;
    void **extra;
    void *kernel; /* only if `function` is NULL */
    void *context;
};

struct graph_driver {
    struct graph_stream (*current_stream)(int8_t device);
    void *(*raw_stream)(const struct graph_stream *stream);
    int (*capture_info)(void *stream, int *status, uint64_t *id, void **graph, const void ***dependencies,
                        size_t *dependency_count);
    int (*dependencies)(void *node, void **dependencies, size_t *count); /* NULL: the driver lacks it */
    int (*graph_nodes)(void *graph, void **nodes, size_t *count);
    int (*node_type)(void *node, int *type);
    int (*kernel_params)(void *node, struct graph_kernel_params *params);
    int (*function_name)(const char **name, void *function);
    int (*kernel_name)(const char **name, void *kernel);
};

/* A graph under capture. id: of the capture, unique in the process. last: the only node on which the stream's next one
 * will depend; NULL: none or several, or unknown. */
struct graph_under_capture {
    uint64_t id;
    void *graph;
    const void *last;
};

struct graph_kernel {
    const char *name; /* the driver's; NULL: not a kernel, or unknown */
    uint32_t grid[3];
    uint32_t block[3];
};

/* Finds the functions in libraries that the process has loaded. Returns 0 or KC_LIBRARY. */
int graph_driver_open(struct graph_driver *driver, const char *cuda, const char *c10_cuda, char *error,
                      size_t error_bytes);
/* Whether the stream (NULL: none) is capturing into a graph, and which. */
bool graph_driver_captures(const struct graph_driver *driver, void *stream, struct graph_under_capture *found);
/* The stream that this thread of the program uses on the device; NULL: the default one, which cannot be captured. */
void *graph_driver_current(const struct graph_driver *driver, int8_t device);
/* The number of nodes of the graph so far; false: unknown. */
bool graph_driver_count(const struct graph_driver *driver, void *graph, size_t *count);
/* Walks from `last` back to `before` as long as each node depends on only one other. Stores the nodes on the way in
 * `nodes`, including `last` but not `before`, at most `most`. Returns how many; 0: `before` was not reached. */
size_t graph_driver_chain(const struct graph_driver *driver, const void *last, const void *before, const void **nodes,
                          size_t most);
/* Reads the first `count` nodes in the order of their creation; false: there are fewer, or it is unknown. */
bool graph_driver_nodes(const struct graph_driver *driver, void *graph, void **nodes, size_t count);
/* Returns the type of a node (CUgraphNodeType) and stores its kernel; -1: unknown. */
int graph_driver_describe(const struct graph_driver *driver, void *node, struct graph_kernel *kernel);

#endif
