/* Maps a pthread_t to the kernel's thread id. */
#ifndef KINETO_STACKS_IDS_H
#define KINETO_STACKS_IDS_H

#include "python/read_memory.h"

#define IDS_OFFSETS_MOST 8u

/* Candidate offsets of that id in the pthread structure: it is at all of them in every thread checked so far. */
struct thread_ids {
    uint32_t learned;
    uint32_t count;
    uint32_t offsets[IDS_OFFSETS_MOST];
};

/* Learns from the calling thread. */
void ids_learn(struct thread_ids *ids, const struct memory *memory);
/* Returns 0 if unknown. The caller checks that there is such a thread. */
uint32_t ids_tid(const struct thread_ids *ids, const struct memory *memory, uint64_t pthread);

#endif
