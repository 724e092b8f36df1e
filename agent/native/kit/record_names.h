/* The texts that are in the string table already, and reading those that records point to. */
#ifndef KINETO_KIT_RECORD_NAMES_H
#define KINETO_KIT_RECORD_NAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define NAMES_READ_MOST 64u   /* texts in one names_read_texts */
#define NAMES_READ_BYTES 256u /* of each of them */

struct names {
    uint64_t *slots; /* 0: empty */
    uint64_t mask;
    uint64_t used;
};

bool names_init(struct names *names);
void names_free(struct names *names);
/* True if `key` (never 0) was not there; it is now. An exhausted set answers true without keeping the key. */
bool names_insert(struct names *names, uint64_t key);
/* Copies the NUL-terminated text at `address` of this process, which need not be readable. Returns its length
 * without the NUL (at most `size`), or -1. */
int64_t names_read_text(uint64_t address, char *text, uint32_t size);
/* Copies the beginnings of `count` texts, NAMES_READ_MOST at most, with one system call. lengths[i]: as
 * names_read_text; -1 also where a text is longer or reaches into the next page: to be read by itself. */
void names_read_texts(const uint64_t *addresses, uint32_t count, char (*texts)[NAMES_READ_BYTES], int32_t *lengths);

/* The number under which a key of a string space stands in the set; keys are addresses, small numbers or hashes. */
static inline uint64_t names_key(uint32_t space, uint64_t key) {
    const uint64_t mixed = key ^ ((uint64_t)space << 56);
    return mixed == 0 ? 1 : mixed;
}

static inline uint64_t names_slot(const struct names *names, uint64_t key) {
    return (key * 0x9E3779B97F4A7C15u >> 20) & names->mask;
}

/* True if the text of `key` was seen before. */
static inline bool names_known(const struct names *names, uint64_t key) {
    for (uint64_t slot = names_slot(names, key);; slot = (slot + 1) & names->mask) {
        if (names->slots[slot] == key) {
            return true;
        }
        if (names->slots[slot] == 0) {
            return false;
        }
    }
}

#endif
