/* Making, populating and freeing an arena; its string table. See arena.h.
 *
 * Fork: a child closes every arena's descriptor, even one that is just being made (close_in_child).
 *
 * Threads: the agent's thread makes, discards and frees arenas; close_in_child runs in a child, on the thread that
 *   forks. The thread that records (the collector's or the sampler's, or a thread of the program that holds the GIL or
 *   op_names.c's lock) adds strings; the collector's also populates.
 * Blocks: never waits. arena_populate takes the time of the page faults.
 */
#define _GNU_SOURCE
#include "common/arena.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
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
#define FIRST_NUMBER 40 /* low numbers may be reused by a program that closes and reopens descriptors */
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

/* ---- forked children: each closes what it inherited, otherwise the daemon would not see the end of the process ----
 *
 * A fork copies the descriptors first and the memory after them, while this thread goes on: a child may have
 * descriptors that its memory says are closed or moved. So the identity of a file is remembered until the entry is
 * needed again, and shows whether a number is still ours.
 */

#define FILES_MOST 32
#define NUMBERS_MOST 16384
#define FILE_NAME "kineto-arena"

enum { FREE = 0, IN_WORK, KEPT };

static struct {
    _Atomic int state;
    struct arena arena; /* its descriptor and that file's identity, until closed */
} files[FILES_MOST];
static _Atomic unsigned kept_count;
static _Atomic int making; /* memfds that may not be in `files` yet */
static pthread_once_t hooked = PTHREAD_ONCE_INIT;

static bool is_memfd_of_arena(int fd) {
    char path[32], target[sizeof "/memfd:" FILE_NAME] = {0};
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return readlink(path, target, sizeof target - 1) > 0 && strcmp(target, "/memfd:" FILE_NAME) == 0;
}

static void close_in_child(void) {
    for (int i = 0; i < FILES_MOST; i++) {
        const struct arena *arena = &files[i].arena;
        const int numbers[] = {arena->fd, arena->first_fd};
        for (int k = 0; files[i].state != IN_WORK && arena->inode != 0 && k < 2; k++) {
            if (is_ours(arena, numbers[k])) {
                close(numbers[k]);
            }
        }
        files[i].arena.inode = 0;
        files[i].state = FREE;
    }
    for (int fd = 0; making > 0 && fd < NUMBERS_MOST; fd++) {
        if (is_memfd_of_arena(fd)) {
            close(fd);
        }
    }
    making = 0;
}

static void hook_forks(void) { (void)pthread_atfork(NULL, NULL, close_in_child); }

static void keep_file(const struct arena *arena) {
    const unsigned oldest = kept_count++;
    for (unsigned i = 0; i < FILES_MOST; i++) {
        int expected = FREE;
        const unsigned at = (oldest + i) % FILES_MOST;
        if (atomic_compare_exchange_strong(&files[at].state, &expected, IN_WORK)) {
            files[at].arena = *arena;
            files[at].state = KEPT;
            return;
        }
    }
}

static void forget_file(const struct arena *arena) {
    for (int i = 0; i < FILES_MOST; i++) {
        if (files[i].state == KEPT && files[i].arena.inode == arena->inode && files[i].arena.device == arena->device) {
            files[i].state = FREE;
        }
    }
}

/* Returns -1 with errno set on failure. */
static int make_memfd(struct arena *arena) {
    struct stat made;
    const int low = memfd_create(FILE_NAME, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (low < 0 || fstat(low, &made) != 0) {
        return -1;
    }
    arena->device = made.st_dev;
    arena->inode = made.st_ino;
    arena->first_fd = low;
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
    forget_file(arena);
    arena->fd = -1;
}

int arena_create(struct arena *arena, uint32_t buffer_count, uint64_t buffer_bytes, uint64_t strings_bytes,
                 const char **step) {
    memset(arena, 0, sizeof *arena);
    lay_out(&arena->fixed, buffer_count, buffer_bytes, strings_bytes);
    *step = "memfd_create";
    (void)pthread_once(&hooked, hook_forks);
    making++;
    arena->fd = make_memfd(arena);
    const int made = arena->fd < 0 ? errno : 0;
    if (made == 0) {
        keep_file(arena);
    }
    making--;
    if (made != 0) {
        return made;
    }
    const int error = map_memory(arena, step);
    if (error != 0) {
        arena_destroy(arena);
        return error;
    }
    memcpy(arena->base, &arena->fixed, sizeof arena->fixed);
    return 0;
}

/* Backs [start, end) with memory without changing its contents, which CUPTI may already be writing. */
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
