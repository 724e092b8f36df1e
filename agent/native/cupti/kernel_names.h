/* The set of kernel-name pointers whose text is already in the string table. */
#ifndef KINETO_NAMES_H
#define KINETO_NAMES_H

#include <stdbool.h>
#include <stdint.h>

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
