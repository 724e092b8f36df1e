/* The ring of samples. Its writer runs in the thread of one GPU in kinetod-counters, its reader in the daemon's thread
 * that stores counters. Only kn_ring_wait blocks, for the time that it is given. */
#define _GNU_SOURCE
#include "sample_ring.h"

#include <errno.h>
#include <linux/futex.h>
#include <limits.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define TIMES_BYTES 16u
#define ROWS_MOST (1u << 26)

_Static_assert(sizeof(kn_ring) <= KN_RING_HEADER_BYTES, "the header has its page");

uint64_t kn_ring_row_bytes(uint32_t metrics) {
    return (TIMES_BYTES + (uint64_t)metrics * sizeof(float) + 7u) & ~(uint64_t)7;
}

uint64_t kn_ring_make(void *memory, uint64_t bytes, uint32_t metrics, uint64_t most_ns, kn_writer *writer) {
    uint64_t row_bytes = kn_ring_row_bytes(metrics);
    if (metrics == 0 || metrics > KN_METRICS_MOST || bytes < KN_RING_HEADER_BYTES + row_bytes) {
        return 0;
    }
    kn_ring *ring = memory;
    *writer = (kn_writer){
        .ring = ring,
        .capacity = (bytes - KN_RING_HEADER_BYTES) / row_bytes,
        .row_bytes = row_bytes,
        .most_ns = most_ns,
        .metrics = metrics,
    };
    ring->abi_version = KN_ABI_VERSION;
    ring->metrics = metrics;
    ring->row_bytes = (uint32_t)row_bytes;
    ring->capacity = writer->capacity;
    ring->magic = KN_RING_MAGIC;
    return writer->capacity;
}

int kn_ring_put(kn_writer *writer, int64_t start_ns, int64_t end_ns, const float *values) {
    kn_ring *ring = writer->ring;
    uint64_t read = atomic_load_explicit(&ring->read, memory_order_acquire);
    if (read > writer->written || writer->written - read >= writer->capacity) {
        atomic_fetch_add_explicit(&ring->dropped, 1, memory_order_relaxed);
        return -1;
    }
    uint8_t *row = (uint8_t *)ring + KN_RING_HEADER_BYTES + writer->written % writer->capacity * writer->row_bytes;
    memcpy(row, &start_ns, sizeof start_ns);
    memcpy(row + sizeof start_ns, &end_ns, sizeof end_ns);
    memcpy(row + TIMES_BYTES, values, writer->metrics * sizeof *values);
    writer->written += 1;
    atomic_store_explicit(&ring->written, writer->written, memory_order_release);
    return 0;
}

void kn_ring_end(kn_writer *writer, int32_t end, const kn_failure *failure) {
    kn_ring *ring = writer->ring;
    ring->end = end;
    if (failure != NULL) {
        ring->failure = *failure;
    }
    uint32_t state = end == KN_ERROR ? KN_FAILED : KN_ENDED;
    atomic_store_explicit(&ring->state, state, memory_order_release);
}

void kn_ring_note_gap(kn_writer *writer, uint64_t lost_ns) {
    atomic_fetch_add_explicit(&writer->ring->gaps, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&writer->ring->lost_ns, lost_ns, memory_order_relaxed);
}

void kn_ring_note_full(kn_writer *writer) {
    atomic_fetch_add_explicit(&writer->ring->full_stops, 1, memory_order_relaxed);
}

int kn_ring_wait(kn_writer *writer, uint64_t ns) {
    kn_ring *ring = writer->ring;
    struct timespec time = {.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
    if (atomic_load_explicit(&ring->stop, memory_order_acquire) == 0) {
        syscall(SYS_futex, &ring->stop, FUTEX_WAIT, 0, &time, NULL, 0);
    }
    return atomic_load_explicit(&ring->stop, memory_order_acquire) != 0;
}

void kn_ring_stop(void *memory) {
    kn_ring *ring = memory;
    atomic_store_explicit(&ring->stop, 1, memory_order_release);
    syscall(SYS_futex, &ring->stop, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Rows that lie in `bytes` of such a ring; 0 if it is none. */
static uint64_t believed(const kn_ring *ring, uint64_t bytes, uint32_t metrics) {
    uint64_t row_bytes = kn_ring_row_bytes(metrics);
    if (metrics == 0 || metrics > KN_METRICS_MOST || bytes < KN_RING_HEADER_BYTES + row_bytes) {
        return 0;
    }
    uint64_t rows = (bytes - KN_RING_HEADER_BYTES) / row_bytes;
    int fits = ring->magic == KN_RING_MAGIC && ring->abi_version == KN_ABI_VERSION && ring->metrics == metrics &&
               ring->row_bytes == row_bytes && ring->capacity == rows;
    return fits && rows <= ROWS_MOST ? rows : 0;
}

int64_t kn_ring_take(void *memory, uint64_t bytes, uint32_t metrics, uint64_t *taken, void *rows, uint64_t rows_most) {
    kn_ring *ring = memory;
    uint64_t capacity = believed(ring, bytes, metrics), row_bytes = kn_ring_row_bytes(metrics);
    if (capacity == 0) {
        return -1;
    }
    uint64_t written = atomic_load_explicit(&ring->written, memory_order_acquire);
    if (written < *taken || written - *taken > capacity) {
        return -1;
    }
    uint64_t count = written - *taken < rows_most ? written - *taken : rows_most;
    const uint8_t *from = (const uint8_t *)memory + KN_RING_HEADER_BYTES;
    uint64_t first = *taken % capacity, before_end = capacity - first < count ? capacity - first : count;
    memcpy(rows, from + first * row_bytes, before_end * row_bytes);
    memcpy((uint8_t *)rows + before_end * row_bytes, from, (count - before_end) * row_bytes);
    *taken += count;
    atomic_store_explicit(&ring->read, *taken, memory_order_release);
    return (int64_t)count;
}

int kn_ring_status_of(const void *memory, uint64_t bytes, uint32_t metrics, kn_ring_status *status) {
    const kn_ring *ring = memory;
    memset(status, 0, sizeof *status);
    if (believed(ring, bytes, metrics) == 0) {
        return -1;
    }
    status->state = atomic_load_explicit(&ring->state, memory_order_acquire);
    status->written = atomic_load_explicit(&ring->written, memory_order_acquire);
    status->taken = atomic_load_explicit(&ring->read, memory_order_relaxed);
    status->dropped = atomic_load_explicit(&ring->dropped, memory_order_relaxed);
    status->gaps = atomic_load_explicit(&ring->gaps, memory_order_relaxed);
    status->lost_ns = atomic_load_explicit(&ring->lost_ns, memory_order_relaxed);
    status->full_stops = atomic_load_explicit(&ring->full_stops, memory_order_relaxed);
    status->overflows = atomic_load_explicit(&ring->overflows, memory_order_relaxed);
    status->disordered = atomic_load_explicit(&ring->disordered, memory_order_relaxed);
    status->decodings = atomic_load_explicit(&ring->decodings, memory_order_relaxed);
    if (status->state != KN_SAMPLING) {
        status->end = ring->end;
        status->failure = ring->failure;
        status->failure.call[sizeof status->failure.call - 1] = '\0';
        status->failure.text[sizeof status->failure.text - 1] = '\0';
    }
    return 0;
}
