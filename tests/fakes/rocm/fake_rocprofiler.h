/* What the parts of the fake rocprofiler-sdk share. See fake_rocprofiler.c. */
#ifndef FAKE_ROCPROFILER_H
#define FAKE_ROCPROFILER_H

#include <pthread.h>
#include <stdbool.h>

#include "fake_rocm.h"

#define CONTEXTS 32u
#define BUFFERS 16u
#define GROUPS 16u
#define CLIENTS 8u
#define TASKS 1024u
#define OPERATIONS 512u
#define FIRST_BUFFER 1000u /* the real ones begin at a random number, too */
#define FIRST_CONTEXT 1u
#define NO_GROUP 0u
#define EXPORT __attribute__((visibility("default")))

struct service {
    bool on;
    bool all; /* operations */
    uint8_t operations[OPERATIONS];
    callback_fn callback;
    void *data;
    uint64_t buffer;
};

struct context {
    bool used, active;
    uint32_t client;
    uint32_t starts;
    struct service callbacks[CB_KINDS];
    struct service buffered[BUF_KINDS];
};

struct internal_buffer {
    uint8_t *bytes;
    size_t capacity, used;
    struct record_header *headers;
    struct record_header **pointers;
    size_t count;
};

struct buffer {
    pthread_mutex_t mutex;
    pthread_cond_t flushed;
    struct internal_buffer internal[2];
    uint32_t index;
    bool flushing[2];
    size_t watermark;
    int policy;
    buffer_fn callback;
    void *data;
    uint64_t context, id, drop_count;
    uint32_t group;
};

struct task {
    struct buffer *buffer;
    uint32_t index;
};

struct group { /* one callback thread */
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    struct task tasks[TASKS];
    uint64_t queued, done;
    bool ends;
    pthread_t thread;
};

struct client {
    configure_fn configure;
    struct client_id id;
    struct tool tool;
    bool configured;
};

struct sdk {
    pthread_mutex_t mutex;      /* of registration and contexts */
    int initialised, finalised; /* 0, -1, 1 */
    int pid;
    struct context contexts[CONTEXTS];
    struct buffer *buffers[BUFFERS];
    uint32_t buffer_count;
    struct group *groups[GROUPS];
    uint32_t group_count;
    struct client clients[CLIENTS];
    uint32_t client_count, configuring;
    struct {
        thread_fn before, after;
        int libraries;
        void *data;
    } thread_hooks[CLIENTS];
    uint32_t thread_hook_count;
    uint64_t correlations, dispatches, emitted[BUF_KINDS], misused, lost, blocked_ns;
    long version, hang_ms, extra_dispatch_bytes, shifted_kinds, deaf_again, busy_flushes, start_delay_ms,
        flush_delay_ms, old_register;
};
extern struct sdk sdk;
extern struct fake_hooks sdk_hooks;

/* Kinds and operations by name. */
const char *sdk_callback_kind_name(int kind);
const char *sdk_buffer_kind_name(int kind);
const char *sdk_operation_name(bool buffered, int kind, int32_t operation);

/* Buffers. */
int sdk_flush(struct buffer *buffer, bool wait);
void sdk_emit(uint64_t buffer, int kind, const void *record, size_t bytes);
uint32_t sdk_new_group(void);
void sdk_join_groups(void);

/* Device. */
void sdk_stall(long ms);
void sdk_drain(void);

#endif
