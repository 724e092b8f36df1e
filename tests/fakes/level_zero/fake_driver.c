// A Level Zero driver without a GPU, loaded by the real loader through ZE_ENABLE_ALT_DRIVERS.
//
// It answers what Intel's PTI (0.12 to 1.2) asks for and what a program needs to launch kernels, copies and fills on
// immediate command lists. "Work" begins when it is appended, takes a length of its own, and moves no byte. All that was
// launched is logged (fake_driver.h). Every function that is not below answers success and does nothing.
#define _GNU_SOURCE
#include "fake_driver.h"

#include <fcntl.h>
#include <level_zero/ze_api.h>
#include <level_zero/ze_ddi.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "tables.h"

#define DEVICES_MOST 4u
#define ENTRIES_USUAL 65536u
#define REGION_BYTES (1ull << 32) // of addresses, none of it backed by memory
#define REGIONS (2u + DEVICES_MOST)
#define KERNEL_NS 5000u
#define VENDOR_INTEL 0x8086u
#define TICKS_A_SECOND 1000000000u

// Handles begin with a word that the loader and its layers never look at.
struct object {
    struct object *self;
    struct object *parent;
    void *detail;
};

struct event {
    struct event *self;
    ze_event_pool_handle_t pool;
    uint64_t start, end;
    int signalled;
};

enum region { HOST, SHARED, DEVICE }; // DEVICE + index

static struct object the_driver, the_devices[DEVICES_MOST];
static uint32_t device_count = 1, hold_us;
static bool new_handles, no_introspection;
static uint8_t *regions[REGIONS];
static uint64_t region_used[REGIONS];
static struct fake_log *log_file;

static uint64_t now(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

// ---- the log ----

static uint64_t number_from(const char *variable, uint64_t usual) {
    const char *text = getenv(variable);
    return text == NULL || *text == 0 ? usual : strtoull(text, NULL, 10);
}

static void open_log(const char *path) {
    const uint64_t capacity = number_from("FAKE_LEVEL_ZERO_ENTRIES", ENTRIES_USUAL);
    const uint64_t bytes = sizeof(struct fake_log) + capacity * sizeof(struct fake_entry);
    const int descriptor = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (descriptor < 0 || ftruncate(descriptor, (off_t)bytes) != 0) {
        perror(path);
        abort();
    }
    void *mapped = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    close(descriptor);
    if (mapped == MAP_FAILED) {
        perror(path);
        abort();
    }
    log_file = mapped;
    log_file->capacity = capacity;
}

// Unix time at the same moment as *raw, to a microsecond: not across a pause of this thread.
static uint64_t unix_time_at(uint64_t *raw) {
    for (int attempt = 0;; attempt++) {
        *raw = now(CLOCK_MONOTONIC_RAW);
        const uint64_t unix_ns = now(CLOCK_REALTIME);
        if (now(CLOCK_MONOTONIC_RAW) - *raw < 1000 || attempt == 100) {
            return unix_ns;
        }
    }
}

static void work(uint32_t kind, uint32_t device, uint64_t bytes, const char *name, ze_event_handle_t signal) {
    static uint32_t launched;
    const uint32_t number = __atomic_fetch_add(&launched, 1, __ATOMIC_RELAXED);
    uint64_t start;
    const uint64_t unix_ns = unix_time_at(&start);
    const uint64_t end = start + KERNEL_NS + number * 7919u % 4096u; // neighbours differ: a length tells which it is
    struct event *event = (struct event *)signal;
    if (event != NULL) {
        event->start = start;
        event->end = end;
        __atomic_store_n(&event->signalled, 1, __ATOMIC_RELEASE);
    }
    if (hold_us != 0 && gettid() != getpid()) {
        usleep(hold_us);
    }
    if (log_file == NULL || kind == 0) {
        return;
    }
    const uint64_t index = __atomic_fetch_add(&log_file->count, 1, __ATOMIC_RELAXED);
    if (index < log_file->capacity) {
        struct fake_entry *entry = (struct fake_entry *)(log_file + 1) + index;
        entry->start = start;
        entry->end = end;
        entry->unix_ns = unix_ns;
        entry->bytes = bytes;
        entry->kind = kind;
        entry->thread = (uint32_t)gettid();
        entry->device = device;
        snprintf(entry->name, sizeof entry->name, "%s", name);
        __atomic_store_n(&entry->complete, 1, __ATOMIC_RELEASE);
    }
}

// ---- drivers, devices, contexts ----

static struct object *make(void *parent, void *detail) {
    struct object *made = calloc(1, sizeof *made);
    made->self = made;
    made->parent = parent;
    made->detail = detail;
    return made;
}

static uint32_t index_of(ze_device_handle_t device) { return (uint32_t)(uintptr_t)((struct object *)device)->detail; }

static ze_result_t driver_get(uint32_t *count, ze_driver_handle_t *drivers) {
    if (drivers != NULL && *count > 0) {
        drivers[0] = (ze_driver_handle_t)&the_driver;
    }
    *count = 1;
    return ZE_RESULT_SUCCESS;
}

static ze_result_t init_drivers(uint32_t *count, ze_driver_handle_t *drivers, ze_init_driver_type_desc_t *type) {
    return driver_get(count, drivers);
}

static ze_result_t driver_api_version(ze_driver_handle_t driver, ze_api_version_t *version) {
    *version = ZE_API_VERSION_1_9;
    return ZE_RESULT_SUCCESS;
}

static ze_result_t driver_extensions(ze_driver_handle_t driver, uint32_t *count,
                                     ze_driver_extension_properties_t *properties) {
    *count = 0;
    return ZE_RESULT_SUCCESS;
}

static ze_result_t driver_extension_address(ze_driver_handle_t driver, const char *name, void **address) {
    *address = NULL;
    return ZE_RESULT_ERROR_UNSUPPORTED_FEATURE;
}

static ze_result_t device_get(ze_driver_handle_t driver, uint32_t *count, ze_device_handle_t *devices) {
    for (uint32_t i = 0; devices != NULL && i < *count && i < device_count; i++) {
        void *handle = new_handles ? make(driver, (void *)(uintptr_t)i) : &the_devices[i]; // NOLINT
        devices[i] = (ze_device_handle_t)handle;
    }
    *count = device_count;
    return ZE_RESULT_SUCCESS;
}

static ze_result_t no_sub_devices(ze_device_handle_t device, uint32_t *count, ze_device_handle_t *devices) {
    *count = 0;
    return ZE_RESULT_SUCCESS;
}

static ze_result_t device_properties(ze_device_handle_t device, ze_device_properties_t *properties) {
    properties->type = ZE_DEVICE_TYPE_GPU;
    properties->vendorId = VENDOR_INTEL;
    // Ticks a second in the newer structure, ns a tick in the older one.
    properties->timerResolution = properties->stype == ZE_STRUCTURE_TYPE_DEVICE_PROPERTIES_1_2 ? TICKS_A_SECOND : 1;
    properties->kernelTimestampValidBits = properties->timestampValidBits = 64;
    properties->numSlices = 2;
    properties->numSubslicesPerSlice = 4;
    properties->numEUsPerSubslice = 8;
    properties->numThreadsPerEU = 8;
    properties->coreClockRate = 1500;
    memset(properties->uuid.id, (int)(7 + index_of(device)), sizeof properties->uuid.id);
    snprintf(properties->name, sizeof properties->name, "Fake XPU %u", index_of(device));
    return ZE_RESULT_SUCCESS;
}

static ze_result_t device_pci(ze_device_handle_t device, ze_pci_ext_properties_t *properties) {
    properties->address.domain = 0;
    properties->address.bus = 3 + index_of(device);
    properties->address.device = properties->address.function = 0;
    return ZE_RESULT_SUCCESS;
}

static ze_result_t device_timestamps(ze_device_handle_t device, uint64_t *host, uint64_t *gpu) {
    *host = *gpu = now(CLOCK_MONOTONIC_RAW);
    if (log_file != NULL) {
        __atomic_fetch_add(&log_file->clock_reads, 1, __ATOMIC_RELAXED);
    }
    return ZE_RESULT_SUCCESS;
}

static ze_result_t device_peer(ze_device_handle_t device, ze_device_handle_t other, ze_bool_t *can_access) {
    *can_access = 1;
    return ZE_RESULT_SUCCESS;
}

static ze_result_t context_create(ze_driver_handle_t driver, const ze_context_desc_t *how, ze_context_handle_t *made) {
    *made = (ze_context_handle_t)make(driver, NULL);
    return ZE_RESULT_SUCCESS;
}

// ---- events ----

static ze_result_t pool_create(ze_context_handle_t context, const ze_event_pool_desc_t *how, uint32_t devices,
                               ze_device_handle_t *of, ze_event_pool_handle_t *made) {
    *made = (ze_event_pool_handle_t)make(context, (void *)(uintptr_t)how->flags); // NOLINT
    return ZE_RESULT_SUCCESS;
}

static ze_result_t pool_flags(ze_event_pool_handle_t pool, ze_event_pool_flags_t *flags) {
    if (no_introspection) {
        return ZE_RESULT_ERROR_UNSUPPORTED_FEATURE;
    }
    *flags = (ze_event_pool_flags_t)(uintptr_t)((struct object *)pool)->detail;
    return ZE_RESULT_SUCCESS;
}

static ze_result_t event_create(ze_event_pool_handle_t pool, const ze_event_desc_t *how, ze_event_handle_t *made) {
    struct event *event = calloc(1, sizeof *event);
    event->self = event;
    event->pool = pool;
    *made = (ze_event_handle_t)event;
    return ZE_RESULT_SUCCESS;
}

static ze_result_t event_destroy(ze_event_handle_t event) {
    free(event);
    return ZE_RESULT_SUCCESS;
}

static ze_result_t event_pool(ze_event_handle_t event, ze_event_pool_handle_t *pool) {
    *pool = ((struct event *)event)->pool;
    return no_introspection ? ZE_RESULT_ERROR_UNSUPPORTED_FEATURE : ZE_RESULT_SUCCESS;
}

static ze_result_t event_status(ze_event_handle_t event) {
    const bool done = __atomic_load_n(&((struct event *)event)->signalled, __ATOMIC_ACQUIRE);
    return done ? ZE_RESULT_SUCCESS : ZE_RESULT_NOT_READY;
}

static ze_result_t event_reset(ze_event_handle_t event) {
    __atomic_store_n(&((struct event *)event)->signalled, 0, __ATOMIC_RELEASE);
    return ZE_RESULT_SUCCESS;
}

static ze_result_t event_times(ze_event_handle_t handle, ze_kernel_timestamp_result_t *result) {
    const struct event *event = (struct event *)handle;
    memset(result, 0, sizeof *result);
    result->global.kernelStart = result->context.kernelStart = event->start;
    result->global.kernelEnd = result->context.kernelEnd = event->end;
    return ZE_RESULT_SUCCESS;
}

// ---- command lists ----

static ze_result_t list_create(ze_context_handle_t context, ze_device_handle_t device,
                               const ze_command_list_desc_t *how, ze_command_list_handle_t *made) {
    *made = (ze_command_list_handle_t)make(context, device);
    return ZE_RESULT_SUCCESS;
}

static ze_result_t list_create_immediate(ze_context_handle_t context, ze_device_handle_t device,
                                         const ze_command_queue_desc_t *how, ze_command_list_handle_t *made) {
    *made = (ze_command_list_handle_t)make(context, device);
    return ZE_RESULT_SUCCESS;
}

static ze_result_t list_device(ze_command_list_handle_t list, ze_device_handle_t *device) {
    *device = ((struct object *)list)->detail;
    return no_introspection ? ZE_RESULT_ERROR_UNSUPPORTED_FEATURE : ZE_RESULT_SUCCESS;
}

static ze_result_t list_context(ze_command_list_handle_t list, ze_context_handle_t *context) {
    *context = (ze_context_handle_t)((struct object *)list)->parent;
    return no_introspection ? ZE_RESULT_ERROR_UNSUPPORTED_FEATURE : ZE_RESULT_SUCCESS;
}

static ze_result_t list_is_immediate(ze_command_list_handle_t list, ze_bool_t *immediate) {
    *immediate = 1;
    return no_introspection ? ZE_RESULT_ERROR_UNSUPPORTED_FEATURE : ZE_RESULT_SUCCESS;
}

static ze_result_t list_zero(ze_command_list_handle_t list, uint32_t *number) {
    *number = 0;
    return no_introspection ? ZE_RESULT_ERROR_UNSUPPORTED_FEATURE : ZE_RESULT_SUCCESS;
}

static uint32_t device_of(ze_command_list_handle_t list) { return index_of(((struct object *)list)->detail); }

static ze_result_t append_kernel(ze_command_list_handle_t list, ze_kernel_handle_t kernel,
                                 const ze_group_count_t *groups, ze_event_handle_t signal, uint32_t waits,
                                 ze_event_handle_t *wait_for) {
    work(FAKE_KERNEL, device_of(list), 0, ((struct object *)kernel)->detail, signal);
    return ZE_RESULT_SUCCESS;
}

static ze_result_t append_copy(ze_command_list_handle_t list, void *to, const void *from, size_t bytes,
                               ze_event_handle_t signal, uint32_t waits, ze_event_handle_t *wait_for) {
    work(FAKE_COPY, device_of(list), bytes, "", signal);
    return ZE_RESULT_SUCCESS;
}

static ze_result_t append_fill(ze_command_list_handle_t list, void *to, const void *pattern, size_t pattern_bytes,
                               size_t bytes, ze_event_handle_t signal, uint32_t waits, ze_event_handle_t *wait_for) {
    work(FAKE_FILL, device_of(list), bytes, "", signal);
    return ZE_RESULT_SUCCESS;
}

static ze_result_t append_barrier(ze_command_list_handle_t list, ze_event_handle_t signal, uint32_t waits,
                                  ze_event_handle_t *wait_for) {
    work(0, device_of(list), 0, "", signal);
    return ZE_RESULT_SUCCESS;
}

static ze_result_t append_signal(ze_command_list_handle_t list, ze_event_handle_t signal) {
    work(0, device_of(list), 0, "", signal);
    return ZE_RESULT_SUCCESS;
}

// ---- kernels and memory ----

static ze_result_t module_create(ze_context_handle_t context, ze_device_handle_t device, const ze_module_desc_t *how,
                                 ze_module_handle_t *made, ze_module_build_log_handle_t *build_log) {
    *made = (ze_module_handle_t)make(context, device);
    return ZE_RESULT_SUCCESS;
}

static ze_result_t kernel_create(ze_module_handle_t module, const ze_kernel_desc_t *how, ze_kernel_handle_t *made) {
    *made = (ze_kernel_handle_t)make(module, strdup(how->pKernelName == NULL ? "" : how->pKernelName));
    return ZE_RESULT_SUCCESS;
}

static ze_result_t kernel_name(ze_kernel_handle_t kernel, size_t *size, char *name) {
    const char *text = ((struct object *)kernel)->detail;
    if (name != NULL) {
        memcpy(name, text, strlen(text) + 1);
    }
    *size = strlen(text) + 1;
    return ZE_RESULT_SUCCESS;
}

static ze_result_t allocate(uint32_t region, size_t bytes, void **address) {
    const uint64_t aligned = (bytes + 4095) & ~4095ull;
    const uint64_t at = __atomic_fetch_add(&region_used[region], aligned, __ATOMIC_RELAXED);
    if (at + aligned > REGION_BYTES) {
        return ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY;
    }
    *address = regions[region] + at;
    return ZE_RESULT_SUCCESS;
}

static ze_result_t alloc_host(ze_context_handle_t context, const ze_host_mem_alloc_desc_t *how, size_t bytes,
                              size_t alignment, void **address) {
    return allocate(HOST, bytes, address);
}

static ze_result_t alloc_shared(ze_context_handle_t context, const ze_device_mem_alloc_desc_t *how,
                                const ze_host_mem_alloc_desc_t *host, size_t bytes, size_t alignment,
                                ze_device_handle_t device, void **address) {
    return allocate(SHARED, bytes, address);
}

static ze_result_t alloc_device(ze_context_handle_t context, const ze_device_mem_alloc_desc_t *how, size_t bytes,
                                size_t alignment, ze_device_handle_t device, void **address) {
    return allocate(DEVICE + index_of(device), bytes, address);
}

static ze_result_t memory_properties(ze_context_handle_t context, const void *address,
                                     ze_memory_allocation_properties_t *properties, ze_device_handle_t *device) {
    static const ze_memory_type_t types[] = {ZE_MEMORY_TYPE_HOST, ZE_MEMORY_TYPE_SHARED, ZE_MEMORY_TYPE_DEVICE};
    properties->type = ZE_MEMORY_TYPE_UNKNOWN;
    for (uint32_t i = 0; i < REGIONS; i++) {
        const uint8_t *at = address;
        if (at >= regions[i] && at < regions[i] + REGION_BYTES) {
            properties->type = types[i < DEVICE ? i : DEVICE];
            properties->id = 1;
            if (device != NULL && i >= DEVICE) {
                *device = (ze_device_handle_t)&the_devices[i - DEVICE];
            }
        }
    }
    return ZE_RESULT_SUCCESS;
}

// ---- the tables by which the loader finds all this ----

#define TABLE(function, type)                                                  \
    ZE_DLLEXPORT ze_result_t function(ze_api_version_t version, type *table) { \
        fill_table(table, sizeof *table);                                      \
        fill_##type(table);                                                    \
        return ZE_RESULT_SUCCESS;                                              \
    }

static void fill_ze_global_dditable_t(ze_global_dditable_t *table) { table->pfnInitDrivers = init_drivers; }
static void fill_ze_driver_dditable_t(ze_driver_dditable_t *table) {
    table->pfnGet = driver_get;
    table->pfnGetApiVersion = driver_api_version;
    table->pfnGetExtensionProperties = driver_extensions;
    table->pfnGetExtensionFunctionAddress = driver_extension_address;
}
static void fill_ze_device_dditable_t(ze_device_dditable_t *table) {
    table->pfnGet = device_get;
    table->pfnGetSubDevices = no_sub_devices;
    table->pfnGetProperties = device_properties;
    table->pfnPciGetPropertiesExt = device_pci;
    table->pfnGetGlobalTimestamps = device_timestamps;
    table->pfnCanAccessPeer = device_peer;
}
static void fill_ze_context_dditable_t(ze_context_dditable_t *table) { table->pfnCreate = context_create; }
static void fill_ze_command_list_dditable_t(ze_command_list_dditable_t *table) {
    table->pfnCreate = list_create;
    table->pfnCreateImmediate = list_create_immediate;
    table->pfnGetDeviceHandle = list_device;
    table->pfnGetContextHandle = list_context;
    table->pfnIsImmediate = list_is_immediate;
    table->pfnGetOrdinal = list_zero;
    table->pfnImmediateGetIndex = list_zero;
    table->pfnAppendLaunchKernel = append_kernel;
    table->pfnAppendMemoryCopy = append_copy;
    table->pfnAppendMemoryFill = append_fill;
    table->pfnAppendBarrier = append_barrier;
    table->pfnAppendSignalEvent = append_signal;
}
static void fill_ze_event_pool_dditable_t(ze_event_pool_dditable_t *table) {
    table->pfnCreate = pool_create;
    table->pfnGetFlags = pool_flags;
}
static void fill_ze_event_dditable_t(ze_event_dditable_t *table) {
    table->pfnCreate = event_create;
    table->pfnDestroy = event_destroy;
    table->pfnGetEventPool = event_pool;
    table->pfnQueryStatus = event_status;
    table->pfnHostReset = event_reset;
    table->pfnQueryKernelTimestamp = event_times;
}
static void fill_ze_module_dditable_t(ze_module_dditable_t *table) { table->pfnCreate = module_create; }
static void fill_ze_kernel_dditable_t(ze_kernel_dditable_t *table) {
    table->pfnCreate = kernel_create;
    table->pfnGetName = kernel_name;
}
static void fill_ze_mem_dditable_t(ze_mem_dditable_t *table) {
    table->pfnAllocHost = alloc_host;
    table->pfnAllocShared = alloc_shared;
    table->pfnAllocDevice = alloc_device;
    table->pfnGetAllocProperties = memory_properties;
}

TABLE(zeGetGlobalProcAddrTable, ze_global_dditable_t)
TABLE(zeGetDriverProcAddrTable, ze_driver_dditable_t)
TABLE(zeGetDeviceProcAddrTable, ze_device_dditable_t)
TABLE(zeGetContextProcAddrTable, ze_context_dditable_t)
TABLE(zeGetCommandListProcAddrTable, ze_command_list_dditable_t)
TABLE(zeGetEventPoolProcAddrTable, ze_event_pool_dditable_t)
TABLE(zeGetEventProcAddrTable, ze_event_dditable_t)
TABLE(zeGetModuleProcAddrTable, ze_module_dditable_t)
TABLE(zeGetKernelProcAddrTable, ze_kernel_dditable_t)
TABLE(zeGetMemProcAddrTable, ze_mem_dditable_t)

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("FAKE_LEVEL_ZERO_LOG");
    device_count = (uint32_t)number_from("FAKE_LEVEL_ZERO_DEVICES", 1);
    device_count = device_count > DEVICES_MOST ? DEVICES_MOST : device_count;
    hold_us = (uint32_t)number_from("FAKE_LEVEL_ZERO_HOLD_US", 0);
    new_handles = number_from("FAKE_LEVEL_ZERO_NEW_HANDLES", 0) != 0;
    no_introspection = number_from("FAKE_LEVEL_ZERO_NO_INTROSPECTION", 0) != 0;
    for (uint32_t i = 0; i < DEVICES_MOST; i++) {
        the_devices[i] = (struct object){
            .self = &the_devices[i], .parent = &the_driver, .detail = (void *)(uintptr_t)i};
    }
    for (uint32_t i = 0; i < REGIONS; i++) {
        void *place = mmap(NULL, REGION_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        regions[i] = place == MAP_FAILED ? NULL : place;
    }
    if (path != NULL && *path != 0) {
        open_log(path);
    }
}
