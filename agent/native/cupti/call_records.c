/* Recording CUDA calls from a subscriber's callbacks.
 *
 * Theory of operation
 *   CUPTI can record calls itself (activity kinds RUNTIME and DRIVER), but once a kind is enabled every call of that
 *   API becomes slower, and a launch-bound job makes nine uninteresting calls for each launch: on an H200 its step took
 *   1.24 times as long with RUNTIME, 1.43 times with DRIVER as well, 1.14 times with neither. Callbacks for the chosen
 *   calls alone cost nothing measurable on top (1.14). So they write the records, in CUPTI's own layout
 *   (CUpti_ActivityAPI, unchanged since CUDA 10), and later stages notice no difference.
 *
 *   A record is written when its call ends. The thread remembers the start: one call at a time, since a driver call
 *   inside a runtime call is the runtime's own and not recorded (it has the same correlation id).
 *
 *   The records go into the collector's stream (kit/record_stream.c), as they are: CUPTI's have no headers.
 *
 * Threads: records_enter and records_exit run on every thread of the program that makes a CUDA call, inside the call;
 *   records_close also on the collector's thread; the rest on the agent's.
 * Blocks: never: no lock, no allocation, one futex wake when a buffer is full.
 */
#define _GNU_SOURCE
#include "cupti/call_records.h"

#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "cupti/cupti_vendor.h"
#include "kit/record_stream.h"

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
    uint32_t process;
} records;

static _Thread_local struct {
    uint64_t recording;
    uint64_t start;
    uint32_t domain;
    uint32_t cbid;
    uint32_t correlation;
    uint32_t thread; /* the system's thread id, once looked up */
} open_call;

void records_open(void) {
    records.process = (uint32_t)getpid();
    __atomic_store_n(&records.recording, ++records.recordings, __ATOMIC_RELEASE);
}

void records_close(void) { __atomic_store_n(&records.recording, 0, __ATOMIC_RELEASE); }

static void add(const struct call_record *record) {
    const uint32_t bytes = sizeof *record;
    uint32_t index = STREAM_NO_BUFFER;
    struct pool *pool = &cupti_collector.pool;
    struct stream *stream = &cupti_collector.stream;
    struct arena *arena = pool_enter(pool);
    uint8_t *place = arena == NULL ? NULL : stream_reserve(stream, pool, arena, bytes, &index);
    if (place != NULL) {
        memcpy(place, record, bytes);
        stream_commit(stream, index, bytes);
    } else {
        stream_drop(stream, 1);
    }
    pool_leave(pool);
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
        memcpy(&record.result, call->result, sizeof record.result); /* cudaError_t and CUresult have the same size */
    }
    add(&record);
}
