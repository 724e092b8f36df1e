/* Theory of operation
 *
 * CUPTI before CUDA 13.2 cannot be asked whether anybody has enabled activities, nor which buffer callbacks are
 * registered. It keeps the two callbacks side by side in its own data (so in 13 libraries of 12.0 to 13.1: one place,
 * in .bss). The place is found once, by registering our own callbacks and searching for them; a copy of the data made
 * before shows the previous callbacks, which are registered again at once. Calls that reach ours in between are passed
 * on to the previous ones once the search has ended, so none is lost. If there is no such place, or more than one,
 * nothing is concluded.
 *
 * Threads: the agent's, between recordings. The two stand-in callbacks run on whatever thread CUPTI calls them on.
 * Blocks: the search does not wait, but inside CUPTI. A stand-in callback yields the processor until the search has
 *   ended, 20 ms at most: then no one gets that buffer.
 */
#define _GNU_SOURCE
#include "cupti/buffer_callbacks.h"

#include <dlfcn.h>
#include <link.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/wake.h"
#include "cupti/cupti_vendor.h"

#define WAIT_LIMIT_NS 20000000LL

struct pair {
    cupti_requested requested;
    cupti_completed completed;
};

static struct {
    const void *library;    /* the library whose place is known, or known not to exist */
    const uintptr_t *place; /* of the two callbacks, in its data */
    struct pair before;
    struct pair theirs; /* the callbacks to register again */
    _Atomic bool searching;
} listener;

struct span {
    uintptr_t base; /* of the library */
    const uintptr_t *begin;
    size_t words;
};

/* ---- the stand-in callbacks ---- */

static const struct pair *theirs(void) {
    static const struct pair nobody;
    const int64_t deadline = clock_ns(CLOCK_MONOTONIC) + WAIT_LIMIT_NS;
    while (atomic_load(&listener.searching)) {
        if (clock_ns(CLOCK_MONOTONIC) >= deadline) {
            return &nobody;
        }
        sched_yield();
    }
    return &listener.before;
}

static void requested_meanwhile(uint8_t **buffer, size_t *size, size_t *max_records) {
    const struct pair *pair = theirs();
    *buffer = NULL;
    *size = *max_records = 0;
    if (pair->requested != NULL) {
        pair->requested(buffer, size, max_records);
    }
}

static void completed_meanwhile(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid) {
    const struct pair *pair = theirs();
    if (pair->completed != NULL) {
        pair->completed(context, stream, buffer, size, valid);
    }
}

/* ---- the search ---- */

static int find_span(struct dl_phdr_info *info, size_t size, void *wanted) {
    (void)size;
    struct span *span = wanted;
    if (info->dlpi_addr != span->base) {
        return 0;
    }
    for (unsigned i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        if (part->p_type == PT_LOAD && (part->p_flags & PF_W) != 0) {
            const uintptr_t begin = (info->dlpi_addr + part->p_vaddr + 7) & ~(uintptr_t)7;
            span->begin = (const uintptr_t *)begin; /* NOLINT */
            span->words = (info->dlpi_addr + part->p_vaddr + part->p_memsz - begin) / sizeof(uintptr_t);
        }
    }
    return 1;
}

/* For data that other threads may be writing, read word by word: only words equal to our callbacks' addresses
 * matter. */
#define AS_IT_IS __attribute__((no_sanitize("address", "thread", "undefined")))

AS_IT_IS static void copy_words(const struct span *span, uintptr_t *to) {
    for (size_t i = 0; i < span->words; i++) {
        to[i] = __atomic_load_n(&span->begin[i], __ATOMIC_RELAXED);
    }
}

AS_IT_IS static size_t places_of(const struct span *span, const uintptr_t *pair, size_t *place) {
    size_t count = 0;
    for (size_t i = 0; i + 1 < span->words; i++) {
        if (__atomic_load_n(&span->begin[i], __ATOMIC_RELAXED) == pair[0] &&
            __atomic_load_n(&span->begin[i + 1], __ATOMIC_RELAXED) == pair[1]) {
            *place = i;
            count++;
        }
    }
    return count;
}

static void search(const struct cupti_api *api) {
    const struct pair ours = {requested_meanwhile, completed_meanwhile};
    const struct link_map *loaded = api->library; /* glibc: dlopen's handle */
    struct span span = {.base = loaded->l_addr};
    uintptr_t addresses[2];
    size_t place = 0;
    (void)dl_iterate_phdr(find_span, &span);
    uintptr_t *copy = span.begin == NULL ? NULL : malloc(span.words * sizeof *copy);
    if (copy == NULL) {
        return;
    }
    memcpy(addresses, &ours, sizeof addresses);
    copy_words(&span, copy);
    memset(&listener.before, 0, sizeof listener.before);
    atomic_store(&listener.searching, true);
    if (api->register_callbacks(ours.requested, ours.completed) == CUPTI_SUCCESS &&
        places_of(&span, addresses, &place) == 1) {
        memcpy(&listener.before, copy + place, sizeof listener.before);
        listener.place = span.begin + place;
    }
    atomic_store(&listener.searching, false);
    if (listener.before.requested != NULL && listener.before.completed != NULL) {
        (void)api->register_callbacks(listener.before.requested, listener.before.completed);
    }
    free(copy);
}

/* Another agent may have loaded a collector of its own before us. */
static bool of_a_collector(uintptr_t function) {
    Dl_info info;
    if (dladdr((void *)function, &info) == 0) { /* NOLINT */
        return false;
    }
    void *library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    const bool found = library != NULL && dlsym(library, "kc_abi") != NULL;
    if (library != NULL) {
        dlclose(library);
    }
    return found;
}

AS_IT_IS uint64_t listener_registered(const struct cupti_api *api) {
    if (listener.library != api->library) {
        listener.library = api->library;
        listener.place = NULL;
        memset(&listener.theirs, 0, sizeof listener.theirs);
        search(api);
    }
    if (listener.place == NULL) {
        return 0;
    }
    const uintptr_t now = __atomic_load_n(listener.place, __ATOMIC_RELAXED);
    if (now == (uintptr_t)cupti_buffer_requested) {
        return 0; /* an earlier recording could not restore theirs: this one will */
    }
    memset(&listener.theirs, 0, sizeof listener.theirs);
    if (now == 0 || now == (uintptr_t)requested_meanwhile || of_a_collector(now)) {
        return 0;
    }
    for (size_t i = 0; i < 2; i++) {
        ((uintptr_t *)&listener.theirs)[i] = __atomic_load_n(&listener.place[i], __ATOMIC_RELAXED);
    }
    return now;
}

void listener_restore(const struct cupti_api *api) {
    if (listener.theirs.requested != NULL && listener.theirs.completed != NULL) {
        (void)api->register_callbacks(listener.theirs.requested, listener.theirs.completed);
        memset(&listener.theirs, 0, sizeof listener.theirs);
    }
}
