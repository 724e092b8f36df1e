/* A CUDA driver and a libc10_cuda with nothing but a graph under capture, made of named kernels on two streams.
 *
 * The names are those of the real libraries. A test adds nodes where real kernels would be launched.
 */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define NODES_MOST 300000u
#define STREAMS 2u

struct node {
    int type;
    const char *name;
    const struct node *before; /* on its stream */
};

struct stream {
    int64_t device;
    int64_t id;
};

struct kernel_params {
    const void *function;
    uint32_t grid[3];
    uint32_t block[3];
    uint32_t shared_bytes;
    void *arguments;
    void *extra;
    const void *kernel;
    void *context;
};

enum { ACTIVE = 1, INVALIDATED = 2 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
enum { QUERIES = 1, COUNTS = 2 };
static pthread_mutex_t held[] = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER}; /* while these are held up */
static int holding;
static uint64_t arrived;
static struct node nodes[NODES_MOST];
static size_t node_count;
static const struct node *last[STREAMS];
static uint64_t capture; /* id; 0: none */
static uint64_t captures;
static int invalid;
static uint64_t counts;
static uint64_t queries;
static uint32_t grid[3] = {1, 2, 3}, block[3] = {32, 64, 96};
static _Thread_local int64_t own_stream; /* 1 or 2; 0: one that does not capture */

/* ---- the test's side ---- */

void fake_capture_begin(void) {
    pthread_mutex_lock(&lock);
    node_count = 0;
    invalid = 0;
    memset(last, 0, sizeof last);
    own_stream = 1;
    capture = ++captures;
    pthread_mutex_unlock(&lock);
}

void fake_capture_end(void) {
    pthread_mutex_lock(&lock);
    capture = 0;
    pthread_mutex_unlock(&lock);
}

/* 0: no longer. */
void fake_hold(int which) {
    (void)(which != 0 ? pthread_mutex_lock(&held[which - 1]) : pthread_mutex_unlock(&held[holding - 1]));
    holding = which;
}
static void wait_while_held(int which) {
    __atomic_add_fetch(&arrived, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_lock(&held[which - 1]);
    pthread_mutex_unlock(&held[which - 1]);
}
uint64_t fake_arrived(void) { return __atomic_load_n(&arrived, __ATOMIC_SEQ_CST); }

void fake_invalidate(void) { invalid = 1; }
void fake_use_stream(int number) { own_stream = number; }
void fake_shape(uint32_t blocks, uint32_t threads) {
    grid[0] = blocks, grid[1] = grid[2] = 1;
    block[0] = threads, block[1] = block[2] = 1;
}

uint64_t fake_counts(void) { return counts; }
uint64_t fake_queries(void) { return queries; }

void fake_add_node(int type, const char *name) {
    pthread_mutex_lock(&lock);
    if (capture != 0) {
        const struct node **end = &last[own_stream - 1];
        nodes[node_count] = (struct node){type, name, *end};
        *end = &nodes[node_count++];
    }
    pthread_mutex_unlock(&lock);
}

/* ---- libc10_cuda ---- */

struct stream _ZN3c104cuda20getCurrentCUDAStreamEa(int8_t device) {
    return (struct stream){.device = device, .id = own_stream};
}

void *_ZNK3c104cuda10CUDAStream6streamEv(const struct stream *stream) { return (void *)(uintptr_t)stream->id; }

/* ---- libcuda ---- */

int cuStreamGetCaptureInfo_v2(void *stream, int *status, uint64_t *id, void **graph, const void ***dependencies,
                              size_t *count) {
    static _Thread_local const void *end;
    wait_while_held(QUERIES);
    pthread_mutex_lock(&lock);
    queries++;
    *status = capture == 0 ? 0 : invalid ? INVALIDATED : ACTIVE;
    *id = *status == ACTIVE ? capture : 0;
    *graph = *status == ACTIVE ? &node_count : NULL;
    if (dependencies != NULL) {
        end = last[(uintptr_t)stream - 1];
        *dependencies = &end;
        *count = end != NULL;
    }
    pthread_mutex_unlock(&lock);
    return 0;
}

int cuGraphGetNodes(void *graph, void **found, size_t *count) {
    (void)graph;
    wait_while_held(COUNTS);
    pthread_mutex_lock(&lock);
    counts++;
    for (size_t i = 0; found != NULL && i < *count && i < node_count; i++) {
        found[i] = &nodes[i];
    }
    *count = found != NULL && *count < node_count ? *count : node_count;
    pthread_mutex_unlock(&lock);
    return 0;
}

int cuGraphNodeGetDependencies(const struct node *node, const void **dependencies, size_t *count) {
    if (dependencies != NULL) {
        *dependencies = node->before;
    }
    *count = node->before != NULL;
    return 0;
}

int cuGraphNodeGetType(const struct node *node, int *type) {
    *type = node->type;
    return 0;
}

int cuGraphKernelNodeGetParams_v2(const struct node *node, struct kernel_params *params) {
    memset(params, 0, sizeof *params);
    params->function = node;
    memcpy(params->grid, grid, sizeof grid);
    memcpy(params->block, block, sizeof block);
    return 0;
}

int cuFuncGetName(const char **name, const struct node *function) {
    *name = function->name;
    return 0;
}
