/* The set of texts that are in the string table, and reading texts that records point to. */
#ifndef KINETO_KIT_RECORD_NAMES_H
#define KINETO_KIT_RECORD_NAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define NAMES_PAGES 16u
#define NAMES_PAGE_BYTES 4096u

struct names {
    uint64_t *slots; /* 0: empty */
    uint64_t mask;
    uint64_t used;
};

/* Copies of pages of this process that contain texts. */
struct names_pages {
    uint64_t page[NAMES_PAGES]; /* its address; 0: none */
    char copy[NAMES_PAGES][NAMES_PAGE_BYTES];
};

bool names_init(struct names *names);
void names_free(struct names *names);
/* Returns true if `key` was not in the set; it is now. A full set returns true without keeping the key. */
bool names_insert(struct names *names, uint64_t key);
/* Copies the NUL-terminated text at `address` of this process, which need not be readable. Returns its length
 * without the NUL (at most `size`), or -1. */
int64_t names_read_text(uint64_t address, char *text, uint32_t size);
/* Discards the copies: texts may have changed. */
void names_pages_reset(struct names_pages *pages);
/* Finds the text at `address` in a copy of its page, which is made if needed. Returns its length, with *text valid
 * until the next call; -1: it extends into the next page or cannot be read (see names_read_text). */
int64_t names_find_text(struct names_pages *pages, uint64_t address, const char **text);

/* The number that the set stores for a key of a string space; keys are addresses, small numbers or hashes. 0 counts as
 * known. */
static inline uint64_t names_key(uint32_t space, uint64_t key) { return key ^ ((uint64_t)space << 56); }

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
