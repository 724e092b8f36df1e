/* Leaves no more room around a library than a large program does: that of a JAX 0.11 process on a GPU machine. */
#ifndef DENSE_H
#define DENSE_H

#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "check.h"

#define DENSE_REACH (2ll << 30)
#define DENSE_LINES 2048
#define DENSE_STACK (512ll << 10) /* what the main stack may still grow */

/* What was free within 2 GiB of libcupti 13.0, from its first byte. */
static const int64_t DENSE_HOLES[][2] = {
    {-0x2fe00000, -0x2fcb6000}, {-0x2d1c1000, -0x2d000000}, {-0x2cde0000, -0x2cc00000}, {-0x2a3d3000, -0x2a300000},
    {-0x188bc000, -0x18800000}, {-0xff47000, -0xff02000},   {-0x9ebd000, -0x9e00000},   {-0xd3000, -0xc9000},
    {0x4fc000, 0x4fe000},       {0xbd3f000, 0xbdb4000},     {0x37881000, 0x3793f000},   {0x3afcf000, 0x3b000000},
    {0x41bc0000, 0x41c00000},   {0x425a5000, 0x425c9000},   {0x43d14000, 0x43d17000},   {0x44577000, 0x4457d000},
    {0x44cae000, 0x44cba000},   {0x6cc43000, 0x6cc52000},   {0x6eb3c000, 0x6eb3d000},   {0x6f5b8000, 0x6f5bc000},
    {0x7ea7e000, 0x7ea81000},   {0x7eb2c000, 0x7eb31000},   {0x7f613000, 0x7f615000},   {0x7f61f000, 0x7f620000},
};
#define DENSE_HOLE_COUNT (sizeof DENSE_HOLES / sizeof *DENSE_HOLES)

static void dense_fill(int64_t begin, int64_t end) {
    if (begin < end) {
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
        CHECK(mmap((void *)begin, (size_t)(end - begin), PROT_NONE, flags, -1, 0) == (void *)begin); /* NOLINT */
    }
}

static void dense_fill_around_holes(int64_t base, int64_t begin, int64_t end, size_t holes) {
    for (size_t i = 0; i < holes && begin < end; i++) {
        const int64_t hole_begin = base + DENSE_HOLES[i][0], hole_end = base + DENSE_HOLES[i][1];
        dense_fill(begin, hole_begin < end ? hole_begin : end);
        begin = hole_end > begin ? hole_end : begin;
    }
    dense_fill(begin, end);
}

/* Maps all that is free within reach of `base` but the first `holes` of these, and but the room of the main stack. */
static void dense_make(const void *base, size_t holes) {
    static int64_t free_ranges[DENSE_LINES][2]; /* looked up before any is mapped */
    const int64_t middle = (int64_t)(uintptr_t)base;
    int64_t last = middle - DENSE_REACH, begin, end;
    char line[8192];
    size_t count = 0;
    FILE *maps = fopen("/proc/self/maps", "re");
    CHECK(maps != NULL);
    while (fgets(line, sizeof line, maps) != NULL && count < DENSE_LINES) {
        CHECK(sscanf(line, "%lx-%lx", (unsigned long *)&begin, (unsigned long *)&end) == 2);
        const int64_t limit = strstr(line, "[stack]") != NULL ? begin - DENSE_STACK : begin;
        const int64_t highest = limit < middle + DENSE_REACH ? limit : middle + DENSE_REACH;
        if (highest > last) {
            free_ranges[count][0] = last;
            free_ranges[count++][1] = highest;
        }
        last = end > last ? end : last;
    }
    fclose(maps);
    for (size_t i = 0; i < count; i++) {
        dense_fill_around_holes(middle, free_ranges[i][0], free_ranges[i][1], holes);
    }
}

#endif
