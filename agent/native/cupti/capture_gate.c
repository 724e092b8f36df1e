/* See capture_gate.h.
 *
 * Theory of operation
 *   Some calls of CUDA, made on any thread, end every capture in the context. Nothing lists the streams of a program,
 *   so our interposed functions (driver_slots.h) note captures as they begin and end.
 *
 *   A capture is noted by its stream, so that an end which fails, or belongs to a capture that began before the gate
 *   was placed, is not counted. A stream that is destroyed while it is captured stays noted: from then on no moment is
 *   free of captures.
 *
 *   A thread that begins a capture reads `held` after it has announced itself; the thread that wants a moment reads
 *   `beginning` after it has set `held`. One of the two sees the other, and steps back. `recording` works the same way,
 *   for a moment that lasts longer than WAIT_LIMIT_NS because our thread does not get to run.
 *
 * Threads: the interposed functions run on the thread that begins or ends a capture; the rest on ours.
 * Blocks: a thread that begins a capture waits while a moment is held: microseconds, WAIT_LIMIT_NS at most, and
 *   RECORDING_LIMIT_NS more if our thread is stuck in the driver or has lost its CPU there.
 */
#define _GNU_SOURCE
#include "cupti/capture_gate.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <time.h>

#include "common/wake.h"
#include "cupti/driver_slots.h"

#define WAIT_LIMIT_NS 20000000LL
#define RECORDING_LIMIT_NS 200000000LL /* in addition: going on would end the capture */
#define CAPTURES_MOST 64u
#define PER_THREAD_STREAM 2u /* CU_STREAM_PER_THREAD, which 0 stands for in the functions of per-thread streams */
enum { STILL_CAPTURED = 908 /* CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD */ };

/* The stream, then the further arguments of cuStreamBeginCaptureToGraph: all are in registers, so a shorter call may
 * leave them out. */
typedef int (*capture_call)(uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t);

enum gated {
    BEGIN,
    BEGIN_PER_THREAD,
    BEGIN_V2,
    BEGIN_V2_PER_THREAD,
    BEGIN_TO_GRAPH,
    BEGIN_TO_GRAPH_PER_THREAD,
    END,
    END_PER_THREAD,
    GATED
};

static const struct {
    const char *name;
    bool needed;
} FUNCTIONS[GATED] = {
    [BEGIN] = {"cuStreamBeginCapture", false},
    [BEGIN_PER_THREAD] = {"cuStreamBeginCapture_ptsz", false},
    [BEGIN_V2] = {"cuStreamBeginCapture_v2", true},
    [BEGIN_V2_PER_THREAD] = {"cuStreamBeginCapture_v2_ptsz", true},
    [BEGIN_TO_GRAPH] = {"cuStreamBeginCaptureToGraph", false}, /* CUDA 12.3 */
    [BEGIN_TO_GRAPH_PER_THREAD] = {"cuStreamBeginCaptureToGraph_ptsz", false},
    [END] = {"cuStreamEndCapture", true},
    [END_PER_THREAD] = {"cuStreamEndCapture_ptsz", true},
};

static struct {
    struct in_between between[GATED];
    _Atomic uintptr_t streams[CAPTURES_MOST]; /* being captured; 0: none */
    _Atomic bool overflowed;
    _Atomic uint32_t beginning; /* threads inside a call that begins a capture */
    _Atomic uint32_t held;
    _Atomic uint32_t recording; /* within `held`: the call that ends captures is in progress */
    struct wake released;
} gate;

/* ---- interposed functions ---- */

static void note(uintptr_t stream) {
    for (uint32_t i = 0; i < CAPTURES_MOST; i++) {
        uintptr_t none = 0;
        if (atomic_compare_exchange_strong(&gate.streams[i], &none, stream)) {
            return;
        }
    }
    atomic_store(&gate.overflowed, true);
}

static void forget(uintptr_t stream) {
    for (uint32_t i = 0; i < CAPTURES_MOST; i++) {
        uintptr_t seen = stream;
        if (atomic_compare_exchange_strong(&gate.streams[i], &seen, 0)) {
            return;
        }
    }
}

/* Announces a capture while `word` is 0: waits for that, and checks again, since another moment may have begun. */
static bool begins_without(const _Atomic uint32_t *word, int64_t limit_ns) {
    int64_t deadline = 0;
    for (bool waits = true; waits;) {
        atomic_fetch_add(&gate.beginning, 1);
        if (atomic_load(word) == 0) {
            return true;
        }
        atomic_fetch_sub(&gate.beginning, 1);
        const int64_t now = clock_ns(CLOCK_MONOTONIC);
        deadline = deadline == 0 ? now + limit_ns : deadline;
        waits = wake_await(&gate.released, (const uint32_t *)word, 0, deadline - now);
    }
    return false;
}

static void announce(void) {
    if (!begins_without(&gate.held, WAIT_LIMIT_NS) && !begins_without(&gate.recording, RECORDING_LIMIT_NS)) {
        atomic_fetch_add(&gate.beginning, 1);
    }
}

static uintptr_t handle(enum gated which, uintptr_t stream) {
    const bool per_thread = which == BEGIN_PER_THREAD || which == BEGIN_V2_PER_THREAD ||
                            which == BEGIN_TO_GRAPH_PER_THREAD || which == END_PER_THREAD;
    return per_thread && stream == 0 ? PER_THREAD_STREAM : stream;
}

static int through(enum gated which, uintptr_t stream, uintptr_t b, uintptr_t c, uintptr_t d, uintptr_t e,
                   uintptr_t f) {
    capture_call original;
    *(void **)&original = in_between_original(&gate.between[which]);
    if (which == END || which == END_PER_THREAD) {
        const int result = original(stream, b, c, d, e, f);
        if (result != STILL_CAPTURED) {
            forget(handle(which, stream));
        }
        return result;
    }
    announce();
    const int result = original(stream, b, c, d, e, f);
    if (result == 0) {
        note(handle(which, stream));
    }
    atomic_fetch_sub(&gate.beginning, 1);
    return result;
}

#define IN_BETWEEN(which)                                                                                              \
    static int in_##which(uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d, uintptr_t e, uintptr_t f) { /* NOLINT */ \
        return through(which, a, b, c, d, e, f);                                                                       \
    }
IN_BETWEEN(BEGIN)
IN_BETWEEN(BEGIN_PER_THREAD)
IN_BETWEEN(BEGIN_V2)
IN_BETWEEN(BEGIN_V2_PER_THREAD)
IN_BETWEEN(BEGIN_TO_GRAPH)
IN_BETWEEN(BEGIN_TO_GRAPH_PER_THREAD)
IN_BETWEEN(END)
IN_BETWEEN(END_PER_THREAD)

static const capture_call OURS[GATED] = {
    in_BEGIN,          in_BEGIN_PER_THREAD,          in_BEGIN_V2, in_BEGIN_V2_PER_THREAD,
    in_BEGIN_TO_GRAPH, in_BEGIN_TO_GRAPH_PER_THREAD, in_END,      in_END_PER_THREAD};

/* ---- placing ---- */

static void *ours(uint32_t i) { return *(void *const *)&OURS[i]; }

static bool find_slots(void *cuda) {
    for (uint32_t i = 0; i < GATED; i++) {
        uint8_t *function = dlsym(cuda, FUNCTIONS[i].name);
        void **slot = driver_slot(function);
        gate.between[i].slot = slot;
        for (uint32_t j = 0; j < i; j++) {
            if (slot != NULL && slot == gate.between[j].slot) {
                gate.between[i].slot = NULL; /* both lead to one implementation, which already has its gate */
                function = NULL;
                break;
            }
        }
        if (gate.between[i].slot == NULL && (function != NULL || FUNCTIONS[i].needed)) {
            return false;
        }
    }
    return true;
}

bool capture_gate_place(void *cuda) {
    if (!find_slots(cuda)) {
        return false;
    }
    for (uint32_t i = 0; i < GATED; i++) {
        if (gate.between[i].slot != NULL && !in_between_may(&gate.between[i], ours(i))) {
            return false;
        }
    }
    for (uint32_t i = 0; i < CAPTURES_MOST; i++) {
        atomic_store(&gate.streams[i], 0);
    }
    atomic_store(&gate.overflowed, false);
    for (uint32_t i = GATED; i-- > 0;) { /* ends first: a capture may be noted only if its end will be */
        if (gate.between[i].slot != NULL) {
            in_between_place(&gate.between[i], ours(i));
        }
    }
    return true;
}

void capture_gate_remove(void) {
    for (uint32_t i = 0; i < GATED; i++) {
        in_between_remove(&gate.between[i], ours(i));
    }
}

/* ---- moments ---- */

static bool captured(void) {
    for (uint32_t i = 0; i < CAPTURES_MOST; i++) {
        if (atomic_load(&gate.streams[i]) != 0) {
            return true;
        }
    }
    return atomic_load(&gate.overflowed);
}

void capture_gate_leave(void) {
    atomic_store(&gate.recording, 0);
    atomic_store(&gate.held, 0);
    wake_post(&gate.released);
}

static bool is_free(void) { return atomic_load(&gate.beginning) == 0 && !captured(); }

bool capture_gate_recording(void) {
    atomic_store(&gate.recording, 1);
    return is_free();
}

bool capture_gate_enter(void) {
    atomic_store(&gate.held, 1);
    if (is_free()) {
        return true;
    }
    capture_gate_leave();
    return false;
}
