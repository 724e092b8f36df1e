/* From pthread_t to the kernel's thread id. */
#ifndef KINETO_STACKS_IDS_H
#define KINETO_STACKS_IDS_H

#include "python/read_memory.h"

#define IDS_OFFSETS_MOST 8u

/* Where in the pthread structure that id may stand: at all of these places in every thread that was looked at. */
struct thread_ids {
    uint32_t learned;
    uint32_t count;
    uint32_t offsets[IDS_OFFSETS_MOST];
};

/* On a thread that is to be looked at. */
void ids_learn(struct thread_ids *ids, const struct memory *memory);
/* 0: unknown. The caller checks that there is such a thread. */
uint32_t ids_tid(const struct thread_ids *ids, const struct memory *memory, uint64_t pthread);

#endif
