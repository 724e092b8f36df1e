/* Buffers and callback threads of the fake rocprofiler-sdk. See fake_rocprofiler.c. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "fake_rocprofiler.h"

#define TWO_LOCKS 10300    /* from here on a half has a lock of its own: producers write while a callback runs */
#define CALLBACK_LIBRARY 1 /* ROCPROFILER_LIBRARY */

/* ---- callback threads ---- */

static void run_task(const struct task *task) {
    struct buffer *buffer = task->buffer;
    struct internal_buffer *half = &buffer->internal[task->index % 2];
    usleep((useconds_t)sdk.flush_delay_ms * 1000);
    if (half->count > 0) {
        for (size_t i = 0; i < half->count; i++) {
            half->pointers[i] = &half->headers[i];
        }
        buffer->callback(buffer->context, buffer->id, half->pointers, half->count, buffer->data, buffer->drop_count);
    }
    pthread_mutex_lock(&buffer->mutex);
    half->used = half->count = 0;
    buffer->flushing[task->index % 2] = false;
    pthread_cond_broadcast(&buffer->flushed);
    pthread_mutex_unlock(&buffer->mutex);
}

static void *run_group(void *argument) {
    struct group *group = argument;
    prctl(PR_SET_NAME, "fake-rocprofiler");
    pthread_mutex_lock(&group->mutex);
    for (;;) {
        while (group->done == group->queued && !group->ends) {
            pthread_cond_wait(&group->changed, &group->mutex);
        }
        if (group->done == group->queued) {
            pthread_mutex_unlock(&group->mutex);
            return NULL;
        }
        const struct task task = group->tasks[group->done % TASKS];
        pthread_mutex_unlock(&group->mutex);
        run_task(&task);
        pthread_mutex_lock(&group->mutex);
        group->done++;
        pthread_cond_broadcast(&group->changed);
    }
}

static void call_thread_hooks(bool before) {
    for (uint32_t i = 0; i < sdk.thread_hook_count; i++) {
        const thread_fn hook = before ? sdk.thread_hooks[i].before : sdk.thread_hooks[i].after;
        if (hook != NULL && (sdk.thread_hooks[i].libraries == 0 || sdk.thread_hooks[i].libraries & CALLBACK_LIBRARY)) {
            hook(CALLBACK_LIBRARY, sdk.thread_hooks[i].data);
        }
    }
}

uint32_t sdk_new_group(void) {
    struct group *group = calloc(1, sizeof *group);
    pthread_mutex_init(&group->mutex, NULL);
    pthread_cond_init(&group->changed, NULL);
    call_thread_hooks(true);
    if (pthread_create(&group->thread, NULL, run_group, group) != 0) {
        abort();
    }
    call_thread_hooks(false);
    sdk.groups[sdk.group_count] = group;
    return sdk.group_count++;
}

static void wait_for(struct group *group) {
    pthread_mutex_lock(&group->mutex);
    const uint64_t queued = group->queued;
    while (group->done < queued) {
        pthread_cond_wait(&group->changed, &group->mutex);
    }
    pthread_mutex_unlock(&group->mutex);
}

static void submit(struct group *group, struct task task) {
    pthread_mutex_lock(&group->mutex);
    group->tasks[group->queued++ % TASKS] = task;
    pthread_cond_broadcast(&group->changed);
    pthread_mutex_unlock(&group->mutex);
}

void sdk_join_groups(void) {
    for (uint32_t i = 0; i < sdk.group_count; i++) {
        struct group *group = sdk.groups[i];
        pthread_mutex_lock(&group->mutex);
        group->ends = true;
        pthread_cond_broadcast(&group->changed);
        pthread_mutex_unlock(&group->mutex);
        pthread_join(group->thread, NULL);
        free(group);
    }
    sdk.group_count = 0;
}

EXPORT int rocprofiler_at_internal_thread_create(thread_fn before, thread_fn after, int libraries, void *data) {
    sdk.thread_hooks[sdk.thread_hook_count].before = before;
    sdk.thread_hooks[sdk.thread_hook_count].after = after;
    sdk.thread_hooks[sdk.thread_hook_count].libraries = libraries;
    sdk.thread_hooks[sdk.thread_hook_count].data = data;
    sdk.thread_hook_count++;
    return OK;
}

EXPORT int rocprofiler_create_callback_thread(uint64_t *thread) {
    if (sdk.initialised > 0) {
        return CONFIGURATION_LOCKED;
    }
    if (sdk.group_count == 0) {
        (void)sdk_new_group(); /* the default one */
    }
    *thread = sdk_new_group();
    return OK;
}

/* ---- buffers ---- */

static struct buffer *buffer_of(uint64_t id) {
    return id >= FIRST_BUFFER && id < FIRST_BUFFER + sdk.buffer_count ? sdk.buffers[id - FIRST_BUFFER] : NULL;
}

EXPORT int rocprofiler_assign_callback_thread(uint64_t id, uint64_t thread) {
    struct buffer *buffer = buffer_of(id);
    if (sdk.initialised > 0) {
        return CONFIGURATION_LOCKED;
    }
    if (buffer == NULL || thread >= sdk.group_count) {
        return buffer == NULL ? BUFFER_NOT_FOUND : THREAD_NOT_FOUND;
    }
    buffer->group = (uint32_t)thread;
    return OK;
}

static void allocate(struct internal_buffer *half, size_t size) {
    const size_t most = size / 32 + 1; /* the real one has a header for each byte */
    half->bytes = malloc(size);
    half->capacity = size;
    half->headers = calloc(most, sizeof *half->headers);
    half->pointers = calloc(most, sizeof(struct record_header *));
}

EXPORT int rocprofiler_create_buffer(uint64_t context, size_t size, size_t watermark, int policy, buffer_fn callback,
                                     void *data, uint64_t *id) {
    if (sdk.initialised >= 0) {
        return CONFIGURATION_LOCKED;
    }
    if (sdk.buffer_count == BUFFERS) {
        return ERROR;
    }
    if (sdk.group_count == 0) {
        (void)sdk_new_group();
    }
    struct buffer *buffer = calloc(1, sizeof *buffer);
    pthread_mutex_init(&buffer->mutex, NULL);
    pthread_cond_init(&buffer->flushed, NULL);
    allocate(&buffer->internal[0], size);
    if (policy == POLICY_LOSSLESS) {
        allocate(&buffer->internal[1], size);
    }
    buffer->watermark = watermark;
    buffer->policy = policy;
    buffer->callback = callback;
    buffer->data = data;
    buffer->context = context;
    buffer->id = *id = FIRST_BUFFER + sdk.buffer_count;
    buffer->group = NO_GROUP;
    sdk.buffers[sdk.buffer_count++] = buffer;
    return OK;
}

static bool busy(const struct buffer *buffer, uint32_t half) {
    return sdk.version < TWO_LOCKS ? buffer->flushing[0] || buffer->flushing[1] : buffer->flushing[half];
}

int sdk_flush(struct buffer *buffer, bool wait) {
    struct group *group = sdk.groups[buffer->group];
    if (sdk.finalised > 0) {
        return FINALIZED;
    }
    if (wait) {
        wait_for(group);
    }
    pthread_mutex_lock(&buffer->mutex);
    const uint32_t index = buffer->index++ % 2;
    while (busy(buffer, index)) {
        if (!wait) {
            buffer->index--;
            pthread_mutex_unlock(&buffer->mutex);
            return BUFFER_BUSY;
        }
        pthread_cond_wait(&buffer->flushed, &buffer->mutex);
    }
    buffer->flushing[index] = true;
    pthread_mutex_unlock(&buffer->mutex);
    submit(group, (struct task){buffer, index});
    if (wait) {
        wait_for(group);
    }
    return OK;
}

EXPORT int rocprofiler_flush_buffer(uint64_t id) {
    struct buffer *buffer = buffer_of(id);
    if (getpid() != sdk.pid) {
        __atomic_fetch_add(&sdk.misused, 1, __ATOMIC_SEQ_CST);
        return ERROR;
    }
    if (__atomic_load_n(&sdk.busy_flushes, __ATOMIC_SEQ_CST) > 0) {
        __atomic_fetch_sub(&sdk.busy_flushes, 1, __ATOMIC_SEQ_CST);
        return BUFFER_BUSY;
    }
    return buffer == NULL ? BUFFER_NOT_FOUND : sdk_flush(buffer, true);
}

static uint64_t monotonic_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* With the mutex held. False: it is full. */
static bool put(struct internal_buffer *half, int kind, const void *record, size_t bytes) {
    if (half->used + bytes > half->capacity) {
        return false;
    }
    memcpy(half->bytes + half->used, record, bytes);
    half->headers[half->count++] = (struct record_header){CATEGORY_TRACING, (uint32_t)kind, half->bytes + half->used};
    half->used += bytes;
    return true;
}

void sdk_emit(uint64_t id, int kind, const void *record, size_t bytes) {
    struct buffer *buffer = buffer_of(id);
    bool full = true;
    const uint64_t begin = monotonic_ns();
    while (full) {
        pthread_mutex_lock(&buffer->mutex);
        while (busy(buffer, buffer->index % 2)) {
            pthread_cond_wait(&buffer->flushed, &buffer->mutex);
        }
        struct internal_buffer *half = &buffer->internal[buffer->index % 2];
        if (half->capacity == 0) {
            __atomic_fetch_add(&sdk.lost, 1, __ATOMIC_SEQ_CST); /* DISCARD, between its first flush and the next */
            pthread_mutex_unlock(&buffer->mutex);
            return;
        }
        full = !put(half, kind, record, bytes);
        const bool flush = half->used >= buffer->watermark;
        if (full && buffer->policy == POLICY_DISCARD) {
            buffer->drop_count++;
            full = false;
        } else if (!full) {
            __atomic_fetch_add(&sdk.emitted[kind], 1, __ATOMIC_SEQ_CST);
        }
        pthread_mutex_unlock(&buffer->mutex);
        if (full || flush) {
            (void)sdk_flush(buffer, full);
        }
    }
    __atomic_fetch_add(&sdk.blocked_ns, monotonic_ns() - begin, __ATOMIC_SEQ_CST);
}
