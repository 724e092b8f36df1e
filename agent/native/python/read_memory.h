/* Reads this process's own memory without touching it: a missing address is an error, never a fault. */
#ifndef KINETO_STACKS_MEMORY_H
#define KINETO_STACKS_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MEMORY_PAGE_BYTES 4096u
#define MEMORY_PAGES 16u

/* A reader and the pages that it has read most recently. Used by one thread. */
struct memory {
    bool vm;   /* process_vm_readv works */
    bool file; /* it is forbidden: `fd` is /proc/self/mem */
    int fd;
    uint64_t device, inode; /* of `fd`: the program may have closed the number and reused it */
    uint32_t next;
    uint64_t address[MEMORY_PAGES]; /* 0: empty */
    uint8_t bytes[MEMORY_PAGES][MEMORY_PAGE_BYTES];
};

/* Finds out how memory can be read. Returns false, with errno set, if it cannot. */
bool memory_open(struct memory *memory);
void memory_close(struct memory *memory);

/* Reads `bytes` from `address`, bypassing the cache. False: not all of it is mapped. */
bool memory_read(const struct memory *memory, void *to, uint64_t address, size_t bytes);
uint64_t memory_word(const struct memory *memory, uint64_t address); /* 0: not mapped */

/* Reads `count` pieces of `bytes` each, one after the other. */
bool memory_gather(const struct memory *memory, void *to, const uint64_t *addresses, uint32_t count, size_t bytes);

struct memory_piece {
    void *to;
    uint64_t address;
    size_t bytes;
};

#define MEMORY_PIECES_MOST 16u

/* Reads pieces of any length, one right after the other, in their order. */
bool memory_read_pieces(const struct memory *memory, const struct memory_piece *pieces, uint32_t count);

/* As memory_read, but through whole pages that are cached until memory_forget. */
bool memory_peek(struct memory *memory, void *to, uint64_t address, size_t bytes);
void memory_forget(struct memory *memory);

#endif
