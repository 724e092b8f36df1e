/* Resolving rocprofiler-sdk's functions, and checking that its interface is known. See rocprofiler_api.h.
 *
 * Threads: the agent's.
 * Blocks: inside the loader, when the library is opened.
 */
#define _GNU_SOURCE
#include "rocprofiler/rocprofiler_api.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

static const struct {
    bool buffered;
    int kind;
    const char *name;
} KINDS[] = {
    {false, ROCP_CALLBACK_HIP_RUNTIME, "HIP_RUNTIME_API"},      {false, ROCP_CALLBACK_HIP_COMPILER, "HIP_COMPILER_API"},
    {false, ROCP_CALLBACK_CODE_OBJECT, "CODE_OBJECT"},          {true, ROCP_BUFFER_HSA_CORE, "HSA_CORE_API"},
    {true, ROCP_BUFFER_HSA_AMD_EXT, "HSA_AMD_EXT_API"},         {true, ROCP_BUFFER_MEMORY_COPY, "MEMORY_COPY"},
    {true, ROCP_BUFFER_KERNEL_DISPATCH, "KERNEL_DISPATCH"},     {true, ROCP_BUFFER_SCRATCH_MEMORY, "SCRATCH_MEMORY"},
    {true, ROCP_BUFFER_MEMORY_ALLOCATION, "MEMORY_ALLOCATION"},
};

static int resolve(void *library, const char *path, const char *symbol, void *function, char *error,
                   size_t error_bytes) {
    void *found = dlsym(library, symbol);
    if (found == NULL) {
        snprintf(error, error_bytes, "%s has no symbol %s: it is not rocprofiler-sdk 1.0 or later", path, symbol);
        return -1;
    }
    memcpy(function, &found, sizeof found); /* ISO C has no cast from data to function pointers */
    return 0;
}

/* The numbers of kinds may change with a major version; their names identify them. */
static int compare_kinds(const struct rocp_api *api, const char *path, char *error, size_t error_bytes) {
    for (size_t i = 0; i < sizeof KINDS / sizeof *KINDS; i++) {
        const char *name = NULL;
        uint64_t length = 0;
        const rocp_status status = KINDS[i].buffered ? api->buffer_kind_name(KINDS[i].kind, &name, &length)
                                                     : api->callback_kind_name(KINDS[i].kind, &name, &length);
        if (status != ROCP_SUCCESS || name == NULL || strcmp(name, KINDS[i].name) != 0) {
            snprintf(error, error_bytes,
                     "%s numbers its records in a way that this agent does not know: kind %d is %s there, not %s", path,
                     KINDS[i].kind, name == NULL ? "nothing" : name, KINDS[i].name);
            return -1;
        }
    }
    return 0;
}

int rocprofiler_api_open(struct rocp_api *api, const char *path, uint64_t *version, char *error, size_t error_bytes) {
    uint32_t major = 0, minor = 0, patch = 0;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (library == NULL) { /* global: the runtime that initialises next looks for it among the loaded libraries */
        library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    }
    if (library == NULL) {
        const char *why = dlerror();
        snprintf(error, error_bytes, "cannot open %s: %s", path, why != NULL ? why : "unknown reason");
        return -1;
    }
#define ROCP_RESOLVE(field, symbol, parameters)                                 \
    if (resolve(library, path, symbol, &api->field, error, error_bytes) != 0) { \
        return -1;                                                              \
    }
    ROCP_FUNCTIONS(ROCP_RESOLVE)
#undef ROCP_RESOLVE
    if (resolve(library, path, "rocprofiler_get_status_string", &api->status_text, error, error_bytes) != 0) {
        return -1;
    }
    api->library = library;
    if (api->get_version(&major, &minor, &patch) != ROCP_SUCCESS) {
        snprintf(error, error_bytes, "%s does not tell its version", path);
        return -1;
    }
    *version = 10000ull * major + 100ull * minor + patch;
    return major == 0 ? 0 : compare_kinds(api, path, error, error_bytes); /* 0.x: the caller knows that it is too old */
}
