/* See level_zero.h.
 *
 * Threads: the agent's; level_zero_untrace on the one that forked.
 * Blocks: inside Level Zero's query functions.
 */
#define _GNU_SOURCE
#include "pti/level_zero.h"

#include <dlfcn.h>
#include <limits.h>
#include <link.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LOADER "libze_loader.so.1"
#define TRACING_LAYER "libze_tracing_layer.so.1"
#define DRIVERS_MOST 8u
#define MEMORIES_MOST 8u
#define TYPE_GPU 1u
/* ze_structure_type_t */
#define DEVICE_PROPERTIES 0x3u
#define MEMORY_PROPERTIES 0x7u
#define CONTEXT_DESCRIPTION 0xdu
#define EVENT_POOL_DESCRIPTION 0x10u
#define PCI_PROPERTIES 0x10008u

typedef int32_t result;

struct description {
    uint32_t type;
    const void *next;
    uint32_t flags;
    uint32_t count; /* of events */
};

static struct {
    void *loader;
    result (*driver_get)(uint32_t *, void **);
    result (*device_get)(void *, uint32_t *, void **);
    result (*device_properties)(void *, struct ze_properties *);
    result (*device_pci)(void *, struct ze_pci *);
    result (*device_memory)(void *, uint32_t *, struct ze_memory *);
    result (*context_create)(void *, const struct description *, void **);
    result (*context_destroy)(void *);
    result (*pool_create)(void *, const struct description *, uint32_t, void **, void **);
    result (*pool_flags)(void *, uint32_t *);
    result (*pool_destroy)(void *);
    result (*tracing_on)(void);
    result (*tracing_off)(void);
} ze;

static void find(const char *name, void *function) {
    void *found = dlsym(ze.loader, name);
    memcpy(function, &found, sizeof found); /* ISO C has no cast from data to function pointers */
}

static bool open_loader(void) {
    if (ze.loader != NULL) {
        return true;
    }
    ze.loader = dlopen(LOADER, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (ze.loader == NULL) {
        return false;
    }
    find("zeDriverGet", &ze.driver_get);
    find("zeDeviceGet", &ze.device_get);
    find("zeDeviceGetProperties", &ze.device_properties);
    find("zeDevicePciGetPropertiesExt", &ze.device_pci);
    find("zeDeviceGetMemoryProperties", &ze.device_memory);
    find("zeContextCreate", &ze.context_create);
    find("zeContextDestroy", &ze.context_destroy);
    find("zeEventPoolCreate", &ze.pool_create);
    find("zeEventPoolGetFlags", &ze.pool_flags);
    find("zeEventPoolDestroy", &ze.pool_destroy);
    find("zelEnableTracingLayer", &ze.tracing_on);
    find("zelDisableTracingLayer", &ze.tracing_off);
    return true;
}

static bool has_queries(void) {
    return ze.driver_get != NULL && ze.device_get != NULL && ze.device_properties != NULL &&
           ze.context_create != NULL && ze.context_destroy != NULL && ze.pool_create != NULL && ze.pool_destroy != NULL;
}

static uint32_t drivers(void **found) {
    uint32_t count = DRIVERS_MOST;
    return has_queries() && ze.driver_get(&count, found) == 0 ? (count < DRIVERS_MOST ? count : DRIVERS_MOST) : 0;
}

/* The GPUs of one driver; false: its handles change at the second call, and PTI knows only the first ones. */
static bool gpus_of(void *driver, void **gpus, uint32_t *count) {
    void *first[LEVEL_ZERO_DEVICES_MOST] = {NULL}, *second[LEVEL_ZERO_DEVICES_MOST] = {NULL};
    uint32_t found = LEVEL_ZERO_DEVICES_MOST, again = LEVEL_ZERO_DEVICES_MOST;
    if (ze.device_get(driver, &found, first) != 0 || ze.device_get(driver, &again, second) != 0) {
        return true;
    }
    found = found < LEVEL_ZERO_DEVICES_MOST ? found : LEVEL_ZERO_DEVICES_MOST;
    for (uint32_t i = 0; i < found; i++) {
        struct ze_properties properties = {.type_of_structure = DEVICE_PROPERTIES};
        if (first[i] != second[i]) {
            return false;
        }
        if (*count < LEVEL_ZERO_DEVICES_MOST && ze.device_properties(first[i], &properties) == 0 &&
            properties.type == TYPE_GPU) {
            gpus[(*count)++] = first[i];
        }
    }
    return true;
}

/* Does what PTI itself does to find out whether it may trace on demand. */
static bool introspects(void *driver) {
    const struct description context_how = {.type = CONTEXT_DESCRIPTION};
    const struct description pool_how = {.type = EVENT_POOL_DESCRIPTION, .count = 1};
    void *context = NULL, *pool = NULL;
    uint32_t flags = 0;
    if (ze.pool_flags == NULL || ze.context_create(driver, &context_how, &context) != 0) {
        return false;
    }
    const bool made = ze.pool_create(context, &pool_how, 0, NULL, &pool) == 0;
    const bool told = made && ze.pool_flags(pool, &flags) == 0;
    if (made) {
        (void)ze.pool_destroy(pool);
    }
    (void)ze.context_destroy(context);
    return told;
}

static bool has_tracing_layer(void) {
    struct link_map *map = NULL;
    char path[PATH_MAX];
    void *layer = dlopen(TRACING_LAYER, RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD);
    if (layer != NULL) {
        dlclose(layer);
        return true;
    }
    if (dlinfo(ze.loader, RTLD_DI_LINKMAP, &map) != 0 || map == NULL) {
        return false;
    }
    const char *slash = strrchr(map->l_name, '/');
    const int folder = slash == NULL ? 0 : (int)(slash - map->l_name);
    const int length = snprintf(path, sizeof path, "%.*s/" TRACING_LAYER, folder, map->l_name);
    return length > 0 && (size_t)length < sizeof path && access(path, R_OK) == 0;
}

static enum level_zero_state say(enum level_zero_state state, const char *text, char *error, size_t error_bytes) {
    snprintf(error, error_bytes, "%s", text);
    return state;
}

enum level_zero_state level_zero_look(char *error, size_t error_bytes) {
    void *driver[DRIVERS_MOST] = {NULL}, *gpus[LEVEL_ZERO_DEVICES_MOST];
    uint32_t count = 0;
    if (!open_loader()) {
        return say(LEVEL_ZERO_ABSENT, "the process has not loaded Level Zero (" LOADER ")", error, error_bytes);
    }
    const uint32_t driver_count = drivers(driver);
    if (driver_count == 0) {
        return say(LEVEL_ZERO_ABSENT, "the process has not initialised a Level Zero driver", error, error_bytes);
    }
    for (uint32_t i = 0; i < driver_count; i++) {
        if (!gpus_of(driver[i], gpus, &count)) {
            return say(LEVEL_ZERO_NO_DEVICE,
                       "its Level Zero driver gives devices new handles at each call, for which PTI "
                       "ends the process",
                       error, error_bytes);
        }
    }
    if (count == 0) {
        return say(LEVEL_ZERO_NO_DEVICE, "its Level Zero drivers have no GPU", error, error_bytes);
    }
    if (ze.tracing_on == NULL || ze.tracing_off == NULL) {
        return say(LEVEL_ZERO_NO_TRACING,
                   "its Level Zero loader is older than 1.16.15 and cannot begin to trace in a "
                   "running process",
                   error, error_bytes);
    }
    if (!has_tracing_layer()) {
        return say(LEVEL_ZERO_NO_TRACING, "Level Zero's tracing layer (" TRACING_LAYER ") is not installed", error,
                   error_bytes);
    }
    const char *mode = getenv("PTI_COLLECTION_MODE");
    if (mode != NULL && *mode != 0 && strcmp(mode, "2") != 0) {
        return say(LEVEL_ZERO_NO_INTROSPECTION,
                   "PTI_COLLECTION_MODE has PTI trace all the time: a capture could not end "
                   "it; start the program without that variable",
                   error, error_bytes);
    }
    if (!introspects(driver[0])) {
        return say(LEVEL_ZERO_NO_INTROSPECTION,
                   "its driver lacks Level Zero's introspection (1.9), so that PTI could "
                   "never stop to trace again",
                   error, error_bytes);
    }
    return LEVEL_ZERO_READY;
}

static uint64_t memory_of(void *device) {
    struct ze_memory memories[MEMORIES_MOST] = {0};
    uint32_t count = 0;
    uint64_t bytes = 0;
    if (ze.device_memory == NULL || ze.device_memory(device, &count, NULL) != 0 || count > MEMORIES_MOST) {
        return 0;
    }
    for (uint32_t i = 0; i < count; i++) {
        memories[i].type_of_structure = MEMORY_PROPERTIES;
    }
    if (count == 0 || ze.device_memory(device, &count, memories) != 0) {
        return 0;
    }
    for (uint32_t i = 0; i < count && i < MEMORIES_MOST; i++) {
        bytes += memories[i].bytes;
    }
    return bytes;
}

uint32_t level_zero_devices(struct level_zero_device *devices) {
    void *driver[DRIVERS_MOST] = {NULL}, *gpus[LEVEL_ZERO_DEVICES_MOST];
    uint32_t count = 0;
    const uint32_t driver_count = open_loader() ? drivers(driver) : 0;
    for (uint32_t i = 0; i < driver_count; i++) {
        (void)gpus_of(driver[i], gpus, &count);
    }
    for (uint32_t i = 0; i < count; i++) {
        memset(&devices[i], 0, sizeof devices[i]);
        devices[i].handle = gpus[i];
        devices[i].properties.type_of_structure = DEVICE_PROPERTIES;
        devices[i].pci.type_of_structure = PCI_PROPERTIES;
        (void)ze.device_properties(gpus[i], &devices[i].properties);
        if (ze.device_pci != NULL) {
            (void)ze.device_pci(gpus[i], &devices[i].pci);
        }
        devices[i].memory_bytes = memory_of(gpus[i]);
    }
    return count;
}

void level_zero_untrace(void) {
    if (ze.tracing_off != NULL) {
        (void)ze.tracing_off();
    }
}
