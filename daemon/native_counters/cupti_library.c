/* Loads libcupti and the driver, and describes the GPUs. Run by the threads of kinetod-counters; may block in the driver,
 * and in the lock `setup` while another thread does. */
#define _GNU_SOURCE
#include "cupti_library.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* cuptiGetVersion: 24 is CUDA 12.6, 26 12.8, 28 12.9; 130001 and so on since. Before 12.8 there is no mode of the
 * hardware's buffer but KEEP_OLDEST, which ends the sampling for good when it overflows. */
#define VERSION_LEAST 26u
#define VERSION_13_1 130100u
#define VERSION_13_2 130200u

uint32_t kn_abi_version(void) { return KN_ABI_VERSION; }
uint32_t kn_version(const kn_library *library) { return library->version; }
uint32_t kn_device_count(const kn_library *library) { return library->device_count; }

int kn_fail(kn_failure *failure, int32_t kind, int32_t result, const char *call, const char *text) {
    failure->kind = kind;
    failure->result = result;
    snprintf(failure->call, sizeof failure->call, "%s", call);
    snprintf(failure->text, sizeof failure->text, "%s", text);
    return -1;
}

int kn_fail_cupti(const struct kn_library *library, kn_failure *failure, int result, const char *call) {
    const char *text = NULL;
    if (library->cuptiGetResultString != NULL && library->cuptiGetResultString(result, &text) != CUPTI_OK) {
        text = NULL;
    }
    return kn_fail(failure, KN_CUPTI, result, call, text != NULL ? text : "unknown result");
}

/* The two libraries beside libcupti that it opens by name: of this very version, they must be loaded before. Where they
 * are not beside it, the linker finds them, or CUPTI says that it cannot. */
static void preload(const char *cupti) {
    static const char *const beside[] = {"libnvperf_target.so", "libnvperf_host.so"};
    const char *slash = strrchr(cupti, '/');
    if (slash == NULL) {
        return;
    }
    for (size_t i = 0; i < sizeof beside / sizeof *beside; i++) {
        char path[4096];
        int length = snprintf(path, sizeof path, "%.*s/%s", (int)(slash - cupti), cupti, beside[i]);
        if (length > 0 && (size_t)length < sizeof path) {
            dlopen(path, RTLD_NOW | RTLD_GLOBAL);
        }
    }
}

static int find(void *handle, const char *name, void *function, kn_failure *failure, const char *advice) {
    void *found = dlsym(handle, name);
    memcpy(function, &found, sizeof found);
    return found != NULL ? 0 : kn_fail(failure, KN_LOADING, 0, name, advice);
}

static int load_driver(struct kn_library *library, void *handle, kn_failure *failure) {
    static const char advice[] = "the driver's libcuda has no such function";
    int (*initialise)(unsigned), (*count_of)(int *), (*device_of)(int *, int);
    if (find(handle, "cuInit", &initialise, failure, advice) ||
        find(handle, "cuDeviceGetCount", &count_of, failure, advice) ||
        find(handle, "cuDeviceGet", &device_of, failure, advice) ||
        find(handle, "cuDeviceGetName", &library->cuDeviceGetName, failure, advice) ||
        find(handle, "cuDeviceGetPCIBusId", &library->cuDeviceGetPCIBusId, failure, advice)) {
        return -1;
    }
    /* The second version tells instances of MIG apart. */
    if (find(handle, "cuDeviceGetUuid_v2", &library->cuDeviceGetUuid, failure, advice) &&
        find(handle, "cuDeviceGetUuid", &library->cuDeviceGetUuid, failure, advice)) {
        return -1;
    }
    int result = initialise(0), count = 0;
    if (result != 0) {
        return kn_fail(failure, KN_DRIVER, result, "cuInit", "the driver cannot be used");
    }
    if ((result = count_of(&count)) != 0) {
        return kn_fail(failure, KN_DRIVER, result, "cuDeviceGetCount", "the driver cannot count its GPUs");
    }
    library->device_count = count < (int)KN_DEVICES_MOST ? (uint32_t)count : KN_DEVICES_MOST;
    for (uint32_t i = 0; i < library->device_count; i++) {
        if ((result = device_of(&library->gpus[i].handle, (int)i)) != 0) {
            return kn_fail(failure, KN_DRIVER, result, "cuDeviceGet", "the driver cannot open a GPU that it counts");
        }
    }
    return 0;
}

static int load_cupti(struct kn_library *library, void *handle, kn_failure *failure) {
    int (*version_of)(uint32_t *);
    if (find(handle, "cuptiGetVersion", &version_of, failure, "this is no libcupti")) {
        return -1;
    }
    int result = version_of(&library->version);
    if (result != CUPTI_OK) {
        return kn_fail_cupti(library, failure, result, "cuptiGetVersion");
    }
    if (library->version < VERSION_LEAST) {
        char text[128];
        snprintf(text, sizeof text, "version %u is older than 26, which CUDA 12.8 has", library->version);
        return kn_fail(failure, KN_LOADING, 0, "cuptiGetVersion", text);
    }
    void *text_of = dlsym(handle, "cuptiGetResultString");
    memcpy(&library->cuptiGetResultString, &text_of, sizeof text_of);
    library->host_bytes = library->version >= VERSION_13_2 ? STRUCT_BYTES(host_parameters, set)
                                                           : STRUCT_BYTES(host_parameters, host);
    library->properties_bytes = library->version >= VERSION_13_1 ? STRUCT_BYTES(properties_parameters, scope)
                                                                 : STRUCT_BYTES(properties_parameters, type);
    library->supported_bytes = library->version >= VERSION_13_1 ? STRUCT_BYTES(supported_parameters, sku)
                                                                : STRUCT_BYTES(supported_parameters, api);
#define FIND(name)                                                                                                    \
    if (find(handle, #name, &library->name, failure, "this libcupti has no PM sampling; CUDA 12.8 and later have")) { \
        return -1;                                                                                                    \
    }
    CUPTI_FUNCTIONS(FIND)
#undef FIND
    struct initialize_parameters begin = {.bytes = sizeof begin};
    result = library->cuptiProfilerInitialize(&begin);
    return result == CUPTI_OK ? 0 : kn_fail_cupti(library, failure, result, "cuptiProfilerInitialize");
}

/* Asked once, before the first session of a GPU: it can fail while one is active. */
static void look_at(struct kn_library *library, uint32_t device) {
    struct gpu *gpu = &library->gpus[device];
    struct chip_parameters chip = {.bytes = sizeof chip, .device = device};
    if (library->cuptiDeviceGetChipName(&chip) == CUPTI_OK && chip.name != NULL) {
        snprintf(gpu->chip, sizeof gpu->chip, "%s", chip.name);
    }
    struct availability_parameters asked = {.bytes = sizeof asked, .device = device};
    gpu->availability = library->cuptiPmSamplingGetCounterAvailability(&asked);
    if (gpu->availability != CUPTI_OK || (asked.image = malloc(asked.image_bytes)) == NULL) {
        return;
    }
    gpu->availability = library->cuptiPmSamplingGetCounterAvailability(&asked);
    if (gpu->availability == CUPTI_OK) {
        gpu->image = asked.image;
    } else {
        free(asked.image);
    }
}

kn_library *kn_open(const char *cuda, const char *cupti, kn_failure *failure) {
    memset(failure, 0, sizeof *failure);
    struct kn_library *library = calloc(1, sizeof *library);
    if (library == NULL) {
        kn_fail(failure, KN_SYSTEM, ENOMEM, "calloc", strerror(ENOMEM));
        return NULL;
    }
    void *driver = dlopen(cuda, RTLD_NOW | RTLD_GLOBAL);
    if (driver == NULL) {
        kn_fail(failure, KN_LOADING, 0, "libcuda", dlerror());
    } else if (load_driver(library, driver, failure) == 0) {
        preload(cupti);
        void *handle = dlopen(cupti, RTLD_NOW | RTLD_LOCAL);
        if (handle == NULL) {
            kn_fail(failure, KN_LOADING, 0, "libcupti", dlerror());
        } else if (load_cupti(library, handle, failure) == 0) {
            pthread_mutex_init(&library->setup, NULL);
            for (uint32_t i = 0; i < library->device_count; i++) {
                look_at(library, i);
            }
            return library;
        }
    }
    free(library); /* the libraries stay: CUPTI survives no second loading */
    return NULL;
}

int kn_describe(kn_library *library, uint32_t device, kn_device *found, kn_failure *failure) {
    memset(found, 0, sizeof *found);
    if (device >= library->device_count) {
        return kn_fail(failure, KN_SYSTEM, EINVAL, "kn_describe", "there is no such GPU");
    }
    struct gpu *gpu = &library->gpus[device];
    int result = library->cuDeviceGetUuid(found->uuid, gpu->handle);
    if (result != 0) {
        return kn_fail(failure, KN_DRIVER, result, "cuDeviceGetUuid", "the GPU cannot be told from others");
    }
    library->cuDeviceGetName(found->name, sizeof found->name - 1, gpu->handle);
    library->cuDeviceGetPCIBusId(found->pci_bus_id, sizeof found->pci_bus_id - 1, gpu->handle);
    memcpy(found->chip, gpu->chip, sizeof found->chip);
    found->availability = gpu->availability;
    struct supported_parameters asked = {
        .bytes = library->supported_bytes, .device = gpu->handle, .api = PROFILER_API_PM_SAMPLING};
    pthread_mutex_lock(&library->setup);
    result = library->cuptiProfilerDeviceSupported(&asked);
    pthread_mutex_unlock(&library->setup);
    if (result == CUPTI_OK) {
        found->supported = asked.supported;
        found->architecture = asked.architecture;
        found->sli = asked.sli;
        found->vgpu = asked.vgpu;
        found->confidential_compute = asked.confidential_compute;
        found->mining = asked.mining;
        found->wsl = asked.wsl;
    }
    return 0;
}
