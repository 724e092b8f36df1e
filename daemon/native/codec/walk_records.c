/* Where records begin in a buffer of declared records. See codec.h.
 *
 * Theory of operation
 *     The length of a record is known only from the record itself, so that finding the next one is a loop that no array
 *     operation replaces. All else is gathered from the places that this loop returns. The first call, without arrays,
 *     counts; the second fills arrays of exactly that length.
 *
 *     Without a length that can be right there is no next record: the walk ends there, and says so.
 *
 * Threads: the caller's, without the GIL; it works on the caller's arrays alone.
 * Blocks: never; it allocates nothing.
 */
#include <string.h>

#include "codec/codec.h"

#define HEAD_BYTES 8   /* u32 kind, u32 bytes to the next head */
#define SIZED_LEAST 12 /* u64 bytes, u32 kind */
#define SMALLEST_RECORD 8

static uint32_t load32(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static uint64_t load64(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

/* The record at the head of `left` bytes. */
typedef struct {
    uint64_t begin; /* of what the vendor wrote, from the head on */
    uint64_t bytes;
    uint64_t next; /* from the head on; 0: there is no next record */
    uint32_t kind;
    uint32_t status; /* KC_OK, or why there is no next one */
} framed;

static const kc_size *size_of(const kc_size *sizes, uint32_t count, uint32_t kind) {
    uint32_t low = 0, high = count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (sizes[middle].kind < kind) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < count && sizes[low].kind == kind ? sizes + low : NULL;
}

static framed by_kind(const uint8_t *at, uint64_t left, const kc_size **known, const kc_size *sizes, uint32_t count) {
    framed found = {0, 0, 0, 0, KC_TORN};
    if (left < sizeof(uint32_t)) {
        return found;
    }
    found.kind = load32(at);
    if (!*known || (*known)->kind != found.kind) { /* most records are of the kind of the one before */
        *known = size_of(sizes, count, found.kind);
    }
    if (!*known || (*known)->record_bytes < SMALLEST_RECORD) {
        found.status = KC_UNKNOWN_KIND;
    } else if ((*known)->record_bytes <= left) {
        found.status = KC_OK;
        found.bytes = found.next = (*known)->record_bytes;
    }
    return found;
}

static framed by_head(const uint8_t *at, uint64_t left) {
    framed found = {HEAD_BYTES, 0, 0, 0, KC_TORN};
    if (left < HEAD_BYTES) {
        return found;
    }
    found.kind = load32(at);
    uint32_t bytes = load32(at + 4);
    if (bytes >= HEAD_BYTES && bytes % 8 == 0 && bytes <= left) {
        found.status = KC_OK;
        found.bytes = bytes - HEAD_BYTES;
        found.next = bytes;
    }
    return found;
}

static framed by_size(const uint8_t *at, uint64_t left) {
    framed found = {0, 0, 0, 0, KC_TORN};
    if (left < SIZED_LEAST) {
        return found;
    }
    found.kind = load32(at + 8);
    uint64_t bytes = load64(at);
    if (bytes >= SIZED_LEAST && bytes <= left && bytes <= UINT32_MAX) {
        uint64_t next = (bytes + 7) / 8 * 8;
        found.status = KC_OK;
        found.bytes = bytes;
        found.next = next < left ? next : left;
    }
    return found;
}

void kc_walk(const uint8_t *data, uint64_t size, uint32_t framing, const kc_size *sizes, uint32_t size_count,
             const kc_places *places, kc_decoded *result) {
    const kc_size *known = NULL;
    uint64_t at = 0, records = 0;
    memset(result, 0, sizeof *result);
    while (at < size) {
        const uint8_t *head = data + at;
        uint64_t left = size - at;
        framed found = framing == KC_BY_KIND   ? by_kind(head, left, &known, sizes, size_count)
                       : framing == KC_BY_HEAD ? by_head(head, left)
                                               : by_size(head, left);
        if (found.status != KC_OK) {
            result->status = found.status;
            result->kind = found.kind;
            break;
        }
        if (places) {
            if (records == places->capacity) {
                result->status = KC_FULL;
                break;
            }
            places->begin[records] = at + found.begin;
            places->bytes[records] = (uint32_t)found.bytes;
            places->kind[records] = found.kind;
        }
        records++;
        at += found.next;
    }
    result->consumed = at;
    result->records = records;
    kc_spill_settle();
}
