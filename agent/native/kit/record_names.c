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
#define PAGE 4096u

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

/* Reads that fail instead of faulting, one after the other; where the call is forbidden (seccomp), plain reads. Returns
 * the bytes up to the first that failed, or -1. */
static int64_t read_own_memory(const struct iovec *to, const struct iovec *from, uint32_t count) {
    const ssize_t got = process_vm_readv(getpid(), to, count, from, count, 0);
    if (got >= 0 || (errno != EPERM && errno != ENOSYS)) {
        return got;
    }
    int64_t bytes = 0;
    for (uint32_t i = 0; i < count; i++) {
        memcpy(to[i].iov_base, from[i].iov_base, to[i].iov_len);
        bytes += (int64_t)to[i].iov_len;
    }
    return bytes;
}

/* From `address` on, never across a page that the text may not reach. */
static struct iovec piece_at(uint64_t address, uint32_t most) {
    const uint32_t to_page_end = PAGE - (uint32_t)(address & (PAGE - 1));
    return (struct iovec){.iov_base = (void *)(uintptr_t)address, // NOLINT: an address
                          .iov_len = to_page_end < most ? to_page_end : most};
}

int64_t names_read_text(uint64_t address, char *text, uint32_t size) {
    uint32_t have = 0;
    while (have < size) {
        const struct iovec from = piece_at(address + have, size - have);
        const struct iovec to = {.iov_base = text + have, .iov_len = from.iov_len};
        const int64_t got = read_own_memory(&to, &from, 1);
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

void names_read_texts(const uint64_t *addresses, uint32_t count, char (*texts)[NAMES_READ_BYTES], int32_t *lengths) {
    struct iovec from[NAMES_READ_MOST] = {{0}}, to[NAMES_READ_MOST] = {{0}};
    for (uint32_t i = 0; i < count; i++) {
        from[i] = piece_at(addresses[i], NAMES_READ_BYTES);
        to[i] = (struct iovec){.iov_base = texts[i], .iov_len = from[i].iov_len};
    }
    int64_t left = read_own_memory(to, from, count);
    for (uint32_t i = 0; i < count; i++) {
        const int64_t bytes = (int64_t)to[i].iov_len;
        const char *end = left < bytes ? NULL : memchr(texts[i], 0, to[i].iov_len);
        lengths[i] = end == NULL ? -1 : (int32_t)(end - texts[i]);
        left = left < bytes ? 0 : left - bytes;
    }
}
