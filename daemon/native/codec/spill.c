/* Memory for large arrays: a pool, and a file for what has no room there. See codec.h.
 *
 * Threads: any that allocates, some with the GIL; one lock guards the pool and the file. A timer's handler runs on
 *   any of them.
 * Blocks: for the lock, for the disk, and for page faults of arrays in the file.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <unistd.h>

#include "codec/codec.h"

#define UNIT (64u << 10)          /* extents are multiples of it */
#define HEADER 64u                /* before the data, so that it stays aligned as vector instructions like it */
#define REUSED_BYTES (128u << 20) /* smaller blocks keep their place on disk for the next array */
#define LOOK_EVERY_US 1000

typedef struct {
    uint64_t at, size;
} extent;

typedef struct {
    char *base;
    uint64_t room, touched; /* touched: where what was never handed out begins */
    extent *free;           /* sorted, never adjacent */
    uint32_t free_count, free_room;
} region;

typedef struct {
    void *at;
    uint64_t size;
} range;

static struct {
    pthread_mutex_t lock;
    region pool, disk;                    /* in memory, and in the file */
    uint64_t least, resident_limit, page; /* page: what statm counts in */
    int file, statm;
    range watched[KC_SPILL_WATCHED];
    _Atomic uint32_t watched_count;
} spill = {.lock = PTHREAD_MUTEX_INITIALIZER, .file = -1, .statm = -1};

/* Bytes of files that are resident: of ours, of the raw ones, and of libraries. The third number of statm, in pages. */
static uint64_t resident(void) {
    char text[128];
    uint64_t pages = 0;
    ssize_t length = pread(spill.statm, text, sizeof text, 0);
    int number = 1;
    for (ssize_t i = 0; i < length && number <= 3; i++) {
        number += text[i] == ' ';
        if (number == 3 && text[i] >= '0' && text[i] <= '9') {
            pages = 10 * pages + (uint64_t)(text[i] - '0');
        }
    }
    return length <= 0 ? UINT64_MAX : pages * spill.page; /* not told: as if it were too much */
}

/* The pages stay in the kernel's cache, or on disk; whoever touches them has them again. Safe in a signal handler. */
void kc_spill_settle(void) {
    if (!spill.disk.base || resident() <= spill.resident_limit) {
        return;
    }
    madvise(spill.disk.base, spill.disk.room, MADV_DONTNEED);
    uint32_t watched = atomic_load(&spill.watched_count);
    for (uint32_t i = 0; i < watched; i++) {
        madvise(spill.watched[i].at, spill.watched[i].size, MADV_DONTNEED);
    }
}

static void look(int number) {
    int error = errno;
    (void)number;
    kc_spill_settle();
    errno = error;
}

static int insert(region *in, uint32_t place, extent new) {
    if (in->free_count == in->free_room) {
        uint32_t room = 2 * in->free_room + 64;
        extent *grown = realloc(in->free, room * sizeof *grown);
        if (!grown) {
            return -1;
        }
        in->free = grown;
        in->free_room = room;
    }
    memmove(in->free + place + 1, in->free + place, (in->free_count - place) * sizeof *in->free);
    in->free[place] = new;
    in->free_count++;
    return 0;
}

static void removed(region *in, uint32_t place) {
    in->free_count--;
    memmove(in->free + place, in->free + place + 1, (in->free_count - place) * sizeof *in->free);
}

/* Where `size` bytes (whole units) begin, UINT64_MAX: nowhere. *used: so many of them may hold what was there before. */
static uint64_t taken(region *in, uint64_t size, uint64_t *used) {
    uint64_t at = UINT64_MAX;
    pthread_mutex_lock(&spill.lock);
    for (uint32_t i = 0; i < in->free_count; i++) {
        if (in->free[i].size >= size) {
            at = in->free[i].at;
            in->free[i].at += size;
            in->free[i].size -= size;
            if (!in->free[i].size) {
                removed(in, i);
            }
            *used = at >= in->touched ? 0 : in->touched - at < size ? in->touched - at : size;
            if (in->touched < at + size) {
                in->touched = at + size;
            }
            break;
        }
    }
    pthread_mutex_unlock(&spill.lock);
    return at;
}

static void given_back(region *in, uint64_t at, uint64_t size) {
    uint32_t i = 0;
    pthread_mutex_lock(&spill.lock);
    while (i < in->free_count && in->free[i].at < at) {
        i++;
    }
    int joins_last = i > 0 && in->free[i - 1].at + in->free[i - 1].size == at;
    int joins_next = i < in->free_count && at + size == in->free[i].at;
    if (joins_last && joins_next) {
        in->free[i - 1].size += size + in->free[i].size;
        removed(in, i);
    } else if (joins_last) {
        in->free[i - 1].size += size;
    } else if (joins_next) {
        in->free[i].at = at;
        in->free[i].size += size;
    } else {
        insert(in, i, (extent){at, size}); /* without memory for the list the room is lost, and nothing else */
    }
    pthread_mutex_unlock(&spill.lock);
}

static uint64_t units(uint64_t size) { return (size + HEADER + UNIT - 1) / UNIT * UNIT; }

static int lies_in(const region *in, const void *data) {
    return in->base && (const char *)data >= in->base && (const char *)data < in->base + in->room;
}

static int is_ours(const void *data) { return lies_in(&spill.pool, data) || lies_in(&spill.disk, data); }

static void *handed_out(region *in, uint64_t at, uint64_t size) {
    *(uint64_t *)(in->base + at) = size;
    return in->base + at + HEADER;
}

/* NULL: there is no room. What is freed stays resident, so that the next array need not be mapped and cleared. */
static void *pooled(uint64_t size, int cleared) {
    uint64_t used = 0, at = size > spill.pool.room ? UINT64_MAX : taken(&spill.pool, units(size), &used);
    if (at == UINT64_MAX) {
        return NULL;
    }
    char *data = handed_out(&spill.pool, at, size);
    if (cleared && used > HEADER) {
        memset(data, 0, used - HEADER < size ? used - HEADER : size);
    }
    return data;
}

/* fallocate of a part of the file, also when the signal comes in between. */
static int changed(int mode, uint64_t at, uint64_t size) {
    int result;
    do {
        result = fallocate(spill.file, mode | FALLOC_FL_KEEP_SIZE, (off_t)at, (off_t)size);
    } while (result && errno == EINTR);
    return result;
}

static int punched(uint64_t at, uint64_t size) { return changed(FALLOC_FL_PUNCH_HOLE, at, size); }

/* NULL: there is no room. Blocks are reserved on disk, so that writing into them cannot fail later. */
static void *spilled(uint64_t size, int cleared) {
    uint64_t used = 0, whole = units(size);
    if (size > spill.disk.room) {
        return NULL;
    }
    kc_spill_settle();
    uint64_t at = taken(&spill.disk, whole, &used);
    if (at == UINT64_MAX) {
        return NULL;
    }
    int holds_old = cleared && used && punched(at, whole);
    if (changed(0, at, whole)) {
        given_back(&spill.disk, at, whole);
        return NULL;
    }
    if (holds_old) {
        memset(spill.disk.base + at, 0, whole);
    }
    return handed_out(&spill.disk, at, size);
}

static void dropped(region *in, void *data) {
    uint64_t at = (uint64_t)((char *)data - HEADER - in->base);
    uint64_t whole = units(*(uint64_t *)(in->base + at));
    if (in == &spill.disk && whole > REUSED_BYTES) {
        punched(at, whole);
    }
    given_back(in, at, whole);
}

static void *placed(uint64_t size, int cleared) {
    if (size < spill.least) {
        return NULL;
    }
    void *data = pooled(size, cleared);
    return data ? data : spilled(size, cleared);
}

void *kc_spill_malloc(void *context, size_t size) {
    (void)context;
    void *data = placed(size, 0);
    return data ? data : malloc(size); /* the disk is full: memory, as far as the process's limit goes */
}

void *kc_spill_calloc(void *context, size_t count, size_t size) {
    (void)context;
    if (size && count > SIZE_MAX / size) {
        return NULL;
    }
    void *data = placed(count * size, 1);
    return data ? data : calloc(count, size);
}

void kc_spill_free(void *context, void *data, size_t size) {
    (void)context;
    (void)size;
    if (lies_in(&spill.pool, data)) {
        dropped(&spill.pool, data);
    } else if (lies_in(&spill.disk, data)) {
        dropped(&spill.disk, data);
    } else {
        free(data);
    }
}

void *kc_spill_realloc(void *context, void *data, size_t size) {
    if (!data) {
        return kc_spill_malloc(context, size);
    }
    if (!is_ours(data) && size < spill.least) {
        return realloc(data, size);
    }
    uint64_t before = is_ours(data) ? *(uint64_t *)((char *)data - HEADER) : malloc_usable_size(data);
    void *moved = kc_spill_malloc(context, size);
    if (moved) {
        memcpy(moved, data, before < size ? before : size);
        kc_spill_free(context, data, 0);
    }
    return moved;
}

static int mapped(region *in, uint64_t room, int file) {
    int flags = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED;
    void *base = mmap(NULL, room, PROT_READ | PROT_WRITE, flags, file, 0);
    if (base == MAP_FAILED) {
        return -1;
    }
    if (insert(in, 0, (extent){0, room})) {
        munmap(base, room);
        return -1;
    }
    in->base = base;
    in->room = room;
    return 0;
}

int kc_spill_pool(uint64_t room, uint64_t least) {
    if (spill.pool.base || mapped(&spill.pool, room / UNIT * UNIT, -1)) {
        return -1;
    }
    madvise(spill.pool.base, spill.pool.room, MADV_HUGEPAGE);
    spill.least = least < UNIT ? UNIT : least;
    return 0;
}

int kc_spill_open(int file, int statm, uint64_t room, uint64_t least, uint64_t resident_limit) {
    struct sigaction action = {.sa_handler = look, .sa_flags = SA_RESTART};
    struct itimerval often = {{0, LOOK_EVERY_US}, {0, LOOK_EVERY_US}};
    room = room / UNIT * UNIT;
    if (spill.disk.base || ftruncate(file, (off_t)room) || mapped(&spill.disk, room, file)) {
        return -1;
    }
    spill.file = file;
    spill.statm = statm;
    spill.page = (uint64_t)sysconf(_SC_PAGESIZE);
    spill.least = least < UNIT ? UNIT : least;
    spill.resident_limit = resident_limit;
    if (sigaction(SIGALRM, &action, NULL) || setitimer(ITIMER_REAL, &often, NULL)) {
        munmap(spill.disk.base, room);
        spill.disk = (region){0};
        return -1;
    }
    return 0;
}

int kc_spill_watch(void *mapping, uint64_t size) {
    uint32_t count = atomic_load(&spill.watched_count);
    if (!spill.disk.base || count == KC_SPILL_WATCHED) {
        return 0;
    }
    spill.watched[count] = (range){mapping, size};
    atomic_store(&spill.watched_count, count + 1);
    return 1;
}
