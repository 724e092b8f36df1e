/* The CUPTI side of a program's own Kineto: what torch.profiler does to libcupti while it profiles a GPU.
 *
 * From fake_kineto_begin to fake_kineto_end the library counts as misuse whatever takes something from Kineto: a kind
 * switched on or off by somebody else, other buffer callbacks, cuptiFinalize. At its beginning nobody else may record
 * or have the subscriber: a Kineto that finds that taken gives up GPU activities for good.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "fake_internal.h"

#define BUFFER_BYTES (1u << 20)

int cuptiActivityFlushAll(uint32_t flag);
int cuptiActivityGetNextRecord(uint8_t *buffer, size_t valid, void **record);

static const uint32_t KINETOS[] = {MEMCPY, MEMSET, KERNEL, RUNTIME, DRIVER};
static uint64_t kernels;

static void requested(uint8_t **buffer, size_t *size, size_t *most) {
    *buffer = malloc(BUFFER_BYTES);
    *size = *buffer == NULL ? 0 : BUFFER_BYTES;
    *most = 0;
}

static void completed(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid) {
    (void)context;
    (void)stream;
    (void)size;
    void *record = NULL;
    while (cuptiActivityGetNextRecord(buffer, valid, &record) == 0) {
        uint32_t kind;
        memcpy(&kind, record, sizeof kind);
        (void)__atomic_fetch_add(&kernels, kind == KERNEL, __ATOMIC_SEQ_CST);
    }
    free(buffer);
}

static size_t start_of(uint32_t kind) { /* the end follows it in every record */
    switch (kind) {
    case MEMCPY: return offsetof(struct copy, start);
    case MEMSET: return offsetof(struct fill, start);
    case KERNEL: return offsetof(struct kernel, start);
    case SYNC: return offsetof(struct sync, start);
    case OVERHEAD: return offsetof(struct overhead, start);
    default: return offsetof(struct api, start);
    }
}

void fake_stamp(uint32_t kind, uint8_t *record) {
    struct timespec now;
    uint64_t times[2];
    if (!fake.kinetos_clock) {
        return;
    }
    clock_gettime(CLOCK_MONOTONIC, &now);
    const uint64_t ahead = fake_now_ns() - ((uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec);
    memcpy(times, record + start_of(kind), sizeof times);
    for (int i = 0; i < 2; i++) {
        times[i] -= times[i] == 0 ? 0 : ahead;
    }
    memcpy(record + start_of(kind), times, sizeof times);
}

static bool any_enabled(void) {
    for (uint32_t kind = 0; kind < KINDS; kind++) {
        if (fake.enabled[kind]) {
            return true;
        }
    }
    return false;
}

static void switch_kinds(uint8_t on) {
    for (size_t i = 0; i < sizeof KINETOS / sizeof *KINETOS; i++) {
        fake.enabled[KINETOS[i]] = on;
    }
}

void fake_kineto_begin(void) {
    fake_lock();
    fake.misused += any_enabled() || fake.callback != NULL || fake.current[0].buffer != NULL;
    __atomic_store_n(&kernels, 0, __ATOMIC_SEQ_CST);
    fake.requested = requested;
    fake.completed = completed;
    fake.hooked = true;
    fake.kineto = true;
    fake.kinetos_clock = true;
    fake.had_subscriber = true; /* when it was initialised, before anything was recorded */
    switch_kinds(1);
    fake_unlock();
}

uint64_t fake_kineto_end(void) {
    fake_lock();
    switch_kinds(0);
    fake_unlock();
    (void)cuptiActivityFlushAll(1);
    fake_lock();
    fake.kineto = false;
    fake_unlock();
    return __atomic_load_n(&kernels, __ATOMIC_SEQ_CST);
}

/* ---- the end of the process ---- */

static bool taken_down;

/* The real library takes itself down in the exit handlers of the process: whoever is inside then reads what is no longer
 * there. */
__attribute__((destructor)) static void take_down(void) {
    __atomic_store_n(&taken_down, true, __ATOMIC_SEQ_CST);
    usleep((useconds_t)fake.enable_delay_ms * 3000);
}

void fake_take_time(void) {
    usleep((useconds_t)fake.enable_delay_ms * 1000);
    if (__atomic_load_n(&taken_down, __ATOMIC_SEQ_CST)) {
        abort();
    }
}
