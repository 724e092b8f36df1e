/* What a target draws out of its input: the same input gives the same numbers, and an empty one gives zeros. */
#ifndef FUZZ_INPUT_H
#define FUZZ_INPUT_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct {
    const uint8_t *at;
    size_t left;
} input;

static inline void input_set(const uint8_t *data, size_t size) {
    input.at = data;
    input.left = size;
}

/* Below `limit`, of as many bytes as that takes; limit 0: any 64-bit number. */
static inline uint64_t next(uint64_t limit) {
    uint64_t number = 0;
    size_t bytes = limit && limit <= 256 ? 1 : limit && limit <= 65536 ? 2 : 8;
    size_t taken = bytes < input.left ? bytes : input.left;
    if (taken) {
        memcpy(&number, input.at, taken);
    }
    input.at += taken;
    input.left -= taken;
    return limit ? number % limit : number;
}

/* A block of the heap of exactly that size. */
static inline void *room(uint64_t count, uint64_t width) {
    void *block = malloc(count ? count * width : 1);
    if (!block) {
        abort();
    }
    return block;
}

static inline void expect(int holds, const char *what) {
    if (holds) {
        return;
    }
    fprintf(stderr, "%s\n", what);
    abort();
}

#endif
