/* The "CUDA API" of the fake: calls that leave the records a GPU and its driver would. See fake_cupti.c. */
#define _GNU_SOURCE
#include "fake_internal.h"

#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

struct callback_data { /* the beginning of CUpti_CallbackData */
    int site;
    const char *function;
    const void *parameters;
    void *result;
    const char *symbol;
    void *context;
    uint32_t context_uid;
    uint64_t *correlation_data;
    uint32_t correlation;
};

uint64_t fake_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec;
}

void fake_wait_ms(const long *delay_ms) {
    for (long passed_ms = 0; passed_ms < __atomic_load_n(delay_ms, __ATOMIC_RELAXED); passed_ms++) {
        usleep(1000);
    }
}

/* The buffer that the calling thread writes into. */
struct filled *fake_current(void) {
    static uint32_t threads;
    static _Thread_local uint32_t own;
    if (fake.per_thread == 0) {
        return &fake.current[0];
    }
    own = own != 0 ? own : __atomic_add_fetch(&threads, 1, __ATOMIC_RELAXED);
    return &fake.current[own % THREADS];
}

/* The end of a call that the subscriber has chosen counts as written: the subscriber can record it. */
static void notify(uint32_t domain, uint32_t cbid, int site, uint32_t correlation, bool inside) {
    static uint32_t succeeded;
    fake_lock();
    const bool chosen = fake.call_on[domain][cbid];
    const callback_fn callback = chosen || fake.domain_on[domain] ? fake.callback : NULL;
    void *user = fake.callback_user;
    if (callback != NULL && chosen && site == 1 && !inside) {
        fake.written[domain == DOMAIN_RUNTIME ? RUNTIME : DRIVER]++;
    }
    fake_unlock();
    if (callback == NULL) {
        return;
    }
    const struct callback_data data = {
        .site = site, .correlation = correlation, .result = &succeeded, .context = (void *)fake.context};
    fake_in_exit += site;
    callback(user, domain, cbid, &data);
    fake_in_exit -= site;
}

struct open_call {
    uint32_t domain;
    struct api record;
};

static struct open_call begin(uint32_t domain, uint32_t cbid) {
    const uint32_t correlation = __atomic_add_fetch(&fake.correlation, 1, __ATOMIC_RELAXED);
    notify(domain, cbid, 0, correlation, false);
    const struct open_call call = {.domain = domain,
                                   .record = {.kind = domain == DOMAIN_RUNTIME ? RUNTIME : DRIVER,
                                              .cbid = cbid,
                                              .start = fake_now_ns(),
                                              .process = (uint32_t)getpid(),
                                              .thread = (uint32_t)syscall(SYS_gettid),
                                              .correlation = correlation}};
    return call;
}

/* With the mutex held; releases it. */
static uint32_t end(struct open_call *call) {
    call->record.end = fake_now_ns();
    fake_put(call->record.kind, &call->record, sizeof call->record);
    fake_unlock();
    notify(call->domain, call->record.cbid, 1, call->record.correlation, false);
    return call->record.correlation;
}

static void trivial_call(uint32_t domain, uint32_t cbid) {
    struct open_call call = begin(domain, cbid);
    fake_lock();
    (void)end(&call);
}

/* The device does one thing after another on a stream. */
static uint64_t occupy(uint32_t stream, uint64_t after, uint64_t duration) {
    const uint64_t free_at = fake.stream_end[stream];
    const uint64_t start = after > free_at ? after : free_at;
    fake.stream_end[stream] = start + duration;
    return start;
}

/* Kernel records point at names that outlive them. With the lock held. */
static const char *intern(const char *name) {
    for (uint32_t i = 0; i < fake.name_count; i++) {
        if (strcmp(fake.names[i], name) == 0) {
            return fake.names[i];
        }
    }
    if (fake.name_count == NAMES) {
        return fake.names[0];
    }
    return fake.names[fake.name_count++] = strdup(name);
}

static void put_kernel(const char *name, const int32_t grid[3], const int32_t block[3], uint64_t duration,
                       uint32_t stream, uint32_t correlation, uint32_t node) {
    struct kernel kernel = {.kind = KERNEL,
                            .registers = 32,
                            .context = 1,
                            .stream = stream + 7,
                            .correlation = correlation,
                            .name = intern(name),
                            .graph = node > 0 ? 1 : 0,
                            .graph_node = node};
    memcpy(kernel.grid, grid, sizeof kernel.grid);
    memcpy(kernel.block, block, sizeof kernel.block);
    kernel.start = occupy(stream, fake_now_ns(), duration);
    kernel.end = kernel.start + duration;
    fake_put(KERNEL, &kernel, sizeof kernel);
}

uint32_t fake_launch(const char *name, const int32_t grid[3], const int32_t block[3], uint64_t duration_ns,
                     uint32_t stream) {
    trivial_call(DOMAIN_RUNTIME, GET_DEVICE); /* as torch does before every launch */
    struct open_call call = begin(DOMAIN_RUNTIME, LAUNCH);
    for (int site = 0; site < 2; site++) { /* the runtime's own call of the driver */
        notify(DOMAIN_DRIVER, CU_LAUNCH, site, call.record.correlation, true);
    }
    fake_lock();
    put_kernel(name, grid, block, duration_ns, stream, call.record.correlation, 0);
    return end(&call);
}

void fake_launch_many(const char *name, uint32_t count, uint64_t duration_ns, uint32_t stream) {
    static const int32_t GRID[3] = {128, 1, 1}, BLOCK[3] = {256, 1, 1};
    for (uint32_t i = 0; i < count; i++) {
        (void)fake_launch(name, GRID, BLOCK, duration_ns, stream);
    }
}

uint32_t fake_driver_launch(const char *name, uint64_t duration_ns, uint32_t stream) {
    static const int32_t GRID[3] = {64, 1, 1}, BLOCK[3] = {128, 1, 1};
    trivial_call(DOMAIN_DRIVER, CTX_GET_CURRENT);
    struct open_call call = begin(DOMAIN_DRIVER, CU_LAUNCH);
    fake_lock();
    put_kernel(name, GRID, BLOCK, duration_ns, stream, call.record.correlation, 0);
    return end(&call);
}

uint32_t fake_graph_launch(const char *const *names, uint32_t count, uint64_t duration_ns, uint32_t stream) {
    static const int32_t GRID[3] = {32, 1, 1}, BLOCK[3] = {64, 1, 1};
    struct open_call call = begin(DOMAIN_RUNTIME, GRAPH_LAUNCH);
    for (int site = 0; site < 2; site++) {
        notify(DOMAIN_DRIVER, CU_GRAPH_LAUNCH, site, call.record.correlation, true);
    }
    fake_lock();
    fake.graph_recorded |= fake.enabled[KERNEL] || fake.enabled[MEMCPY] || fake.enabled[MEMSET];
    for (uint32_t i = 0; i < count; i++) {
        put_kernel(names[i], GRID, BLOCK, duration_ns, stream, call.record.correlation, i + 1);
    }
    return end(&call);
}

uint32_t fake_memcpy(uint64_t bytes, int to_device, uint64_t duration_ns, uint32_t stream) {
    struct open_call call = begin(DOMAIN_RUNTIME, MEMCPY_ASYNC);
    struct copy copy = {.kind = MEMCPY,
                        .copy_kind = to_device ? 1 : 2,
                        .source = to_device ? 2 : 3,
                        .destination = to_device ? 3 : 2,
                        .flags = 1,
                        .bytes = bytes,
                        .context = 1,
                        .stream = stream + 7,
                        .correlation = call.record.correlation,
                        .copies = 1};
    fake_lock();
    copy.start = occupy(stream, fake_now_ns(), duration_ns);
    copy.end = copy.start + duration_ns;
    fake_put(MEMCPY, &copy, sizeof copy);
    return end(&call);
}

uint32_t fake_memset(uint64_t bytes, uint64_t duration_ns, uint32_t stream) {
    struct open_call call = begin(DOMAIN_RUNTIME, MEMSET_ASYNC);
    struct fill fill = {.kind = MEMSET,
                        .bytes = bytes,
                        .context = 1,
                        .stream = stream + 7,
                        .correlation = call.record.correlation,
                        .memory_kind = 3};
    fake_lock();
    fill.start = occupy(stream, fake_now_ns(), duration_ns);
    fill.end = fill.start + duration_ns;
    fake_put(MEMSET, &fill, sizeof fill);
    return end(&call);
}

uint32_t fake_sync(uint32_t stream) {
    struct open_call call = begin(DOMAIN_RUNTIME, STREAM_SYNC);
    fake_lock();
    const uint64_t until = fake.stream_end[stream];
    fake_unlock();
    const struct timespec when = {.tv_sec = (time_t)(until / NS_PER_S), .tv_nsec = (long)(until % NS_PER_S)};
    clock_nanosleep(CLOCK_REALTIME, TIMER_ABSTIME, &when, NULL);
    struct sync sync = {.kind = SYNC,
                        .type = 3,
                        .start = call.record.start,
                        .end = fake_now_ns(),
                        .correlation = call.record.correlation,
                        .context = 1,
                        .stream = stream + 7};
    fake_lock();
    fake_put(SYNC, &sync, sizeof sync);
    return end(&call);
}

/* ---- many threads at once ---- */

/* Without the one lock of the rest, as fast as CUPTI does it: the subscriber's callbacks, and a record in a buffer of the
 * thread's own. What a thread has no buffer for is dropped, as CUPTI does from CUDA 12.9 on. */
static void put_own(struct filled *own, const struct kernel *kernel, size_t *dropped) {
    size_t records = 0;
    if (own->buffer != NULL && own->size - own->valid < sizeof *kernel) {
        fake.completed(NULL, 0, own->buffer, own->size, own->valid);
        own->buffer = NULL;
    }
    if (own->buffer == NULL) {
        own->valid = 0;
        fake.requested(&own->buffer, &own->size, &records);
    }
    if (own->buffer == NULL) {
        (*dropped)++;
        return;
    }
    memcpy(own->buffer + own->valid, kernel, sizeof *kernel);
    own->valid += sizeof *kernel;
}

static void *launch_all(void *launches) {
    struct filled own = {NULL, 0, 0};
    size_t dropped = 0;
    struct kernel kernel = {.kind = KERNEL, .context = 1, .stream = 7, .name = "storm"};
    for (uintptr_t i = 0; i < (uintptr_t)launches; i++) {
        kernel.correlation = __atomic_add_fetch(&fake.correlation, 1, __ATOMIC_RELAXED);
        kernel.start = fake_now_ns();
        kernel.end = kernel.start + 1000;
        for (int site = 0; fake.call_on[DOMAIN_RUNTIME][LAUNCH] && site < 2; site++) {
            const struct callback_data data = {.site = site, .correlation = kernel.correlation};
            fake.callback(fake.callback_user, DOMAIN_RUNTIME, LAUNCH, &data);
        }
        put_own(&own, &kernel, &dropped);
    }
    if (own.buffer != NULL) {
        fake.completed(NULL, 0, own.buffer, own.size, own.valid);
    }
    fake_lock();
    fake.dropped += dropped;
    fake.dropped_total += dropped;
    fake_unlock();
    return NULL;
}

/* Returns how many of the threads there were. */
uint32_t fake_storm(uint32_t threads, uint32_t launches) {
    pthread_t all[THREADS];
    uint32_t begun = 0;
    while (begun < threads && begun < THREADS &&
           pthread_create(&all[begun], NULL, launch_all, (void *)(uintptr_t)launches) == 0) {
        begun++;
    }
    for (uint32_t i = 0; i < begun; i++) {
        pthread_join(all[i], NULL);
    }
    return begun;
}
