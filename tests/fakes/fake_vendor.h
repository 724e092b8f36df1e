/* The controls of the fake vendor: what a test programs and what a "program" calls. See fake_vendor.c. */
#ifndef FAKE_VENDOR_H
#define FAKE_VENDOR_H

#include <stdint.h>

#define FAKE_KERNEL 1u /* a record with a name */
#define FAKE_CALL 6u   /* one without */
#define FAKE_REFUSED 7 /* the library's result for a kind that it does not want to record */
#define FAKE_NAME_SPACE 16u

struct fake_kernel { /* 64 bytes; in lent buffers as it is */
    uint32_t kind;
    uint32_t stream;
    uint64_t name; /* lent: an address; pushed: the number of the name */
    uint64_t start;
    uint64_t end;
    uint64_t number; /* of the launch in its stream, from 0 */
    uint64_t reserved[3];
};

struct fake_call { /* 40 bytes */
    uint32_t kind;
    uint32_t stream;
    uint64_t start;
    uint64_t end;
    uint64_t number;
    uint64_t reserved;
};

/* Programmable: refuse_kind, start_fails, open_fails, when_full (of kit_when_full), by_text, hold_a_buffer,
 * unreadable_names, one_wide_kernel, flush_delay_ms, problem, version, bad_name (a kit_name that is not allowed),
 * next_dropped (what take_dropped gives). -1 for an unknown key. */
int fake_vendor_set(const char *key, long value);

/* `count` kernels of one name on a stream below 64, with a call record each. One thread for each stream. */
void fake_vendor_launch(const char *name, uint32_t count, uint32_t stream);

uint64_t fake_vendor_written(void);  /* records made since the library was loaded, while they were wanted */
uint64_t fake_vendor_refused(void);  /* times that no buffer was given */
uint64_t fake_vendor_misused(void);  /* calls in the wrong order, on the wrong side of a fork */
uint64_t fake_vendor_releases(void); /* how often the recording was released */

#endif
