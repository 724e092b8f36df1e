/* Facts about drivers and devices from the process's own Level Zero, checked before PTI is used: PTI calls abort() if
 * it finds none. No library is loaded and nothing is initialised. */
#ifndef KINETO_LEVEL_ZERO_H
#define KINETO_LEVEL_ZERO_H

#include <stddef.h>
#include <stdint.h>

#define LEVEL_ZERO_DEVICES_MOST 32u

/* ze_device_properties_t, ze_pci_ext_properties_t and ze_device_memory_properties_t of the public headers;
 * tests/unit/agent/native/test_level_zero_layouts.py compares them with the compiler. */
struct ze_properties {
    uint32_t type_of_structure;
    void *next;
    uint32_t type, vendor, device, flags, sub_device, core_clock_mhz;
    uint64_t allocation_most;
    uint32_t hardware_contexts, queue_priorities, threads_per_eu, simd_width, eus_per_subslice, subslices_per_slice,
        slices;
    uint64_t timer_resolution;
    uint32_t timestamp_bits, kernel_timestamp_bits;
    uint8_t uuid[16];
    char name[256];
};
struct ze_pci {
    uint32_t type_of_structure;
    void *next;
    uint32_t domain, bus, device, function;
    int64_t speed[2];
};
struct ze_memory {
    uint32_t type_of_structure;
    void *next;
    uint32_t flags, clock_mhz, bus_width;
    uint64_t bytes;
    char name[256];
};

enum level_zero_state {
    LEVEL_ZERO_READY = 0,
    LEVEL_ZERO_ABSENT = 1,           /* no loader is mapped, or no driver is initialised */
    LEVEL_ZERO_NO_DEVICE = 2,        /* no GPU, or handles that change at each call */
    LEVEL_ZERO_NO_TRACING = 3,       /* the loader cannot switch tracing on and off, or its tracing layer is missing */
    LEVEL_ZERO_NO_INTROSPECTION = 4, /* the driver is too old: PTI would never stop tracing */
};

struct level_zero_device {
    void *handle;
    struct ze_properties properties;
    struct ze_pci pci;
    uint64_t memory_bytes; /* 0: unknown */
};

/* Returns which of the states this process is in, with a text for all but the first. */
enum level_zero_state level_zero_look(char *error, size_t error_bytes);
/* The GPUs in the order of the drivers, LEVEL_ZERO_DEVICES_MOST at most. Returns their number. */
uint32_t level_zero_devices(struct level_zero_device *devices);
/* In a forked child, if PTI was recording: makes Level Zero calls bypass it again. An atomic counter of the loader. */
void level_zero_untrace(void);

#endif
