/* See cuda_devices.h.
 *
 * Threads: the agent's.
 * Blocks: inside the loader and inside CUDA's query functions, and 0.1 s at most before these.
 */
#define _GNU_SOURCE
#include "cupti/cuda_devices.h"

#include <dlfcn.h>
#include <limits.h>
#include <link.h>
#include <stddef.h>
#include <string.h>

#include "cupti/cupti_gate.h"

#define MAY_WAIT_NS 100000000LL /* for another tool that enters CUPTI */

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

/* CUDA's functions, looked up before any is called. */
struct queries {
    int (*driver_version)(int *);
    int (*runtime_version)(int *);
    int (*count)(int *);
    int (*device)(int *, int);
    int (*name)(char *, int, int);
    int (*memory)(size_t *, int);
    int (*attribute)(int *, int, int);
    int (*uuid)(uint8_t *, int);
    int (*uuid_v2)(uint8_t *, int);
};

static struct queries look_up(void *cuda, void *runtime) {
    struct queries found;
    *(void **)&found.driver_version = symbol(cuda, "cuDriverGetVersion");
    *(void **)&found.runtime_version = symbol(runtime, "cudaRuntimeGetVersion");
    *(void **)&found.count = symbol(cuda, "cuDeviceGetCount");
    *(void **)&found.device = symbol(cuda, "cuDeviceGet");
    *(void **)&found.name = symbol(cuda, "cuDeviceGetName");
    *(void **)&found.memory = symbol(cuda, "cuDeviceTotalMem_v2");
    *(void **)&found.attribute = symbol(cuda, "cuDeviceGetAttribute");
    *(void **)&found.uuid = symbol(cuda, "cuDeviceGetUuid");
    *(void **)&found.uuid_v2 = symbol(cuda, "cuDeviceGetUuid_v2");
    return found;
}

static int32_t version(int (*get)(int *)) {
    int number = 0;
    return get != NULL && get(&number) == 0 ? number : 0;
}

/* cuDeviceGetUuid returns the GPU's, cuDeviceGetUuid_v2 (CUDA 11.4) the MIG instance's if the device is one. */
static void read_uuid(const struct queries *cuda, int device, struct device_facts *facts) {
    uint8_t of_gpu[DEVICE_UUID_BYTES];
    if (cuda->uuid == NULL || cuda->uuid_v2 == NULL || cuda->uuid(of_gpu, device) != 0 ||
        cuda->uuid_v2(facts->uuid, device) != 0) {
        return;
    }
    const int same = memcmp(of_gpu, facts->uuid, sizeof of_gpu) == 0;
    facts->uuid_of = same ? DEVICE_UUID_GPU : DEVICE_UUID_MIG;
}

static void describe(const struct queries *cuda, uint32_t index, const int32_t *attributes, uint32_t count,
                     struct device_facts *facts) {
    int device, value;
    size_t memory;
    if (cuda->count == NULL || cuda->device == NULL || cuda->name == NULL || cuda->memory == NULL ||
        cuda->attribute == NULL || cuda->count(&value) != 0) {
        return;
    }
    facts->count = value;
    if ((int64_t)index >= value || cuda->device(&device, (int)index) != 0) {
        return;
    }
    if (cuda->name(facts->name, DEVICE_NAME_BYTES, device) != 0) {
        facts->name[0] = 0;
    }
    facts->name[DEVICE_NAME_BYTES - 1] = 0;
    read_uuid(cuda, device, facts);
    facts->memory_bytes = cuda->memory(&memory, device) == 0 ? memory : 0;
    for (uint32_t i = 0; i < count && i < DEVICE_ATTRIBUTES; i++) {
        if (cuda->attribute(&value, attributes[i], device) == 0) {
            facts->values[i] = value;
            facts->known |= 1u << i;
        }
    }
}

void device_describe(uint32_t index, const int32_t *attributes, uint32_t count, struct device_facts *facts) {
    int64_t may_wait_ns = MAY_WAIT_NS;
    memset(facts, 0, sizeof *facts);
    void *cuda = loaded("libcuda.so"), *runtime = loaded("libcudart.so");
    const struct queries found = look_up(cuda, runtime);
    gate_driver_begin(&may_wait_ns, NULL, NULL);
    facts->driver_version = version(found.driver_version);
    facts->runtime_version = version(found.runtime_version);
    describe(&found, index, attributes, count, facts);
    gate_driver_end();
    if (cuda != NULL) {
        (void)dlclose(cuda); /* the reference added by dlopen */
    }
    if (runtime != NULL) {
        (void)dlclose(runtime);
    }
}
