/* A tool library for rocprofiler-sdk that `kinetoctl run` names in ROCP_TOOL_LIBRARIES.
 *
 * Theory of operation
 *   Before 1.3.2 rocprofiler takes clients only while it is configured, which is when HIP initialises. rocprofiler loads
 *   this library then and calls its rocprofiler_configure. The client is the collector's, which lies beside this library
 *   and is the very one that the agent of this process loads: it is configured here, dormant, and recordings start and
 *   stop its contexts later. Without the collector, or with one of another version, there is no client.
 *
 *   This function is not in the collector itself: rocprofiler asks every loaded library that exports it.
 *
 * Threads: whichever initialises HIP.
 * Blocks: inside the loader.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define COLLECTOR "libkineto_collector.so"
#define CLIENT "kc_rocprofiler_client"

__attribute__((visibility("default"))) void *rocprofiler_configure(uint32_t version, const char *text,
                                                                   uint32_t priority, void *client) {
    void *(*configure)(uint32_t, const char *, uint32_t, void *) = NULL;
    char path[4096];
    Dl_info here;
    if (dladdr(COLLECTOR, &here) == 0 || strrchr(here.dli_fname, '/') == NULL) {
        return NULL;
    }
    const size_t folder = (size_t)(strrchr(here.dli_fname, '/') - here.dli_fname) + 1;
    if (folder + sizeof COLLECTOR > sizeof path) {
        return NULL;
    }
    memcpy(path, here.dli_fname, folder);
    memcpy(path + folder, COLLECTOR, sizeof COLLECTOR);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (library != NULL) {
        *(void **)&configure = dlsym(library, CLIENT);
    }
    return configure == NULL ? NULL : configure(version, text, priority, client);
}
