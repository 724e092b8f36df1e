/* See pti_api.h.
 *
 * Theory of operation
 *   A static initialiser of libpti_view sets environment variables that make a libsycl loaded later report to it. We
 *   must not leave them: programs started by this process would be traced because of them. So those that appear while
 *   we load the library are removed again. If the program has loaded it, they are the program's.
 *
 * Threads: the agent's.
 * Blocks: inside the loader.
 */
#define _GNU_SOURCE
#include "pti/pti_api.h"

#include <dlfcn.h>
#include <stdlib.h>

#include "common/error_text.h"

#define LARGEST_RECORD_0 168u /* a kernel */
#define LARGEST_RECORD_1 192u /* a copy between two devices */

static const char *const VARIABLES[] = {"XPTI_SUBSCRIBERS", "XPTI_FRAMEWORK_DISPATCHER", "XPTI_TRACE_ENABLE",
                                        "UR_ENABLE_LAYERS"};
#define VARIABLE_COUNT (sizeof VARIABLES / sizeof *VARIABLES)

static void *load(const char *path) {
    bool was_set[VARIABLE_COUNT];
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (library != NULL) {
        return library;
    }
    for (size_t i = 0; i < VARIABLE_COUNT; i++) {
        was_set[i] = getenv(VARIABLES[i]) != NULL;
    }
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    for (size_t i = 0; i < VARIABLE_COUNT; i++) {
        if (!was_set[i] && getenv(VARIABLES[i]) != NULL) {
            (void)unsetenv(VARIABLES[i]);
        }
    }
    return library;
}

static bool find(const struct pti_api *api, const char *name, void *function) {
    void *found = dlsym(api->library, name);
    memcpy(function, &found, sizeof found); /* ISO C has no cast from data to function pointers */
    return found != NULL;
}

int pti_api_open(struct pti_api *api, const char *path, char *error, size_t error_bytes) {
    memset(api, 0, sizeof *api);
    api->library = load(path);
    if (api->library == NULL) {
        snprintf(error, error_bytes, "libpti_view cannot be loaded: %s", dlerror());
        return KC_LIBRARY;
    }
    const bool complete = find(api, "ptiVersionString", &api->version_string) &&
                          find(api, "ptiViewMemoryTypeToString", &api->memory_type_text) &&
                          find(api, "ptiViewGPULocalAvailable", &api->local_available) &&
                          find(api, "ptiViewSetCallbacks", &api->set_callbacks) &&
                          find(api, "ptiViewEnable", &api->enable) && find(api, "ptiViewDisable", &api->disable) &&
                          find(api, "ptiFlushAllViews", &api->flush) &&
                          find(api, "ptiViewGetNextRecord", &api->next_record) &&
                          find(api, "ptiViewGetApiIdName", &api->call_name) &&
                          find(api, "ptiViewEnableDriverApi", &api->driver_call) &&
                          find(api, "ptiViewEnableDriverApiClass", &api->driver_class) &&
                          find(api, "ptiViewEnableRuntimeApiClass", &api->runtime_class);
    const char *version = api->version_string == NULL ? NULL : api->version_string();
    if (!complete || version == NULL || sscanf(version, "%u.%u", &api->major, &api->minor) != 2) {
        snprintf(error, error_bytes, "%s lacks functions that versions from 0.12 on have", path);
        return KC_LIBRARY;
    }
    return 0;
}

uint32_t pti_largest_record(const struct pti_api *api) { return api->major == 0 ? LARGEST_RECORD_0 : LARGEST_RECORD_1; }

bool pti_core_loads(const struct pti_api *api) {
    return strcmp(api->memory_type_text(PTI_MEMORY_DEVICE), "INVALID") != 0; /* the stub's only answer */
}

const char *pti_result_text(int32_t result) {
    switch (result) {
    case PTI_OK: return "success";
    case PTI_NOT_IMPLEMENTED: return "not implemented, or the core library cannot be loaded";
    case 3: return "bad argument";
    case 4: return "no callbacks are set";
    case 5: return "no external id was pushed";
    case 50: return "the driver failed";
    case 51: return "Level Zero's tracing is not initialised (its tracing layer is missing)";
    case 52: return "the driver has no introspection";
    case 200: return "internal error";
    default: return "unknown result";
    }
}
