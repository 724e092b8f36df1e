/* Recording CUDA calls from a subscriber's callbacks.
 *
 * Theory of operation
 *   CUPTI can record calls itself (activity kinds RUNTIME and DRIVER), but once a kind is enabled every call of
 *   that API becomes dearer, and a launch-bound job makes nine calls of no interest for each launch: on an H200
 *   its step took 1.24 times as long with RUNTIME, 1.43 times with DRIVER as well, 1.14 times with neither.
 *   Callbacks for the chosen calls alone cost nothing measurable on top (1.14). So they write the records, in
 *   CUPTI's own layout (CUpti_ActivityAPI, the same since CUDA 10), and nothing behind notices the difference.
 *
 *   A record is written when its call ends. The thread remembers the begin: one call at a time, since a driver
 *   call inside a runtime call is the runtime's own and not recorded (it bears the same correlation id).
 *
 *   All threads share one buffer of the arena. `cursor` holds its index and the bytes taken; a thread takes its
 *   40 bytes by compare-and-swap, writes them and adds them to `written`. Who finds the buffer full lends the
 *   next one and marks the old one `sealed` with the bytes taken; the collector's thread seals now and then, too.
 *   A sealed buffer is complete once as much is written as was taken: the collector's thread looks, nobody waits.
 *
 * Threads: records_enter and records_exit run on every thread of the program that makes a CUDA call, inside the call;
 *   records_seal and records_collect on the collector's thread; the rest on the agent's.
 * Blocks: never: no lock, no allocation, one futex wake when a buffer is full.
 */
#define _GNU_SOURCE
#include "cupti/call_records.h"

#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "cupti/buffer_pool.h"

#define NO_BUFFER UINT32_MAX
#define CURSOR(index, taken) ((uint64_t)(index) << 32 | (uint32_t)(taken))
#define CURSOR_INDEX(cursor) ((uint32_t)((cursor) >> 32))
#define CURSOR_TAKEN(cursor) ((uint32_t)(cursor))

struct call_record { /* CUpti_ActivityAPI */
    uint32_t kind;
    uint32_t cbid;
    uint64_t start;
    uint64_t end;
    uint32_t process;
    uint32_t thread;
    uint32_t correlation;
    uint32_t result;
};
_Static_assert(sizeof(struct call_record) == 40, "CUpti_ActivityAPI");

static struct {
    uint64_t recording; /* number of the current recording; 0: none */
    uint64_t recordings;
    uint64_t cursor;
    uint64_t dropped;
    uint32_t *sealed;  /* by buffer: bytes taken when it was given up, 0: not given up */
    uint32_t *written; /* by buffer */
    uint32_t process;
    struct wake *work;
} records;

static _Thread_local struct {
    uint64_t recording;
    uint64_t start;
    uint32_t domain;
    uint32_t cbid;
    uint32_t correlation;
    uint32_t thread; /* the system's id, once asked for */
} open_call;

bool records_init(uint32_t buffers) {
    records.sealed = calloc(buffers, sizeof *records.sealed);
    records.written = calloc(buffers, sizeof *records.written);
    records.cursor = CURSOR(NO_BUFFER, 0);
    records.dropped = 0;
    return records.sealed != NULL && records.written != NULL;
}

void records_free(void) {
    free(records.sealed);
    free(records.written);
    records.sealed = NULL;
    records.written = NULL;
}

void records_open(struct wake *work) {
    records.work = work;
    records.process = (uint32_t)getpid();
    __atomic_store_n(&records.recording, ++records.recordings, __ATOMIC_RELEASE);
}

void records_close(void) { __atomic_store_n(&records.recording, 0, __ATOMIC_RELEASE); }

static void seal(uint32_t index, uint32_t taken) {
    __atomic_store_n(&records.sealed[index], taken, __ATOMIC_RELEASE);
    wake_post(records.work);
}

/* Takes room for one record: its place, or NULL when no buffer is free. *index tells the buffer. */
static uint8_t *reserve(struct arena *arena, uint32_t *index) {
    const uint32_t bytes = sizeof(struct call_record);
    uint64_t cursor = __atomic_load_n(&records.cursor, __ATOMIC_ACQUIRE);
    for (;;) {
        *index = CURSOR_INDEX(cursor);
        const uint32_t taken = CURSOR_TAKEN(cursor);
        if (*index != NO_BUFFER && taken + bytes <= arena->fixed.buffer_bytes) {
            if (__atomic_compare_exchange_n(&records.cursor, &cursor, cursor + bytes, false, __ATOMIC_ACQ_REL,
                                            __ATOMIC_ACQUIRE)) {
                return arena_buffer(arena, *index) + taken;
            }
            continue;
        }
        const int64_t next = pool_lend(arena);
        if (next < 0) {
            return NULL;
        }
        if (__atomic_compare_exchange_n(&records.cursor, &cursor, CURSOR(next, bytes), false, __ATOMIC_ACQ_REL,
                                        __ATOMIC_ACQUIRE)) {
            if (*index != NO_BUFFER) {
                seal(*index, taken);
            }
            *index = (uint32_t)next;
            return arena_buffer(arena, *index);
        }
        arena_set_state(arena, (uint32_t)next, ARENA_FREE); /* another thread was faster */
    }
}

static void add(const struct call_record *record) {
    uint32_t index = NO_BUFFER;
    struct arena *arena = pool_enter();
    uint8_t *place = arena == NULL ? NULL : reserve(arena, &index);
    if (place != NULL) {
        memcpy(place, record, sizeof *record);
        __atomic_fetch_add(&records.written[index], (uint32_t)sizeof *record, __ATOMIC_RELEASE);
    } else {
        __atomic_fetch_add(&records.dropped, 1, __ATOMIC_RELAXED);
    }
    pool_leave();
}

void records_enter(uint32_t domain, uint32_t cbid, const struct cupti_call *call) {
    const uint64_t recording = __atomic_load_n(&records.recording, __ATOMIC_ACQUIRE);
    const bool inside = open_call.recording == recording && open_call.domain == CUPTI_DOMAIN_RUNTIME_API;
    if (recording == 0 || (inside && domain == CUPTI_DOMAIN_DRIVER_API)) {
        return;
    }
    open_call.recording = recording;
    open_call.domain = domain;
    open_call.cbid = cbid;
    open_call.correlation = call->correlation;
    open_call.start = (uint64_t)clock_ns(CLOCK_REALTIME);
}

void records_exit(uint32_t domain, uint32_t cbid, const struct cupti_call *call) {
    const uint64_t recording = __atomic_load_n(&records.recording, __ATOMIC_ACQUIRE);
    if (recording == 0 || open_call.recording != recording || open_call.domain != domain || open_call.cbid != cbid ||
        open_call.correlation != call->correlation) {
        return;
    }
    open_call.recording = 0;
    if (open_call.thread == 0) {
        open_call.thread = (uint32_t)syscall(SYS_gettid);
    }
    struct call_record record = {.kind = domain == CUPTI_DOMAIN_RUNTIME_API ? CUPTI_KIND_RUNTIME : CUPTI_KIND_DRIVER,
                                 .cbid = cbid,
                                 .start = open_call.start,
                                 .end = (uint64_t)clock_ns(CLOCK_REALTIME),
                                 .process = records.process,
                                 .thread = open_call.thread,
                                 .correlation = call->correlation};
    if (call->result != NULL) {
        memcpy(&record.result, call->result, sizeof record.result); /* cudaError_t and CUresult are of one size */
    }
    add(&record);
}

void records_seal(void) {
    uint64_t cursor = __atomic_load_n(&records.cursor, __ATOMIC_ACQUIRE);
    while (CURSOR_INDEX(cursor) != NO_BUFFER) {
        if (__atomic_compare_exchange_n(&records.cursor, &cursor, CURSOR(NO_BUFFER, 0), false, __ATOMIC_ACQ_REL,
                                        __ATOMIC_ACQUIRE)) {
            __atomic_store_n(&records.sealed[CURSOR_INDEX(cursor)], CURSOR_TAKEN(cursor), __ATOMIC_RELEASE);
            return;
        }
    }
}

bool records_collect(struct arena *arena) {
    bool waiting = false;
    for (uint32_t i = 0; i < arena->fixed.buffer_count; i++) {
        const uint32_t taken = __atomic_load_n(&records.sealed[i], __ATOMIC_ACQUIRE);
        if (taken == 0) {
            continue;
        }
        if (__atomic_load_n(&records.written[i], __ATOMIC_ACQUIRE) != taken) {
            waiting = true;
            continue;
        }
        __atomic_store_n(&records.written[i], 0, __ATOMIC_RELAXED);
        __atomic_store_n(&records.sealed[i], 0, __ATOMIC_RELAXED);
        __atomic_store_n(arena_buffer_word(arena, i, ARENA_BUFFER_VALID_BYTES), taken, __ATOMIC_RELAXED);
        arena_set_state(arena, i, ARENA_COMPLETED);
    }
    arena_add(arena, ARENA_DROPPED, __atomic_exchange_n(&records.dropped, 0, __ATOMIC_RELAXED));
    return waiting;
}
