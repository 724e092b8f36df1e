/* See kernel_ids.h. rocprofiler reports the name of a kernel once, when its code is loaded, which may be long before a
 * recording. So the names are kept in a list that only grows, at its head; each read goes from the head to where the
 * previous one began.
 *
 * Threads: kernel_ids_add on the thread of the program that loads code; kernel_ids_tell on the collector's;
 *   kernel_ids_rewind on the agent's, between recordings.
 * Blocks: never; a name allocates memory.
 */
#define _GNU_SOURCE
#include "rocprofiler/kernel_ids.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

struct kernel {
    struct kernel *next;
    uint64_t id;
    uint32_t length;
    char name[];
};

static struct {
    struct kernel *_Atomic head;
    _Atomic uint64_t count;
    _Atomic uint64_t lost;
    struct kernel *_Atomic told; /* this one and those after it */
} kernels;

void kernel_ids_add(uint64_t kernel_id, const char *name) {
    const size_t length = strnlen(name, KIT_TEXT_BYTES_MOST);
    struct kernel *kernel = atomic_fetch_add(&kernels.count, 1) < KERNEL_IDS_MOST ? malloc(sizeof *kernel + length)
                                                                                  : NULL;
    if (kernel == NULL) {
        atomic_fetch_add(&kernels.lost, 1);
        return;
    }
    kernel->id = kernel_id;
    kernel->length = (uint32_t)length;
    memcpy(kernel->name, name, length);
    kernel->next = atomic_load(&kernels.head);
    while (!atomic_compare_exchange_weak(&kernels.head, &kernel->next, kernel)) {
    }
}

void kernel_ids_rewind(void) { atomic_store(&kernels.told, NULL); }

void kernel_ids_tell(const struct kit_host *host, uint32_t space) {
    struct kernel *head = atomic_load(&kernels.head);
    const struct kernel *told = atomic_load(&kernels.told);
    for (const struct kernel *kernel = head; kernel != told; kernel = kernel->next) {
        (void)host->add_text(space, kernel->id, kernel->name, kernel->length);
    }
    atomic_store(&kernels.told, head);
}

uint64_t kernel_ids_lost(void) { return atomic_load(&kernels.lost); }
