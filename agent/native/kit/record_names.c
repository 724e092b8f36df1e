/* See record_names.h. Open addressing, at most half full, grown by doubling; used by the collector's thread only.
 *
 * Threads: the collector's.
 * Blocks: never; growing the set allocates memory.
 */
#define _GNU_SOURCE
#include "kit/record_names.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#define FIRST_SLOTS 4096u

bool names_init(struct names *names) {
    names->slots = calloc(FIRST_SLOTS, sizeof *names->slots);
    names->mask = FIRST_SLOTS - 1;
    names->used = 0;
    return names->slots != NULL;
}

void names_free(struct names *names) {
    free(names->slots);
    names->slots = NULL;
}

static void put(struct names *names, uint64_t key) {
    uint64_t slot = names_slot(names, key);
    while (names->slots[slot] != 0) {
        slot = (slot + 1) & names->mask;
    }
    names->slots[slot] = key;
}

static bool grow(struct names *names) {
    struct names bigger = {.mask = names->mask * 2 + 1, .used = names->used};
    bigger.slots = calloc(bigger.mask + 1, sizeof *bigger.slots);
    if (bigger.slots == NULL) {
        return false;
    }
    for (uint64_t i = 0; i <= names->mask; i++) {
        if (names->slots[i] != 0) {
            put(&bigger, names->slots[i]);
        }
    }
    free(names->slots);
    *names = bigger;
    return true;
}

bool names_insert(struct names *names, uint64_t key) {
    if (names_known(names, key)) {
        return false;
    }
    if (names->used * 2 < names->mask || grow(names)) {
        put(names, key);
        names->used++;
    }
    return true;
}

/* A read that fails instead of faulting; if the call is forbidden (seccomp), a plain read. */
static int64_t read_own_memory(uint64_t address, char *to, size_t bytes) {
    struct iovec local = {.iov_base = to, .iov_len = bytes};
    struct iovec remote = {.iov_base = (void *)(uintptr_t)address, .iov_len = bytes}; // NOLINT: an address
    const ssize_t got = process_vm_readv(getpid(), &local, 1, &remote, 1, 0);
    if (got >= 0 || (errno != EPERM && errno != ENOSYS)) {
        return got;
    }
    memcpy(to, remote.iov_base, bytes);
    return (int64_t)bytes;
}

int64_t names_read_text(uint64_t address, char *text, uint32_t size) {
    uint32_t have = 0;
    while (have < size) { /* never across a page that the text may not reach */
        const uint32_t to_page_end = NAMES_PAGE_BYTES - (uint32_t)((address + have) & (NAMES_PAGE_BYTES - 1));
        const uint32_t piece = to_page_end < size - have ? to_page_end : size - have;
        const int64_t got = read_own_memory(address + have, text + have, piece);
        if (got <= 0) {
            return -1;
        }
        const char *end = memchr(text + have, 0, (size_t)got);
        if (end != NULL) {
            return end - text;
        }
        have += (uint32_t)got;
    }
    return size;
}

void names_pages_reset(struct names_pages *pages) { memset(pages->page, 0, sizeof pages->page); }

int64_t names_find_text(struct names_pages *pages, uint64_t address, const char **text) {
    const uint64_t page = address & ~(uint64_t)(NAMES_PAGE_BYTES - 1);
    const uint64_t slot = page / NAMES_PAGE_BYTES % NAMES_PAGES;
    if (page == 0) {
        return -1;
    }
    if (pages->page[slot] != page) {
        pages->page[slot] = 0;
        if (read_own_memory(page, pages->copy[slot], NAMES_PAGE_BYTES) != NAMES_PAGE_BYTES) {
            return -1;
        }
        pages->page[slot] = page;
    }
    const char *begin = pages->copy[slot] + (address - page);
    const char *end = memchr(begin, 0, NAMES_PAGE_BYTES - (address - page));
    *text = begin;
    return end == NULL ? -1 : end - begin;
}
