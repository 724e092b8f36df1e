/* Making, populating and freeing an arena; its string table. See arena.h.
 *
 * Threads: the agent's thread makes, discards and frees arenas. The thread that records (the collector's or the
 *   sampler's, or a thread of the program that holds the GIL or op_names.c's lock) adds strings; the collector's also
 *   populates.
 * Blocks: never waits. arena_populate takes the time of the page faults.
 */
#define _GNU_SOURCE
#include "common/arena.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000 /* Linux 4.17 */
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif

/* Populating takes the memory map's lock for reading; short pieces keep the target's mmap calls from waiting. */
#define POPULATE_PIECE_BYTES (1u << 20)
#define FIRST_NUMBER 40 /* the lowest ones are given to a program that opens what it has closed anew */
#define STRINGS_POPULATED_BYTES (1u << 20)

static uint64_t page_align(uint64_t bytes) {
    return (bytes + ARENA_PAGE_BYTES - 1) & ~(uint64_t)(ARENA_PAGE_BYTES - 1);
}

static void lay_out(struct arena_fixed *fixed, uint32_t buffer_count, uint64_t buffer_bytes, uint64_t strings_bytes) {
    memcpy(fixed->magic, ARENA_MAGIC, sizeof fixed->magic);
    fixed->header_bytes = ARENA_HEADER_BYTES;
    fixed->buffer_count = buffer_count;
    fixed->buffer_bytes = page_align(buffer_bytes);
    fixed->descriptors_offset = ARENA_HEADER_BYTES;
    fixed->strings_offset = page_align(ARENA_HEADER_BYTES + (uint64_t)buffer_count * ARENA_DESCRIPTOR_BYTES);
    fixed->strings_bytes = page_align(strings_bytes);
    fixed->buffers_offset = fixed->strings_offset + fixed->strings_bytes;
    fixed->total_bytes = fixed->buffers_offset + buffer_count * fixed->buffer_bytes;
}

static int map_memory(struct arena *arena, const char **step) {
    const uint64_t total = arena->fixed.total_bytes;
    *step = "ftruncate";
    if (ftruncate(arena->fd, (off_t)total) != 0) {
        return errno;
    }
    *step = "fcntl(F_ADD_SEALS)";
    if (fcntl(arena->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        return errno;
    }
    *step = "mmap";
    void *base = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_SHARED, arena->fd, 0);
    if (base == MAP_FAILED) {
        return errno;
    }
    arena->base = base;
    *step = "madvise(MADV_DONTFORK)";
    return madvise(base, total, MADV_DONTFORK) == 0 ? 0 : errno;
}

static bool is_ours(const struct arena *arena, int fd) {
    struct stat now;
    return fstat(fd, &now) == 0 && now.st_dev == arena->device && now.st_ino == arena->inode;
}

/* -1: errno says why. */
static int make_memfd(struct arena *arena) {
    struct stat made;
    const int low = memfd_create("kineto-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (low < 0 || fstat(low, &made) != 0) {
        return -1;
    }
    arena->device = made.st_dev;
    arena->inode = made.st_ino;
    const int high = fcntl(low, F_DUPFD_CLOEXEC, FIRST_NUMBER);
    if (high < 0) {
        return low;
    }
    if (is_ours(arena, low)) {
        close(low);
    }
    return high;
}

void arena_close(struct arena *arena) {
    if (arena->fd >= 0 && is_ours(arena, arena->fd)) {
        close(arena->fd);
    }
    arena->fd = -1;
}

int arena_create(struct arena *arena, uint32_t buffer_count, uint64_t buffer_bytes, uint64_t strings_bytes,
                 const char **step) {
    memset(arena, 0, sizeof *arena);
    lay_out(&arena->fixed, buffer_count, buffer_bytes, strings_bytes);
    *step = "memfd_create";
    arena->fd = make_memfd(arena);
    if (arena->fd < 0) {
        return errno;
    }
    const int error = map_memory(arena, step);
    if (error != 0) {
        arena_destroy(arena);
        return error;
    }
    memcpy(arena->base, &arena->fixed, sizeof arena->fixed);
    return 0;
}

/* Backs [start, end) with memory without changing its contents, which CUPTI may be writing already. */
static void populate(uint8_t *start, const uint8_t *end) {
    for (uint8_t *piece = start; piece < end; piece += POPULATE_PIECE_BYTES) {
        const size_t left = (size_t)(end - piece);
        const size_t bytes = left < POPULATE_PIECE_BYTES ? left : POPULATE_PIECE_BYTES;
        if (madvise(piece, bytes, MADV_POPULATE_WRITE) == 0) {
            continue;
        }
        for (size_t offset = 0; offset < bytes; offset += ARENA_PAGE_BYTES) {
            __atomic_fetch_or((uint64_t *)(void *)(piece + offset), 0, __ATOMIC_RELAXED);
        }
    }
}

void arena_populate(struct arena *arena, uint64_t buffers_bytes) {
    const struct arena_fixed *fixed = &arena->fixed;
    const uint64_t all = fixed->total_bytes - fixed->buffers_offset;
    const uint64_t wanted = buffers_bytes < all ? buffers_bytes : all;
    if (arena->populated == 0) {
        const uint64_t most = fixed->strings_offset + STRINGS_POPULATED_BYTES;
        populate(arena->base, arena->base + (most < fixed->buffers_offset ? most : fixed->buffers_offset));
    }
    if (wanted > arena->populated) {
        populate(arena->base + fixed->buffers_offset + arena->populated, arena->base + fixed->buffers_offset + wanted);
        arena->populated = wanted;
    }
}

void arena_discard(struct arena *arena) {
    for (uint32_t i = 0; i < arena->fixed.buffer_count; i++) {
        if (arena_load_state(arena, i) != ARENA_LOANED) {
            (void)madvise(arena_buffer(arena, i), arena->fixed.buffer_bytes, MADV_REMOVE);
        }
    }
}

void arena_destroy(struct arena *arena) {
    if (arena->base != NULL) {
        munmap(arena->base, arena->fixed.total_bytes);
        arena->base = NULL;
    }
    arena_close(arena);
}

void arena_forked(struct arena *arena) {
    arena_close(arena);
    void *taken = mmap(arena->base, arena->fixed.total_bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (taken != MAP_FAILED && taken != arena->base) {
        munmap(taken, arena->fixed.total_bytes); /* before Linux 4.17 the address is a wish */
    }
}

bool arena_add_string(struct arena *arena, uint64_t key, uint32_t space, const char *text, uint32_t length) {
    const uint64_t used = arena_load(arena, ARENA_STRINGS_USED);
    const uint64_t bytes = sizeof(struct arena_string) + (((uint64_t)length + 7) & ~(uint64_t)7);
    if (bytes > arena->fixed.strings_bytes - used) {
        return false;
    }
    uint8_t *entry = arena->base + arena->fixed.strings_offset + used;
    const struct arena_string head = {.key = key, .space = space, .length = length};
    memcpy(entry, &head, sizeof head);
    memcpy(entry + sizeof head, text, length);
    arena_store(arena, ARENA_STRINGS_USED, used + bytes);
    return true;
}
