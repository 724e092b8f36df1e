/* A libamdhip64 without a GPU: the calls that a test program makes, and a log of what truly happened.
 *
 * Theory of operation
 *   The functions are those of HIP by name and arguments. Device times follow each other on a stream; a program waits
 *   for them in hipStreamSynchronize, and while somebody records also for the recording, as with the real library, whose
 *   completion signals the profiler handles first. Each call and each piece of work is one entry of a file that is
 *   mapped (fake_hip_log), whoever records.
 *
 *   The runtime "initialises" at its first call: it opens KINETO_FAKE_KFD, if that is set, as the real one opens
 *   /dev/kfd, and registers with librocprofiler-register, which this library contains, too. That one knows of a
 *   profiler if librocprofiler-sdk is loaded, if a library exports rocprofiler_configure, or if the environment says so.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "fake_rocm.h"

#define EXPORT __attribute__((visibility("default")))
#define STREAMS 64u
#define HARDWARE_QUEUES 4u
#define KERNELS 4096u
#define GRAPH_KERNELS 3u
#define NS_PER_S 1000000000ull
#define HIP_ERROR 1

enum { /* numbers of 1.0.0 */
       DEVICE_SYNCHRONIZE = 66,
       FREE = 90,
       GET_DEVICE = 102,
       GRAPH_LAUNCH = 166,
       KERNEL_NAME_REF = 208,
       KERNEL_NAME_REF_BY_PTR = 209,
       LAUNCH_KERNEL = 214,
       MALLOC = 215,
       MEMCPY_ASYNC = 268,
       MODULE_LAUNCH_KERNEL = 308,
       MODULE_UNLOAD = 316,
       STREAM_SYNCHRONIZE = 346,
       PUSH_CALL_CONFIGURATION = 1,
};

struct kernel {
    char name[128];
    uint64_t object;
    bool loaded;
};

struct stream {
    uint64_t end;
    uint64_t outstanding; /* pieces of work whose records are not written yet */
};

static struct {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    pthread_once_t once;
    struct fake_hooks *hooks; /* the dispatch table */
    struct kernel kernels[KERNELS];
    uint32_t kernel_count;
    struct stream streams[STREAMS];
    uint32_t stream_count;
    uint64_t kernel_ns, copy_ns, objects;
    struct fake_entry *log;
    uint64_t log_size, log_used;
} hip = {.mutex = PTHREAD_MUTEX_INITIALIZER,
         .changed = PTHREAD_COND_INITIALIZER,
         .once = PTHREAD_ONCE_INIT,
         .stream_count = 1,
         .kernel_ns = 1000,
         .copy_ns = 2000};

/* A child may launch, too, while the device's thread notes in its parent that work is over. */
static void lock_hip(void) { pthread_mutex_lock(&hip.mutex); }
static void unlock_hip(void) { pthread_mutex_unlock(&hip.mutex); }
__attribute__((constructor)) static void prepare_lock(void) { pthread_atfork(lock_hip, unlock_hip, unlock_hip); }

/* ---- librocprofiler-register ---- */

static void *find_profiler(void) {
    static const char *const NAMES[] = {"librocprofiler-sdk.so.1", "librocprofiler-sdk.so"};
    Dl_info here;
    for (size_t i = 0; i < sizeof NAMES / sizeof *NAMES; i++) {
        void *library = dlopen(NAMES[i], RTLD_LAZY | RTLD_NOLOAD);
        if (library != NULL) {
            return library;
        }
    }
    const char *wanted = getenv("ROCP_TOOL_LIBRARIES");
    const bool asked = (wanted != NULL && *wanted != 0) || dlsym(RTLD_DEFAULT, "rocprofiler_configure") != NULL;
    if (!asked || dladdr(&hip, &here) == 0) {
        return NULL;
    }
    char path[4096] = "";
    strncat(path, here.dli_fname, sizeof path - 64);
    strcpy(strrchr(path, '/') + 1, NAMES[0]);
    void *library = dlopen(path, RTLD_LAZY | RTLD_GLOBAL);
    strcpy(strrchr(path, '/') + 1, NAMES[1]);
    return library != NULL ? library : dlopen(path, RTLD_LAZY | RTLD_GLOBAL);
}

static int offer_table(void *library) {
    int (*set_table)(const char *, uint64_t, uint64_t, void **, uint64_t);
    void *tables[] = {&hip.hooks};
    *(void **)&set_table = dlsym(library, "rocprofiler_set_api_table");
    return set_table == NULL ? -1 : set_table("hip", 70000, 0, tables, 1);
}

EXPORT int rocprofiler_register_invoke_all_registrations(void) {
    void *library = dlopen("librocprofiler-sdk.so.1", RTLD_LAZY | RTLD_NOLOAD);
    library = library != NULL ? library : dlopen("librocprofiler-sdk.so", RTLD_LAZY | RTLD_NOLOAD);
    return hip.objects == 0 ? 0 : library == NULL ? -1 : offer_table(library);
}

static void initialise(void) {
    const char *node = getenv("KINETO_FAKE_KFD");
    if (node != NULL) {
        (void)open(node, O_RDWR | O_CLOEXEC); /* stays open, as the real one does */
    }
    hip.objects = 0x7f0000000000;
    void *library = find_profiler();
    if (library != NULL) {
        (void)offer_table(library);
    }
}

EXPORT hip_error hipInit(unsigned flags) {
    (void)flags;
    (void)pthread_once(&hip.once, initialise);
    return 0;
}

static struct fake_hooks *hooks(void) {
    (void)hipInit(0);
    return __atomic_load_n(&hip.hooks, __ATOMIC_SEQ_CST);
}

/* ---- the log of truth ---- */

EXPORT int fake_hip_log(const char *path, uint64_t entries) {
    const int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, (off_t)(entries * sizeof(struct fake_entry))) != 0) {
        return errno;
    }
    void *log = mmap(NULL, entries * sizeof(struct fake_entry), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (log == MAP_FAILED) {
        return errno;
    }
    hip.log_size = entries;
    hip.log_used = 0;
    __atomic_store_n(&hip.log, log, __ATOMIC_SEQ_CST);
    return 0;
}

EXPORT uint64_t fake_hip_logged(void) { return __atomic_load_n(&hip.log_used, __ATOMIC_SEQ_CST); }

static void note(struct fake_entry entry, const char *name) {
    struct fake_entry *log = __atomic_load_n(&hip.log, __ATOMIC_SEQ_CST);
    if (log == NULL) {
        return;
    }
    const uint64_t place = __atomic_fetch_add(&hip.log_used, 1, __ATOMIC_SEQ_CST);
    if (place < hip.log_size) {
        entry.thread = (uint32_t)syscall(SYS_gettid);
        strncat(entry.name, name, sizeof entry.name - 1);
        log[place] = entry;
    }
}

/* ---- calls ---- */

struct made { /* one call that is being made */
    struct fake_hooks *hooks;
    struct fake_call call;
    uint64_t start;
};

static void enter(struct made *made, int table, int32_t operation, const void *arguments, size_t bytes) {
    made->hooks = hooks();
    made->start = fake_boottime_ns();
    made->call.internal = 0;
    if (made->hooks != NULL) {
        made->call.table = table;
        made->call.operation = operation;
        made->call.arguments = arguments;
        made->call.argument_bytes = bytes;
        made->call.ancestor = 0;
        made->hooks->enter(&made->call);
    }
}

static uint64_t leave(struct made *made) {
    if (made->hooks != NULL) {
        made->hooks->leave(&made->call);
    }
    return fake_boottime_ns();
}

static uint32_t index_of(hip_stream stream) { return (uint32_t)(uintptr_t)stream / 0x100 % STREAMS; }

static void over(void *argument) {
    struct stream *stream = argument;
    pthread_mutex_lock(&hip.mutex);
    stream->outstanding--;
    pthread_cond_broadcast(&hip.changed);
    pthread_mutex_unlock(&hip.mutex);
}

/* Puts work into a stream and tells when it runs. */
static void enqueue(struct made *made, struct fake_work *work, hip_stream handle, uint64_t duration) {
    struct stream *stream = &hip.streams[index_of(handle)];
    const uint64_t now = fake_boottime_ns();
    pthread_mutex_lock(&hip.mutex);
    work->start = now > stream->end ? now : stream->end;
    work->end = stream->end = work->start + duration;
    work->stream = (uint64_t)(uintptr_t)handle;
    work->queue = 0x9000 + index_of(handle) % HARDWARE_QUEUES;
    work->call = made->call.internal;
    stream->outstanding++;
    pthread_mutex_unlock(&hip.mutex);
    if (made->hooks == NULL || !made->hooks->enqueued(work, over, stream)) {
        over(stream);
    }
}

static void load(struct kernel *kernel) {
    struct fake_hooks *now = hooks();
    pthread_mutex_lock(&hip.mutex);
    const bool first = !kernel->loaded;
    kernel->loaded = true;
    if (first) {
        kernel->object = hip.objects += 0x40;
    }
    pthread_mutex_unlock(&hip.mutex);
    const char *name = kernel->name;
    if (first && now != NULL) {
        now->loaded(&name, &kernel->object, 1);
    }
}

static struct kernel *new_kernel(const char *name) {
    pthread_mutex_lock(&hip.mutex);
    struct kernel *kernel = &hip.kernels[hip.kernel_count++ % KERNELS];
    pthread_mutex_unlock(&hip.mutex);
    memset(kernel, 0, sizeof *kernel);
    strncat(kernel->name, name, sizeof kernel->name - 1);
    return kernel;
}

static void run_kernel(struct made *made, struct kernel *kernel, struct dim3 grid, struct dim3 block, hip_stream stream,
                       struct fake_entry *entry) {
    const uint64_t duration = __atomic_load_n(&hip.kernel_ns, __ATOMIC_RELAXED);
    load(kernel);
    struct fake_work work = {.kernel_object = kernel->object,
                             .grid = {grid.x * block.x, grid.y * block.y, grid.z * block.z},
                             .block = block};
    enqueue(made, &work, stream, duration);
    *entry = (struct fake_entry){.what = FAKE_KERNEL,
                                 .stream = work.stream,
                                 .call_start = made->start,
                                 .start = work.start,
                                 .end = work.end,
                                 .grid = work.grid,
                                 .block = block};
}

EXPORT const void *fake_hip_register(const char *name) { return new_kernel(name); }

EXPORT void fake_hip_durations(uint64_t kernel_ns, uint64_t copy_ns) {
    __atomic_store_n(&hip.kernel_ns, kernel_ns, __ATOMIC_RELAXED);
    __atomic_store_n(&hip.copy_ns, copy_ns, __ATOMIC_RELAXED);
}

EXPORT hip_error hipStreamCreate(hip_stream *stream) {
    (void)hipInit(0);
    *stream = (hip_stream)(uintptr_t)(__atomic_fetch_add(&hip.stream_count, 1, __ATOMIC_SEQ_CST) * 0x100); // NOLINT
    return 0;
}

EXPORT hip_error hipLaunchKernel(const void *function, struct dim3 grid, struct dim3 block, void **arguments,
                                 size_t shared, hip_stream stream) {
    const struct {
        const void *function;
        struct dim3 grid, block;
        void **arguments;
        size_t shared;
        hip_stream stream;
    } all = {function, grid, block, arguments, shared, stream};
    struct made made;
    struct fake_entry entry;
    enter(&made, TABLE_HIP_RUNTIME, LAUNCH_KERNEL, &all, sizeof all);
    run_kernel(&made, (struct kernel *)(uintptr_t)function, grid, block, stream, &entry);
    entry.call_end = leave(&made);
    note(entry, ((const struct kernel *)function)->name);
    return 0;
}

EXPORT hip_error __hipPushCallConfiguration(struct dim3 grid, struct dim3 block, size_t shared, hip_stream stream) {
    const struct {
        struct dim3 grid, block;
        size_t shared;
        hip_stream stream;
    } all = {grid, block, shared, stream};
    struct made made;
    enter(&made, TABLE_HIP_COMPILER, PUSH_CALL_CONFIGURATION, &all, sizeof all);
    (void)leave(&made);
    return 0;
}

EXPORT hip_error hipModuleLoadData(hip_module *module, const void *image) {
    const char *name = image;
    struct kernel **kernels = calloc(64, sizeof *kernels);
    (void)hipInit(0);
    for (size_t i = 0; *name != 0 && i < 63; i++, name += strlen(name) + 1) {
        kernels[i] = new_kernel(name);
        load(kernels[i]);
    }
    *module = kernels;
    return 0;
}

EXPORT hip_error hipModuleGetFunction(hip_function *function, hip_module module, const char *name) {
    struct kernel **kernels = module;
    for (size_t i = 0; kernels[i] != NULL; i++) {
        if (strcmp(kernels[i]->name, name) == 0) {
            *function = kernels[i];
            return 0;
        }
    }
    return HIP_ERROR;
}

EXPORT hip_error hipModuleUnload(hip_module module) {
    struct made made;
    enter(&made, TABLE_HIP_RUNTIME, MODULE_UNLOAD, &module, sizeof module);
    free(module);
    (void)leave(&made);
    return 0;
}

EXPORT hip_error hipModuleLaunchKernel(hip_function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                                       hip_stream stream, void **arguments, void **extra) {
    const struct {
        hip_function function;
        unsigned sizes[7];
        hip_stream stream;
        void **arguments, **extra;
    } all = {function, {grid_x, grid_y, grid_z, block_x, block_y, block_z, shared}, stream, arguments, extra};
    struct made made;
    struct fake_entry entry;
    enter(&made, TABLE_HIP_RUNTIME, MODULE_LAUNCH_KERNEL, &all, sizeof all);
    run_kernel(&made, function, (struct dim3){grid_x, grid_y, grid_z}, (struct dim3){block_x, block_y, block_z}, stream,
               &entry);
    entry.call_end = leave(&made);
    note(entry, ((const struct kernel *)function)->name);
    return 0;
}

EXPORT hip_error hipGraphLaunch(void *graph, hip_stream stream) {
    const struct {
        void *graph;
        hip_stream stream;
    } all = {graph, stream};
    const struct dim3 one = {1, 1, 1}, block = {64, 1, 1};
    struct made made;
    struct fake_entry entries[GRAPH_KERNELS];
    enter(&made, TABLE_HIP_RUNTIME, GRAPH_LAUNCH, &all, sizeof all);
    for (size_t i = 0; i < GRAPH_KERNELS; i++) {
        run_kernel(&made, graph, one, block, stream, &entries[i]);
    }
    const uint64_t end = leave(&made);
    for (size_t i = 0; i < GRAPH_KERNELS; i++) {
        entries[i].call_end = end;
        note(entries[i], ((const struct kernel *)graph)->name);
    }
    return 0;
}

EXPORT hip_error hipMemcpyAsync(void *to, const void *from, size_t bytes, int kind, hip_stream stream) {
    const struct {
        void *to;
        const void *from;
        size_t bytes;
        int kind;
        hip_stream stream;
    } all = {to, from, bytes, kind, stream};
    struct made made;
    enter(&made, TABLE_HIP_RUNTIME, MEMCPY_ASYNC, &all, sizeof all);
    struct fake_work work = {.bytes = bytes, .copy = kind + 1}; /* hipMemcpyKind: 0 HtoH 1 HtoD 2 DtoH 3 DtoD */
    enqueue(&made, &work, stream, __atomic_load_n(&hip.copy_ns, __ATOMIC_RELAXED));
    const uint64_t end = leave(&made);
    note((struct fake_entry){.what = FAKE_COPY,
                             .stream = work.stream,
                             .call_start = made.start,
                             .call_end = end,
                             .start = work.start,
                             .end = work.end,
                             .bytes = bytes},
         "hipMemcpyAsync");
    return 0;
}

static void tell_allocated(const struct made *made, uint32_t what, const void *memory, size_t bytes) {
    const uint64_t end = fake_boottime_ns();
    if (made->hooks != NULL) {
        made->hooks->allocated(what == FAKE_ALLOCATION ? 1 : 3, (uint64_t)(uintptr_t)memory, bytes, made->start, end);
    }
    note((struct fake_entry){.what = what, .start = made->start, .end = end, .bytes = bytes}, "");
}

EXPORT hip_error hipMalloc(void **memory, size_t bytes) {
    const struct {
        void **memory;
        size_t bytes;
    } all = {memory, bytes};
    struct made made;
    enter(&made, TABLE_HIP_RUNTIME, MALLOC, &all, sizeof all);
    *memory = malloc(1);
    tell_allocated(&made, FAKE_ALLOCATION, *memory, bytes);
    (void)leave(&made);
    return 0;
}

EXPORT hip_error hipFree(void *memory) {
    struct made made;
    enter(&made, TABLE_HIP_RUNTIME, FREE, &memory, sizeof memory);
    tell_allocated(&made, FAKE_FREE, memory, 0);
    free(memory);
    (void)leave(&made);
    return 0;
}

static void await_stream(struct stream *stream) {
    pthread_mutex_lock(&hip.mutex);
    const uint64_t end = stream->end;
    pthread_mutex_unlock(&hip.mutex);
    for (uint64_t now = fake_boottime_ns(); now < end; now = fake_boottime_ns()) {
        const struct timespec rest = {(time_t)((end - now) / NS_PER_S), (long)((end - now) % NS_PER_S)};
        nanosleep(&rest, NULL);
    }
    pthread_mutex_lock(&hip.mutex);
    while (stream->outstanding > 0) {
        pthread_cond_wait(&hip.changed, &hip.mutex);
    }
    pthread_mutex_unlock(&hip.mutex);
}

EXPORT hip_error hipStreamSynchronize(hip_stream stream) {
    struct made made;
    enter(&made, TABLE_HIP_RUNTIME, STREAM_SYNCHRONIZE, &stream, sizeof stream);
    await_stream(&hip.streams[index_of(stream)]);
    const uint64_t end = leave(&made);
    note((struct fake_entry){.what = FAKE_CALL, .call_start = made.start, .call_end = end}, "hipStreamSynchronize");
    return 0;
}

EXPORT hip_error hipDeviceSynchronize(void) {
    struct made made;
    enter(&made, TABLE_HIP_RUNTIME, DEVICE_SYNCHRONIZE, NULL, 0);
    for (uint32_t i = 0; i < STREAMS; i++) {
        await_stream(&hip.streams[i]);
    }
    const uint64_t end = leave(&made);
    note((struct fake_entry){.what = FAKE_CALL, .call_start = made.start, .call_end = end}, "hipDeviceSynchronize");
    return 0;
}

EXPORT hip_error hipGetDevice(int *device) {
    struct made made;
    enter(&made, TABLE_HIP_RUNTIME, GET_DEVICE, &device, sizeof device);
    *device = 0;
    (void)leave(&made);
    return 0;
}

EXPORT const char *hipKernelNameRef(hip_function function) {
    struct made made;
    enter(&made, TABLE_HIP_RUNTIME, KERNEL_NAME_REF, &function, sizeof function);
    (void)leave(&made);
    return ((const struct kernel *)function)->name;
}

EXPORT const char *hipKernelNameRefByPtr(const void *function, hip_stream stream) {
    const struct {
        const void *function;
        hip_stream stream;
    } all = {function, stream};
    struct made made;
    enter(&made, TABLE_HIP_RUNTIME, KERNEL_NAME_REF_BY_PTR, &all, sizeof all);
    (void)leave(&made);
    return ((const struct kernel *)function)->name;
}
