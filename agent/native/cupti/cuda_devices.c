/* See cuda_devices.h.
 *
 * Threads: the agent's.
 * Blocks: inside the loader and inside CUDA's query functions, and 0.4 s at most before these.
 */
#define _GNU_SOURCE
#include "cupti/cuda_devices.h"

#include <dlfcn.h>
#include <limits.h>
#include <link.h>
#include <stddef.h>
#include <string.h>

#include "cupti/cupti_gate.h"

struct search {
    const char *stem;
    char path[PATH_MAX];
};

static int match(struct dl_phdr_info *info, size_t bytes, void *user) {
    struct search *search = user;
    (void)bytes;
    const char *slash = strrchr(info->dlpi_name, '/');
    const char *base = slash != NULL ? slash + 1 : info->dlpi_name;
    if (strncmp(base, search->stem, strlen(search->stem)) != 0 || strlen(info->dlpi_name) >= sizeof search->path) {
        return 0;
    }
    strcpy(search->path, info->dlpi_name);
    return 1;
}

/* The library as the process has loaded it, or NULL. */
static void *loaded(const char *stem) {
    struct search search = {.stem = stem};
    return dl_iterate_phdr(match, &search) != 0 ? dlopen(search.path, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD) : NULL;
}

static void *symbol(void *library, const char *name) { return library != NULL ? dlsym(library, name) : NULL; }

static int32_t version(void *library, const char *function) {
    int (*get)(int *) = NULL;
    int number = 0;
    *(void **)&get = symbol(library, function);
    return get != NULL && get(&number) == 0 ? number : 0;
}

/* cuDeviceGetUuid returns the GPU's, cuDeviceGetUuid_v2 (CUDA 11.4) the MIG instance's if the device is one. */
static void read_uuid(void *cuda, int device, struct device_facts *facts) {
    int (*get)(uint8_t *, int) = NULL, (*get_v2)(uint8_t *, int) = NULL;
    uint8_t of_gpu[DEVICE_UUID_BYTES];
    *(void **)&get = symbol(cuda, "cuDeviceGetUuid");
    *(void **)&get_v2 = symbol(cuda, "cuDeviceGetUuid_v2");
    if (get == NULL || get_v2 == NULL || get(of_gpu, device) != 0 || get_v2(facts->uuid, device) != 0) {
        return;
    }
    const int same = memcmp(of_gpu, facts->uuid, sizeof of_gpu) == 0;
    facts->uuid_of = same ? DEVICE_UUID_GPU : DEVICE_UUID_MIG;
}

static void describe(void *cuda, uint32_t index, const int32_t *attributes, uint32_t count,
                     struct device_facts *facts) {
    int (*get_count)(int *) = NULL, (*get)(int *, int) = NULL, (*get_name)(char *, int, int) = NULL;
    int (*get_memory)(size_t *, int) = NULL, (*get_attribute)(int *, int, int) = NULL;
    int device, value;
    size_t memory;
    *(void **)&get_count = symbol(cuda, "cuDeviceGetCount");
    *(void **)&get = symbol(cuda, "cuDeviceGet");
    *(void **)&get_name = symbol(cuda, "cuDeviceGetName");
    *(void **)&get_memory = symbol(cuda, "cuDeviceTotalMem_v2");
    *(void **)&get_attribute = symbol(cuda, "cuDeviceGetAttribute");
    if (get_count == NULL || get == NULL || get_name == NULL || get_memory == NULL || get_attribute == NULL ||
        get_count(&value) != 0) {
        return;
    }
    facts->count = value;
    if ((int64_t)index >= value || get(&device, (int)index) != 0) {
        return;
    }
    if (get_name(facts->name, DEVICE_NAME_BYTES, device) != 0) {
        facts->name[0] = 0;
    }
    facts->name[DEVICE_NAME_BYTES - 1] = 0;
    read_uuid(cuda, device, facts);
    facts->memory_bytes = get_memory(&memory, device) == 0 ? memory : 0;
    for (uint32_t i = 0; i < count && i < DEVICE_ATTRIBUTES; i++) {
        if (get_attribute(&value, attributes[i], device) == 0) {
            facts->values[i] = value;
            facts->known |= 1u << i;
        }
    }
}

void device_describe(uint32_t index, const int32_t *attributes, uint32_t count, struct device_facts *facts) {
    memset(facts, 0, sizeof *facts);
    void *cuda = loaded("libcuda.so"), *runtime = loaded("libcudart.so");
    gate_driver_begin(NULL, NULL);
    facts->driver_version = version(cuda, "cuDriverGetVersion");
    facts->runtime_version = version(runtime, "cudaRuntimeGetVersion");
    describe(cuda, index, attributes, count, facts);
    gate_driver_end();
    if (cuda != NULL) {
        (void)dlclose(cuda); /* the reference added by dlopen */
    }
    if (runtime != NULL) {
        (void)dlclose(runtime);
    }
}
