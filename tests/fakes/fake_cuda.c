/* A libcuda without a GPU: one device's properties, as an H200 gives them, and the driver's version. */
#include <stddef.h>
#include <stdio.h>

static const struct {
    int attribute;
    int value;
} ATTRIBUTES[] = {
    {1, 1024},    /* threads per block */
    {8, 49152},   /* shared memory per block */
    {10, 32},     /* warp size */
    {12, 65536},  /* registers per block */
    {16, 132},    /* multiprocessors */
    {39, 2048},   /* threads per multiprocessor */
    {75, 9},      /* compute capability, major */
    {76, 0},      /* and minor */
    {81, 233472}, /* shared memory per multiprocessor */
    {82, 65536},  /* registers per multiprocessor */
    {97, 232448}, /* shared memory per block, opt-in */
};

int cuDriverGetVersion(int *version) {
    *version = 13000;
    return 0;
}

int cuDeviceGetCount(int *count) {
    *count = 1;
    return 0;
}

int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return ordinal == 0 ? 0 : 101;
}

int cuDeviceGetName(char *name, int bytes, int device) {
    (void)device;
    snprintf(name, (size_t)bytes, "Fake H200");
    return 0;
}

int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    (void)device;
    *bytes = (size_t)141 << 30;
    return 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    for (size_t i = 0; i < sizeof ATTRIBUTES / sizeof *ATTRIBUTES; i++) {
        if (ATTRIBUTES[i].attribute == attribute) {
            *value = ATTRIBUTES[i].value;
            return 0;
        }
    }
    return 1;
}
