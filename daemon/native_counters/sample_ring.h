/* A ring of samples in memory that two processes share: one writes, one reads, neither waits for the other.
 *
 * The file is sealed against another size by whoever makes it, so that reading it cannot fail. Each side distrusts the
 * other: the writer goes by its own kn_writer and reads only `read` and `stop`, the reader checks the header against the
 * size that it has mapped.
 * Called through ctypes by kinetod.counters.sample_rings, in both processes.
 */
#ifndef KINETO_SAMPLE_RING_H
#define KINETO_SAMPLE_RING_H

#include <stdatomic.h>
#include <stdint.h>

#include "counters.h"

#define KN_RING_MAGIC 0x474e524bu /* "KRNG" */
#define KN_RING_HEADER_BYTES 4096u

enum kn_ring_state { KN_SAMPLING = 0, KN_ENDED = 1, KN_FAILED = 2 };
enum kn_ring_end { KN_NOT_ENDED = 0, KN_STOPPED = 1, KN_TOO_LONG = 2, KN_ERROR = 3 };

typedef struct {
    uint32_t magic;
    uint32_t abi_version;
    uint32_t metrics;
    uint32_t row_bytes;          /* int64 start_ns, int64 end_ns, float values[metrics], and padding to 8 bytes */
    uint64_t capacity;           /* rows */
    _Atomic uint32_t stop;       /* by anybody: end the sampling. A futex */
    _Atomic uint32_t state;      /* enum kn_ring_state: written last */
    _Atomic uint64_t read;       /* by the reader: rows that it has taken */
    _Atomic uint64_t written;    /* rows ever written */
    _Atomic uint64_t dropped;    /* rows for which there was no room */
    _Atomic uint64_t gaps;       /* places where samples are missing */
    _Atomic uint64_t lost_ns;    /* time that they would have covered */
    _Atomic uint64_t full_stops; /* decodings that the image of counters was too small for */
    _Atomic uint64_t overflows;  /* decodings that reported an overflow of the hardware's buffer */
    _Atomic uint64_t disordered; /* samples left out because they begin before the one before ends, or have no length */
    _Atomic uint64_t decodings;
    int32_t end;        /* enum kn_ring_end; valid once state is not KN_SAMPLING */
    kn_failure failure; /* if it is KN_ERROR */
} kn_ring;

/* What the writer goes by. */
typedef struct kn_writer {
    kn_ring *ring;
    uint64_t capacity; /* rows */
    uint64_t row_bytes;
    uint64_t written;
    uint64_t most_ns; /* the longest duration from the start on */
    uint32_t metrics;
} kn_writer;

/* What a reader may believe. */
typedef struct {
    uint32_t state;
    int32_t end;
    uint64_t written, taken, dropped, gaps, lost_ns, full_stops, overflows, disordered, decodings;
    kn_failure failure;
} kn_ring_status;

KN_EXPORT uint64_t kn_ring_row_bytes(uint32_t metrics);
/* Lays a ring out in `bytes` of zeroed memory. Returns its rows; 0 if there is room for none. */
KN_EXPORT uint64_t kn_ring_make(void *memory, uint64_t bytes, uint32_t metrics, uint64_t most_ns, kn_writer *writer);
/* 0, or -1 if there was no room, which is counted. */
KN_EXPORT int kn_ring_put(kn_writer *writer, int64_t start_ns, int64_t end_ns, const float *values);
KN_EXPORT void kn_ring_end(kn_writer *writer, int32_t end, const kn_failure *failure);
KN_EXPORT void kn_ring_note_gap(kn_writer *writer, uint64_t lost_ns);
KN_EXPORT void kn_ring_note_full(kn_writer *writer);
/* Waits for `ns` or until somebody stops the ring. Returns 1 if it is stopped. */
KN_EXPORT int kn_ring_wait(kn_writer *writer, uint64_t ns);

/* By either side. */
KN_EXPORT void kn_ring_stop(void *ring);

/* The reader's: copies at most `rows_most` rows of `metrics` values. `taken` is the reader's own count of rows. Returns
 * the rows copied; -1 if this is no such ring, or what it says makes no sense. */
KN_EXPORT int64_t kn_ring_take(void *ring, uint64_t bytes, uint32_t metrics, uint64_t *taken, void *rows,
                               uint64_t rows_most);
/* -1 as above. */
KN_EXPORT int kn_ring_status_of(const void *ring, uint64_t bytes, uint32_t metrics, kn_ring_status *status);

#endif
