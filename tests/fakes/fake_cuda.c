/* A libcuda without a GPU: devices' properties, as an H200 gives them, and the driver's version.
 *
 * FAKE_CUDA_VISIBLE: the host's numbers of the GPUs that this process sees, such as "10"; otherwise "0". Their UUIDs are
 * those of fake_pm_sampling.c. FAKE_CUDA_MIG: they are MIG instances. FAKE_CUDA_UUID: "none": a driver without UUIDs.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

static const char *visible(void) {
    const char *numbers = getenv("FAKE_CUDA_VISIBLE");
    return numbers != NULL ? numbers : "0";
}

int cuDeviceGetCount(int *count) {
    *count = (int)strlen(visible());
    return 0;
}

int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return ordinal >= 0 && (size_t)ordinal < strlen(visible()) ? 0 : 101;
}

int cuDeviceGetUuid(uint8_t uuid[16], int device) {
    memset(uuid, 0, 16);
    uuid[0] = 0xfa;
    uuid[15] = (uint8_t)(visible()[device] - '0');
    return getenv("FAKE_CUDA_UUID") != NULL ? 1 : 0;
}

int cuDeviceGetUuid_v2(uint8_t uuid[16], int device) {
    const int result = cuDeviceGetUuid(uuid, device);
    uuid[7] = getenv("FAKE_CUDA_MIG") != NULL ? 1 : 0;
    return result;
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
