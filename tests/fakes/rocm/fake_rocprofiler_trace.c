/* What the wrapped functions of the runtimes do in the fake rocprofiler-sdk, and its device thread. See
 * fake_rocprofiler.c.
 *
 * A call gets a correlation id if a started context wants it; a piece of work takes the one of the call around it, else
 * one of its own. The contexts that want a piece of work are noted when it is put into its queue, and get its record
 * when it ends, also if they have been stopped by then.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "fake_rocprofiler.h"

#define NS_PER_S 1000000000ull
#define OBJECTS 4096u
#define WIDE_DISPATCHES 10306
#define ALLOCATION_AGENT 21

struct pending {
    struct pending *next;
    struct fake_work work;
    uint64_t contexts, thread, internal, dispatch, kernel;
    void (*over)(void *);
    void *argument;
};

static struct {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    struct pending *first, **last;
    bool runs, working;
    uint64_t stalled_until;
    struct {
        uint64_t object, id;
    } kernels[OBJECTS];
    uint32_t kernel_count;
} device = {.mutex = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static uint64_t thread_id(void) { return (uint64_t)syscall(SYS_gettid); }

static uint64_t next_correlation(void) { return __atomic_add_fetch(&sdk.correlations, 1, __ATOMIC_SEQ_CST); }

static bool wants(const struct service *service, int32_t operation) {
    return service->on && (service->all || service->operations[operation]);
}

static const struct context *context_at(uint32_t index, uint64_t contexts) {
    return contexts >> index & 1 ? &sdk.contexts[index] : NULL;
}

/* ---- calls ---- */

static int buffered_kind(int table) { return table == TABLE_HSA ? BUF_HSA_CORE : 0; }

static int callback_kind(int table) {
    return table == TABLE_HIP_RUNTIME ? CB_HIP_RUNTIME : table == TABLE_HIP_COMPILER ? CB_HIP_COMPILER : 0;
}

static void call_back(struct fake_call *call, int phase) {
    const int kind = callback_kind(call->table);
    struct api_data data = {.size = sizeof data};
    memcpy(data.arguments, call->arguments, call->argument_bytes);
    for (uint32_t i = 0; kind != 0 && i < CONTEXTS; i++) {
        const struct context *context = context_at(i, call->contexts);
        if (context == NULL || !wants(&context->callbacks[kind], call->operation) ||
            (sdk.deaf_again && context->starts > 1)) {
            continue;
        }
        const struct callback_record record = {.context = FIRST_CONTEXT + i,
                                               .thread = thread_id(),
                                               .correlation = {call->internal, 0, call->ancestor},
                                               .kind = kind,
                                               .operation = call->operation,
                                               .phase = phase,
                                               .payload = &data};
        context->callbacks[kind].callback(record, &call->user[i], context->callbacks[kind].data);
    }
}

static void enter(struct fake_call *call) {
    const int callbacks = callback_kind(call->table), buffered = buffered_kind(call->table);
    call->contexts = call->internal = 0;
    for (uint32_t i = 0; i < CONTEXTS; i++) {
        const struct context *context = &sdk.contexts[i];
        if (!__atomic_load_n(&context->active, __ATOMIC_SEQ_CST)) {
            continue;
        }
        if ((callbacks != 0 && wants(&context->callbacks[callbacks], call->operation)) ||
            (buffered != 0 && wants(&context->buffered[buffered], call->operation))) {
            call->contexts |= 1ull << i;
        }
    }
    if (call->contexts != 0) {
        call->internal = next_correlation();
        memset(call->user, 0, sizeof call->user);
        call->start = fake_boottime_ns();
        call_back(call, PHASE_ENTER);
    }
}

static void leave(struct fake_call *call) {
    const int kind = buffered_kind(call->table);
    if (call->contexts == 0) {
        return;
    }
    call_back(call, PHASE_EXIT);
    for (uint32_t i = 0; kind != 0 && i < CONTEXTS; i++) {
        const struct context *context = context_at(i, call->contexts);
        if (context != NULL && wants(&context->buffered[kind], call->operation)) {
            const struct api_record record = {.size = sizeof record,
                                              .kind = kind,
                                              .operation = call->operation,
                                              .correlation = {call->internal, 0, call->ancestor},
                                              .start = call->start,
                                              .end = fake_boottime_ns(),
                                              .thread = thread_id()};
            sdk_emit(context->buffered[kind].buffer, kind, &record, sizeof record);
        }
    }
}

static void allocated(int operation, uint64_t address, uint64_t bytes, uint64_t start, uint64_t end) {
    for (uint32_t i = 0; i < CONTEXTS; i++) {
        const struct context *context = &sdk.contexts[i];
        if (__atomic_load_n(&context->active, __ATOMIC_SEQ_CST) &&
            wants(&context->buffered[BUF_MEMORY_ALLOCATION], operation)) {
            const struct allocation_record record = {.size = sizeof record,
                                                     .kind = BUF_MEMORY_ALLOCATION,
                                                     .operation = operation,
                                                     .correlation = {next_correlation(), 0, 0},
                                                     .thread = thread_id(),
                                                     .start = start,
                                                     .end = end,
                                                     .agent = ALLOCATION_AGENT,
                                                     .address = address,
                                                     .bytes = bytes};
            sdk_emit(context->buffered[BUF_MEMORY_ALLOCATION].buffer, BUF_MEMORY_ALLOCATION, &record, sizeof record);
        }
    }
}

/* ---- code objects ---- */

static void loaded(const char *const *names, const uint64_t *objects, size_t count) {
    for (size_t i = 0; i < count; i++) {
        struct kernel_symbol symbol = {.size = sizeof symbol, .code_object_id = 1, .kernel_object = objects[i]};
        char name[256] = "";
        strncat(strncat(name, names[i], sizeof name - 4), ".kd", 4);
        symbol.name = name;
        pthread_mutex_lock(&device.mutex);
        symbol.kernel_id = device.kernel_count + 1;
        device.kernels[device.kernel_count % OBJECTS].object = objects[i];
        device.kernels[device.kernel_count++ % OBJECTS].id = symbol.kernel_id;
        pthread_mutex_unlock(&device.mutex);
        for (uint32_t context = 0; context < CONTEXTS; context++) {
            const struct service *service = &sdk.contexts[context].callbacks[CB_CODE_OBJECT];
            uint64_t user = 0;
            if (__atomic_load_n(&sdk.contexts[context].active, __ATOMIC_SEQ_CST) &&
                wants(service, CODE_OBJECT_KERNEL_SYMBOL)) {
                const struct callback_record record = {.context = FIRST_CONTEXT + context,
                                                       .thread = thread_id(),
                                                       .kind = CB_CODE_OBJECT,
                                                       .operation = CODE_OBJECT_KERNEL_SYMBOL,
                                                       .phase = PHASE_ENTER,
                                                       .payload = &symbol};
                service->callback(record, &user, service->data);
            }
        }
    }
}

/* 0: its code was loaded before the tables were wrapped. */
static uint64_t kernel_id(uint64_t object) {
    for (uint32_t i = 0; i < device.kernel_count && i < OBJECTS; i++) {
        if (device.kernels[i].object == object) {
            return device.kernels[i].id;
        }
    }
    return 0;
}

/* ---- work ---- */

static void emit_dispatch(const struct pending *pending, uint64_t buffer) {
    uint8_t room[sizeof(struct dispatch_record) + 64] = {0};
    const struct fake_work *work = &pending->work;
    const size_t known = sdk.version < WIDE_DISPATCHES ? DISPATCH_BYTES : sizeof(struct dispatch_record);
    const size_t bytes = known + (size_t)sdk.extra_dispatch_bytes;
    struct dispatch_record record = {.size = bytes,
                                     .kind = BUF_KERNEL_DISPATCH,
                                     .operation = 2,
                                     .internal = pending->internal,
                                     .thread = pending->thread,
                                     .start = work->start,
                                     .end = work->end,
                                     .info = {.size = 72,
                                              .agent = 21,
                                              .queue = work->queue,
                                              .kernel_id = pending->kernel,
                                              .dispatch_id = pending->dispatch,
                                              .private_segment = 16,
                                              .group_segment = 1024,
                                              .workgroup = work->block,
                                              .grid = work->grid},
                                     .pipe_id = -1};
    memcpy(room, &record, known);
    sdk_emit(buffer, BUF_KERNEL_DISPATCH, room, bytes);
}

static void emit_copy(const struct pending *pending, uint64_t buffer) {
    const struct fake_work *work = &pending->work;
    const struct copy_record record = {.size = sizeof record,
                                       .kind = BUF_MEMORY_COPY,
                                       .operation = work->copy,
                                       .internal = pending->internal,
                                       .thread = pending->thread,
                                       .start = work->start,
                                       .end = work->end,
                                       .destination = work->copy == 2 || work->copy == 4 ? 21 : 11,
                                       .source = work->copy >= 3 ? 21 : 11,
                                       .bytes = work->bytes,
                                       .destination_address = 0x1000,
                                       .source_address = 0x2000};
    sdk_emit(buffer, BUF_MEMORY_COPY, &record, sizeof record);
}

static void complete(const struct pending *pending) {
    const int kind = pending->work.copy == 0 ? BUF_KERNEL_DISPATCH : BUF_MEMORY_COPY;
    for (uint32_t i = 0; i < CONTEXTS; i++) {
        const struct context *context = context_at(i, pending->contexts);
        if (context != NULL) {
            (kind == BUF_KERNEL_DISPATCH ? emit_dispatch : emit_copy)(pending, context->buffered[kind].buffer);
        }
    }
    pending->over(pending->argument);
}

static void wait_until(uint64_t time) {
    const uint64_t now = fake_boottime_ns();
    if (time > now) {
        const struct timespec rest = {(time_t)((time - now) / NS_PER_S), (long)((time - now) % NS_PER_S)};
        nanosleep(&rest, NULL);
    }
}

static void *run_device(void *unused) {
    (void)unused;
    prctl(PR_SET_NAME, "fake-hsa");
    pthread_mutex_lock(&device.mutex);
    for (;;) {
        while (device.first == NULL) {
            device.working = false;
            pthread_cond_broadcast(&device.changed);
            pthread_cond_wait(&device.changed, &device.mutex);
        }
        device.working = true;
        struct pending *pending = device.first;
        device.first = NULL;
        device.last = NULL;
        const uint64_t stalled = device.stalled_until;
        pthread_mutex_unlock(&device.mutex);
        wait_until(stalled);
        while (pending != NULL) {
            struct pending *next = pending->next;
            wait_until(pending->work.end);
            complete(pending);
            free(pending);
            pending = next;
        }
        pthread_mutex_lock(&device.mutex);
    }
    return NULL;
}

static bool enqueued(const struct fake_work *work, void (*over)(void *), void *argument) {
    const int kind = work->copy == 0 ? BUF_KERNEL_DISPATCH : BUF_MEMORY_COPY;
    uint64_t contexts = 0;
    for (uint32_t i = 0; i < CONTEXTS; i++) {
        const struct context *context = &sdk.contexts[i];
        if (__atomic_load_n(&context->active, __ATOMIC_SEQ_CST) && wants(&context->buffered[kind], work->copy)) {
            contexts |= 1ull << i;
        }
    }
    if (contexts == 0 || getpid() != sdk.pid) {
        return false;
    }
    struct pending *pending = malloc(sizeof *pending);
    *pending = (struct pending){.work = *work,
                                .contexts = contexts,
                                .thread = thread_id(),
                                .internal = work->call != 0 ? work->call : next_correlation(),
                                .over = over,
                                .argument = argument};
    pthread_mutex_lock(&device.mutex);
    if (!device.runs) {
        pthread_t thread;
        device.runs = pthread_create(&thread, NULL, run_device, NULL) == 0;
    }
    pending->kernel = kernel_id(work->kernel_object);
    pending->dispatch = ++sdk.dispatches;
    if (device.first == NULL) {
        device.last = &device.first;
        pthread_cond_broadcast(&device.changed);
    }
    *device.last = pending;
    device.last = &pending->next;
    pthread_mutex_unlock(&device.mutex);
    return true;
}

void sdk_stall(long ms) {
    pthread_mutex_lock(&device.mutex);
    device.stalled_until = fake_boottime_ns() + (uint64_t)ms * 1000000u;
    pthread_mutex_unlock(&device.mutex);
}

/* Waits for all work that is recorded. */
void sdk_drain(void) {
    pthread_mutex_lock(&device.mutex);
    while (device.runs && (device.first != NULL || device.working)) {
        pthread_cond_wait(&device.changed, &device.mutex);
    }
    pthread_mutex_unlock(&device.mutex);
}

struct fake_hooks sdk_hooks = {enter, leave, enqueued, loaded, allocated};
