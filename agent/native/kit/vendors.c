/* See vendors.h. A vendor in this library is one row of OWN.
 *
 * Threads: the agent's.
 * Blocks: inside the loader while a plug-in is loaded.
 */
#define _GNU_SOURCE
#include "kit/vendors.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "pti/vendor.h"
#include "rocprofiler/rocprofiler_vendor.h"

static const struct kit_vendor *const OWN[] = {
    &PTI_VENDOR,
    &rocprofiler_vendor,
    NULL, /* the last */
};

static const struct kit_vendor *refuse_plugin(const char *path, const char *why, char *error, size_t error_bytes) {
    snprintf(error, error_bytes, "the plug-in %s cannot be used: %s", path, why);
    return NULL;
}

static const struct kit_vendor *load_plugin(const char *path, char *error, size_t error_bytes) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (library == NULL) {
        const char *why = dlerror();
        return refuse_plugin(path, why != NULL ? why : "the loader gives no reason", error, error_bytes);
    }
    kit_plugin plugin;
    void *found = dlsym(library, KIT_PLUGIN_SYMBOL);
    if (found == NULL) {
        return refuse_plugin(path, "it has no function " KIT_PLUGIN_SYMBOL, error, error_bytes);
    }
    memcpy(&plugin, &found, sizeof plugin); /* ISO C has no cast from data to function pointers */
    const struct kit_vendor *vendor = plugin(KIT_ABI);
    if (vendor == NULL || vendor->abi != KIT_ABI || vendor->size != sizeof *vendor) {
        char why[128];
        snprintf(why, sizeof why, "it was built for another version of the kit's interface than %u; rebuild it",
                 KIT_ABI);
        return refuse_plugin(path, why, error, error_bytes);
    }
    if (vendor->name == NULL || vendor->open == NULL || vendor->start == NULL || vendor->stop == NULL ||
        vendor->flush == NULL) {
        return refuse_plugin(path, "it lacks name, open, start, stop or flush", error, error_bytes);
    }
    return vendor;
}

const struct kit_vendor *vendors_find(const char *name, char *error, size_t error_bytes) {
    if (strchr(name, '/') != NULL) {
        return load_plugin(name, error, error_bytes);
    }
    for (const struct kit_vendor *const *vendor = OWN; *vendor != NULL; vendor++) {
        if (strcmp((*vendor)->name, name) == 0) {
            return *vendor;
        }
    }
    snprintf(error, error_bytes, "this collector has no vendor called %s", name);
    return NULL;
}
