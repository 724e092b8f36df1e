/* Memory in a pool and in a file: arrays are made, grown, shrunk and freed in any order; what is in them stays, and none overlap. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/mman.h>

#include "codec/codec.h"
#include "input.h"

#define ARRAYS 16
#define LEAST (64u << 10)
#define POOL (1u << 20)
#define ROOM (4u << 20)
#define LARGEST (640u << 10)

static struct {
    uint8_t *data;
    uint64_t size;
    uint8_t mark;
} arrays[ARRAYS];

/* The two ends of every page carry the mark: to look at all bytes takes too long. */
static void each_end(unsigned slot, uint64_t size, int writes) {
    for (uint64_t at = 0; at < size; at += 4096) {
        uint64_t last = at + 4095 < size ? at + 4095 : size - 1;
        if (writes) {
            arrays[slot].data[at] = arrays[slot].data[last] = arrays[slot].mark;
        }
        expect(arrays[slot].data[at] == arrays[slot].mark, "an array lost what was in it");
        if (last + 1 < size || size == arrays[slot].size) {
            expect(arrays[slot].data[last] == arrays[slot].mark, "an array lost what was at its end");
        }
    }
}

static void filled(unsigned slot, uint8_t *data, uint64_t size) {
    arrays[slot].data = data;
    arrays[slot].size = data ? size : 0;
    each_end(slot, arrays[slot].size, 1);
}

static void make(unsigned slot, uint64_t size, int zeroed) {
    uint8_t *data = zeroed ? kc_spill_calloc(NULL, size, 1) : kc_spill_malloc(NULL, size);
    for (uint64_t at = 0; zeroed && data && at < size; at += 509) {
        expect(data[at] == 0, "an array of zeros that has others");
    }
    filled(slot, data, size);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static int opened;
    if (!opened) {
        int file = memfd_create("spill", MFD_CLOEXEC), statm = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
        expect(kc_spill_pool(POOL, LEAST) == 0, "no pool");
        expect(kc_spill_open(file, statm, ROOM, LEAST, 1u << 20) == 0, "no file");
        opened = 1;
    }
    input_set(data, size);
    while (input.left >= 4) {
        unsigned slot = (unsigned)next(ARRAYS), action = (unsigned)next(4);
        uint64_t bytes = next(65536) * (next(4) ? 1 : LARGEST / 65536);
        if (!arrays[slot].data) {
            arrays[slot].mark = (uint8_t)(action * 64 + slot + 1);
            make(slot, bytes, action & 1);
        } else if (action < 2) {
            uint64_t kept = bytes < arrays[slot].size ? bytes : arrays[slot].size;
            each_end(slot, arrays[slot].size, 0);
            uint8_t *moved = bytes ? kc_spill_realloc(NULL, arrays[slot].data, bytes) : NULL;
            if (moved) {
                arrays[slot].data = moved;
                for (uint64_t at = 0; at < kept; at += 4096) {
                    expect(moved[at] == arrays[slot].mark, "an array lost what was in it on the way");
                }
                filled(slot, moved, bytes);
            }
        } else {
            each_end(slot, arrays[slot].size, 0);
            kc_spill_free(NULL, arrays[slot].data, arrays[slot].size);
            arrays[slot].data = NULL;
        }
    }
    for (unsigned slot = 0; slot < ARRAYS; slot++) {
        if (arrays[slot].data) {
            each_end(slot, arrays[slot].size, 0);
            kc_spill_free(NULL, arrays[slot].data, arrays[slot].size);
        }
        arrays[slot].data = NULL;
    }
    return 0;
}
