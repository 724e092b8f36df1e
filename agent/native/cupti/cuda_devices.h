/* Facts about devices from the CUDA libraries that the process has loaded. Nothing is loaded or initialised. */
#ifndef KINETO_DEVICES_H
#define KINETO_DEVICES_H

#include <stdint.h>

#define DEVICE_ATTRIBUTES 32u
#define DEVICE_NAME_BYTES 256
#define DEVICE_UUID_BYTES 16

enum device_uuid { DEVICE_UUID_UNKNOWN, DEVICE_UUID_GPU, DEVICE_UUID_MIG };

struct device_facts {
    int32_t count;          /* devices; 0 when unknown */
    int32_t driver_version; /* 0: unknown, as below */
    int32_t runtime_version;
    uint32_t known; /* bit i: values[i] is valid */
    uint64_t memory_bytes;
    int32_t values[DEVICE_ATTRIBUTES]; /* of the attributes asked for, in their order */
    char name[DEVICE_NAME_BYTES];      /* ends with NUL; empty: unknown */
    uint8_t uuid[DEVICE_UUID_BYTES];
    uint32_t uuid_of; /* enum device_uuid: whether `uuid` is a GPU's or a MIG instance's */
    uint32_t reserved;
};

/* Device `index` and its `count` CUdevice_attributes (DEVICE_ATTRIBUTES at most). */
void device_describe(uint32_t index, const int32_t *attributes, uint32_t count, struct device_facts *facts);

#endif
