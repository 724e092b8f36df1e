/* Memory for large arrays in a file: what does not fit stays on disk. See codec.h. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "codec.h"

#define UNIT (64u << 10)  /* extents are multiples of it */
#define HEADER 64u        /* before the data, so that it stays aligned as vector instructions like it */
#define LOOK_EVERY_NS 2000000

typedef struct {
    uint64_t at, size;
} extent;

typedef struct {
    void *at;
    uint64_t size;
} range;

static struct {
    pthread_mutex_t lock;
    char *base;
    uint64_t room, least, resident_limit;
    int file, statm;
    extent *free; /* sorted, never adjacent */
    uint32_t free_count, free_room;
    range watched[KC_SPILL_WATCHED];
    uint32_t watched_count;
} spill = {.lock = PTHREAD_MUTEX_INITIALIZER, .file = -1, .statm = -1};

/* Bytes of files that are resident: of ours, of the raw ones, and of libraries. */
static uint64_t resident(void)
{
    char text[128];
    unsigned long long pages = 0;
    ssize_t length = pread(spill.statm, text, sizeof text - 1, 0);
    if (length <= 0)
        return UINT64_MAX; /* not told: as if it were too much */
    text[length] = 0;
    sscanf(text, "%*u %*u %llu", &pages);
    return pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* The pages stay in the kernel's cache, or on disk; whoever touches them has them again. */
void kc_spill_settle(void)
{
    if (!spill.base || resident() <= spill.resident_limit)
        return;
    madvise(spill.base, spill.room, MADV_DONTNEED);
    pthread_mutex_lock(&spill.lock);
    for (uint32_t i = 0; i < spill.watched_count; i++)
        madvise(spill.watched[i].at, spill.watched[i].size, MADV_DONTNEED);
    pthread_mutex_unlock(&spill.lock);
}

static int insert(uint32_t place, extent new)
{
    if (spill.free_count == spill.free_room) {
        uint32_t room = 2 * spill.free_room + 64;
        extent *grown = realloc(spill.free, room * sizeof *grown);
        if (!grown)
            return -1;
        spill.free = grown;
        spill.free_room = room;
    }
    memmove(spill.free + place + 1, spill.free + place, (spill.free_count - place) * sizeof *spill.free);
    spill.free[place] = new;
    spill.free_count++;
    return 0;
}

static void removed(uint32_t place)
{
    spill.free_count--;
    memmove(spill.free + place, spill.free + place + 1, (spill.free_count - place) * sizeof *spill.free);
}

/* Where `size` bytes (whole units) begin, UINT64_MAX: nowhere. */
static uint64_t taken(uint64_t size)
{
    for (uint32_t i = 0; i < spill.free_count; i++)
        if (spill.free[i].size >= size) {
            uint64_t at = spill.free[i].at;
            spill.free[i].at += size;
            spill.free[i].size -= size;
            if (!spill.free[i].size)
                removed(i);
            return at;
        }
    return UINT64_MAX;
}

static void given_back(uint64_t at, uint64_t size)
{
    uint32_t i = 0;
    while (i < spill.free_count && spill.free[i].at < at)
        i++;
    int joins_last = i > 0 && spill.free[i - 1].at + spill.free[i - 1].size == at;
    int joins_next = i < spill.free_count && at + size == spill.free[i].at;
    if (joins_last && joins_next) {
        spill.free[i - 1].size += size + spill.free[i].size;
        removed(i);
    } else if (joins_last)
        spill.free[i - 1].size += size;
    else if (joins_next) {
        spill.free[i].at = at;
        spill.free[i].size += size;
    } else
        insert(i, (extent){at, size}); /* without memory for the list the room is lost, and nothing else */
}

static uint64_t units(uint64_t size)
{
    return (size + HEADER + UNIT - 1) / UNIT * UNIT;
}

static int is_spilled(const void *data)
{
    return (const char *)data >= spill.base && (const char *)data < spill.base + spill.room;
}

/* Zeros; NULL: there is no room. Blocks are reserved on disk, so that writing into them cannot fail later. */
static void *spilled(uint64_t size)
{
    if (size > spill.room)
        return NULL;
    kc_spill_settle();
    uint64_t whole = units(size);
    pthread_mutex_lock(&spill.lock);
    uint64_t at = taken(whole);
    pthread_mutex_unlock(&spill.lock);
    if (at == UINT64_MAX)
        return NULL;
    if (fallocate(spill.file, FALLOC_FL_KEEP_SIZE, (off_t)at, (off_t)whole)) {
        pthread_mutex_lock(&spill.lock);
        given_back(at, whole);
        pthread_mutex_unlock(&spill.lock);
        return NULL;
    }
    *(uint64_t *)(spill.base + at) = size;
    return spill.base + at + HEADER;
}

static void dropped(void *data)
{
    uint64_t at = (uint64_t)((char *)data - HEADER - spill.base);
    uint64_t whole = units(*(uint64_t *)(spill.base + at));
    int kept = fallocate(spill.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)at, (off_t)whole);
    if (kept) /* what is taken again must be zeros */
        memset(spill.base + at, 0, whole);
    pthread_mutex_lock(&spill.lock);
    given_back(at, whole);
    pthread_mutex_unlock(&spill.lock);
}

void *kc_spill_malloc(void *context, size_t size)
{
    (void)context;
    void *data = size >= spill.least ? spilled(size) : NULL;
    return data ? data : malloc(size); /* the disk is full: memory, as far as the process's limit goes */
}

void *kc_spill_calloc(void *context, size_t count, size_t size)
{
    (void)context;
    if (size && count > SIZE_MAX / size)
        return NULL;
    void *data = count * size >= spill.least ? spilled(count * size) : NULL;
    return data ? data : calloc(count, size);
}

void kc_spill_free(void *context, void *data, size_t size)
{
    (void)context;
    (void)size;
    if (data && is_spilled(data))
        dropped(data);
    else
        free(data);
}

void *kc_spill_realloc(void *context, void *data, size_t size)
{
    if (!data)
        return kc_spill_malloc(context, size);
    if (!is_spilled(data) && size < spill.least)
        return realloc(data, size);
    uint64_t before = is_spilled(data) ? *(uint64_t *)((char *)data - HEADER) : malloc_usable_size(data);
    void *moved = kc_spill_malloc(context, size);
    if (moved) {
        memcpy(moved, data, before < size ? before : size);
        kc_spill_free(context, data, 0);
    }
    return moved;
}

static void *look_again_and_again(void *unused)
{
    struct timespec pause = {0, LOOK_EVERY_NS};
    for (;;) {
        nanosleep(&pause, NULL);
        kc_spill_settle();
    }
    return unused;
}

int kc_spill_open(int file, int statm, uint64_t room, uint64_t least, uint64_t resident_limit)
{
    pthread_t thread;
    room = room / UNIT * UNIT;
    if (spill.base || ftruncate(file, (off_t)room))
        return -1;
    void *base = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (base == MAP_FAILED)
        return -1;
    spill.base = base;
    spill.file = file;
    spill.statm = statm;
    spill.room = room;
    spill.least = least < UNIT ? UNIT : least;
    spill.resident_limit = resident_limit;
    if (insert(0, (extent){0, room}) || pthread_create(&thread, NULL, look_again_and_again, NULL)) {
        munmap(base, room);
        spill.base = NULL;
        return -1;
    }
    pthread_detach(thread);
    return 0;
}

int kc_spill_watch(void *mapping, uint64_t size)
{
    int known = 0;
    pthread_mutex_lock(&spill.lock);
    if (spill.base && spill.watched_count < KC_SPILL_WATCHED) {
        spill.watched[spill.watched_count++] = (range){mapping, size};
        known = 1;
    }
    pthread_mutex_unlock(&spill.lock);
    return known;
}
