/* Resolving CUPTI's functions from the copy that the process has loaded. See cupti_api.h.
 *
 * Threads: the agent's.
 * Blocks: inside the loader, when libcupti is opened.
 */
#define _GNU_SOURCE
#include "cupti/cupti_api.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static int resolve(void *library, const char *path, const char *symbol, void *function, char *error,
                   size_t error_bytes) {
    void *found = dlsym(library, symbol);
    if (found == NULL) {
        snprintf(error, error_bytes, "%s has no symbol %s: it is not a CUPTI from CUDA 12 or later", path, symbol);
        return -1;
    }
    memcpy(function, &found, sizeof found); /* ISO C has no cast from data to function pointers */
    return 0;
}

int cupti_api_open(struct cupti_api *api, const char *path, char *error, size_t error_bytes) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (library == NULL) {
        library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    }
    if (library == NULL) {
        const char *why = dlerror();
        snprintf(error, error_bytes, "cannot open %s: %s", path, why != NULL ? why : "unknown reason");
        return -1;
    }
#define CUPTI_RESOLVE(field, symbol, parameters)                                \
    if (resolve(library, path, symbol, &api->field, error, error_bytes) != 0) { \
        return -1;                                                              \
    }
    CUPTI_FUNCTIONS(CUPTI_RESOLVE)
#undef CUPTI_RESOLVE
    void *newer = dlsym(library, "cuptiActivityGetEnabledKinds");
    memcpy(&api->get_enabled_kinds, &newer, sizeof newer);
    api->library = library;
    return 0; /* the library stays open: CUPTI must never be unloaded while attached */
}
