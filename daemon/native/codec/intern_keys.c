/* Interning of 64-bit keys: an open-addressing hash table that grows by doubling. See codec.h.
 *
 * Threads: the caller's, without the GIL; an interner belongs to one thread at a time.
 * Blocks: never; it allocates.
 */
#include <stdlib.h>
#include <string.h>

#include "codec/codec.h"

#define FIRST_SLOTS 1024u
#define MAX_KEYS (UINT32_MAX - 1)

struct kc_interner {
    uint64_t *slot_keys;    /* by hash */
    uint32_t *slot_numbers; /* number + 1; 0: free */
    uint64_t slots;         /* a power of two, at most half full */
    uint64_t *keys;         /* by number */
    uint64_t count;
    uint64_t last_key;
    uint32_t last_number; /* number + 1 of last_key; 0: none yet */
};

uint32_t kc_abi_version(void) { return KC_ABI_VERSION; }

static uint64_t slot_of(uint64_t key, uint64_t slots) {
    key ^= key >> 29;
    key *= 0x9E3779B97F4A7C15ull;
    key ^= key >> 32;
    return key & (slots - 1);
}

kc_interner *kc_interner_new(void) {
    kc_interner *t = calloc(1, sizeof *t);
    if (!t) {
        return NULL;
    }
    t->slots = FIRST_SLOTS;
    t->slot_keys = malloc(FIRST_SLOTS * sizeof *t->slot_keys);
    t->slot_numbers = calloc(FIRST_SLOTS, sizeof *t->slot_numbers);
    t->keys = malloc(FIRST_SLOTS / 2 * sizeof *t->keys);
    if (!t->slot_keys || !t->slot_numbers || !t->keys) {
        kc_interner_free(t);
        return NULL;
    }
    return t;
}

void kc_interner_free(kc_interner *t) {
    if (!t) {
        return;
    }
    free(t->slot_keys);
    free(t->slot_numbers);
    free(t->keys);
    free(t);
}

uint64_t kc_interner_count(const kc_interner *t) { return t->count; }

void kc_interner_keys(const kc_interner *t, uint64_t *keys) {
    if (t->count) {
        memcpy(keys, t->keys, t->count * sizeof *keys);
    }
}

static int grow(kc_interner *t) {
    uint64_t slots = t->slots * 2;
    uint64_t *slot_keys = malloc(slots * sizeof *slot_keys);
    uint32_t *slot_numbers = calloc(slots, sizeof *slot_numbers);
    uint64_t *keys = realloc(t->keys, slots / 2 * sizeof *keys);
    if (keys) {
        t->keys = keys;
    }
    if (!slot_keys || !slot_numbers || !keys) {
        free(slot_keys);
        free(slot_numbers);
        return -1;
    }
    for (uint64_t n = 0; n < t->count; n++) {
        uint64_t s = slot_of(keys[n], slots);
        while (slot_numbers[s]) {
            s = (s + 1) & (slots - 1);
        }
        slot_keys[s] = keys[n];
        slot_numbers[s] = (uint32_t)n + 1;
    }
    free(t->slot_keys);
    free(t->slot_numbers);
    t->slot_keys = slot_keys;
    t->slot_numbers = slot_numbers;
    t->slots = slots;
    return 0;
}

uint32_t kc_intern_one(kc_interner *t, uint64_t key) {
    if (t->last_number && t->last_key == key) {
        return t->last_number - 1;
    }
    uint64_t s = slot_of(key, t->slots);
    while (t->slot_numbers[s] && t->slot_keys[s] != key) {
        s = (s + 1) & (t->slots - 1);
    }
    if (!t->slot_numbers[s]) {
        if (t->count >= MAX_KEYS) {
            return UINT32_MAX;
        }
        if (t->count >= t->slots / 2) {
            if (grow(t)) {
                return UINT32_MAX;
            }
            s = slot_of(key, t->slots);
            while (t->slot_numbers[s]) {
                s = (s + 1) & (t->slots - 1);
            }
        }
        t->slot_keys[s] = key;
        t->keys[t->count++] = key;
        t->slot_numbers[s] = (uint32_t)t->count;
    }
    t->last_key = key;
    t->last_number = t->slot_numbers[s];
    return t->last_number - 1;
}

int kc_intern(kc_interner *t, const uint64_t *keys, uint64_t count, uint32_t *numbers) {
    for (uint64_t i = 0; i < count; i++) {
        numbers[i] = kc_intern_one(t, keys[i]);
        if (numbers[i] == UINT32_MAX) {
            return -1;
        }
    }
    return 0;
}
