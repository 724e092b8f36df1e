/* Definitions shared by the library's public interfaces: collector.h, stack_sampler.h, call_tracer.h, observer.h,
 * kineto_gate.h, begin_turns.h. Every exported name begins with kc_.
 *
 * The first comment of every C file says which threads run it, and where it blocks: waits for another thread, for a
 * lock or for time. A system call that waits for none of these does not count. "The agent's thread" is the one that
 * calls the exported functions, without the GIL unless the file says otherwise.
 */
#ifndef KINETO_EXPORT_H
#define KINETO_EXPORT_H

#include <stdint.h>

#define KC_EXPORT __attribute__((visibility("default")))

/* What exported functions return when they fail. -3 is specific to an interface, see there. */
enum kc_error {
    KC_LIBRARY = -1, /* a library or an interpreter is not loaded, lacks a function, or is laid out in an unknown way */
    KC_SYSTEM = -2,  /* memory, thread or descriptor refused by the system */
    KC_ORDER = -4,   /* called out of order */
    KC_FORKED = -5,  /* this is a forked child */
};

struct kc_counts {
    uint64_t records; /* in READY buffers, cumulative */
    uint64_t bytes;
    uint64_t dropped;
};

#endif
