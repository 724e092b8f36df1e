// What the fake Level Zero driver logs, and how it is steered.
//
// FAKE_LEVEL_ZERO_LOG names a file: a struct fake_log, then entries. The file is made by the driver, or is left from an
// earlier process and then appended to; it is mapped and may be read while the program runs.
// FAKE_LEVEL_ZERO_ENTRIES: how many entries the file holds (default 65536); what comes after them is only counted.
// FAKE_LEVEL_ZERO_DEVICES: how many GPUs there are (default 1, at most 4; 0: a driver without a device).
// FAKE_LEVEL_ZERO_NEW_HANDLES: 1: each zeDeviceGet gives new handles, as Level Zero's null driver does.
// FAKE_LEVEL_ZERO_NO_INTROSPECTION: 1: zeEventPoolGetFlags and its like are not supported, as in drivers before 1.9.
// FAKE_LEVEL_ZERO_HOLD_US: so long do threads other than the first one wait after each piece of work, which has ended by
// then: as if they had lost their processor.
#ifndef KINETO_FAKE_LEVEL_ZERO_H
#define KINETO_FAKE_LEVEL_ZERO_H

#include <stdint.h>

enum fake_entry_kind { FAKE_KERNEL = 1, FAKE_COPY = 2, FAKE_FILL = 3 };

struct fake_log {
    uint64_t count;       // entries written, or meant to be
    uint64_t capacity;    // entries that the file holds
    uint64_t clock_reads; // zeDeviceGetGlobalTimestamps: PTI reads the GPU's clock at each piece of work that it traces
    uint64_t reserved[5];
};

struct fake_entry {
    uint64_t start;    // CLOCK_MONOTONIC_RAW, ns: the clock of the fake device
    uint64_t end;      // likewise
    uint64_t unix_ns;  // CLOCK_REALTIME at `start`, to a microsecond
    uint64_t bytes;    // of copies and fills
    uint32_t kind;     // fake_entry_kind
    uint32_t thread;   // system thread id of the caller
    uint32_t device;   // index of the GPU
    uint32_t complete; // 1: all of the entry is written
    char name[80];     // of the kernel
};

#endif
