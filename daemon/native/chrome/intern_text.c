/* Text that grows, and interning of texts: an open-addressing hash table with exact comparison. See chrome.h.
 *
 * Threads: the caller's, without the GIL; a text or a table belongs to one thread at a time.
 * Blocks: never; it allocates.
 */
#include <stdlib.h>
#include <string.h>

#include "chrome/chrome.h"

int kc_text_reserve(kc_text *t, uint64_t more) {
    if (t->capacity - t->size >= more) {
        return 0;
    }
    uint64_t capacity = t->capacity ? t->capacity * 2 : 4096;
    while (capacity - t->size < more) {
        capacity *= 2;
    }
    char *data = realloc(t->data, capacity);
    if (!data) {
        return -1;
    }
    t->data = data;
    t->capacity = capacity;
    return 0;
}

int kc_text_append(kc_text *t, const char *bytes, uint64_t size) {
    if (kc_text_reserve(t, size)) {
        return -1;
    }
    if (size) {
        memcpy(t->data + t->size, bytes, size);
    }
    t->size += size;
    return 0;
}

static uint32_t hash_of(const char *p, uint64_t size) {
    uint64_t hash = size * 0x9E3779B97F4A7C15ull, word;
    for (; size >= 8; p += 8, size -= 8) {
        memcpy(&word, p, 8);
        hash = (hash ^ word) * 0xFF51AFD7ED558CCDull;
        hash ^= hash >> 32;
    }
    if (size) {
        word = 0;
        memcpy(&word, p, size);
        hash = (hash ^ word) * 0xFF51AFD7ED558CCDull;
        hash ^= hash >> 32;
    }
    hash *= 0xC4CEB9FE1A85EC53ull;
    return (uint32_t)(hash >> 32);
}

static int grow(kc_strings *t) {
    uint64_t capacity = t->capacity ? t->capacity * 2 : 1024, slots = capacity * 2;
    if (kc_text_reserve(&t->bytes, 1)) { /* so that an empty text has a place, too */
        return -1;
    }
    uint64_t *ends = realloc(t->ends, (capacity + 1) * sizeof *ends);
    if (ends) {
        t->ends = ends;
    }
    uint32_t *hashes = realloc(t->hashes, capacity * sizeof *hashes);
    if (hashes) {
        t->hashes = hashes;
    }
    uint8_t *marks = realloc(t->marks, capacity);
    if (marks) {
        t->marks = marks;
    }
    uint32_t *table = calloc(slots, sizeof *table);
    if (!ends || !hashes || !marks || !table) {
        free(table);
        return -1;
    }
    t->ends[0] = 0;
    memset(marks + t->capacity, 0, capacity - t->capacity);
    for (uint64_t n = 0; n < t->count; n++) {
        uint64_t slot = hashes[n] & (slots - 1);
        while (table[slot]) {
            slot = (slot + 1) & (slots - 1);
        }
        table[slot] = (uint32_t)n + 1;
    }
    free(t->slots);
    t->slots = table;
    t->slot_count = slots;
    t->capacity = capacity;
    return 0;
}

int64_t kc_strings_add(kc_strings *t, const char *bytes, uint64_t size) {
    if (t->count == t->capacity && (t->count >= INT32_MAX || grow(t))) {
        return -1;
    }
    uint32_t hash = hash_of(bytes, size);
    uint64_t slot = hash & (t->slot_count - 1);
    for (; t->slots[slot]; slot = (slot + 1) & (t->slot_count - 1)) {
        uint32_t n = t->slots[slot] - 1;
        if (t->hashes[n] == hash && t->ends[n + 1] - t->ends[n] == size &&
            !memcmp(t->bytes.data + t->ends[n], bytes, size)) {
            return n;
        }
    }
    if (kc_text_append(&t->bytes, bytes, size)) {
        return -1;
    }
    t->hashes[t->count] = hash;
    t->ends[t->count + 1] = t->bytes.size;
    t->slots[slot] = (uint32_t)++t->count;
    return (int64_t)t->count - 1;
}

void kc_strings_free(kc_strings *t) {
    free(t->bytes.data);
    free(t->ends);
    free(t->hashes);
    free(t->marks);
    free(t->slots);
}
