/* Our client of rocprofiler-sdk: configured once in the life of a process, and switched on and off later. */
#ifndef KINETO_ROCPROFILER_CLIENT_H
#define KINETO_ROCPROFILER_CLIENT_H

#include <stdbool.h>
#include <stdint.h>

#include "common/export.h"
#include "kit/vendor.h"
#include "rocprofiler/rocprofiler_api.h"

/* Parts that are switched on separately. Each is one rocprofiler context. */
enum client_part {
    PART_KERNEL_NAMES, /* never switched off: a name is reported once */
    PART_HIP_RUNTIME,
    PART_HIP_COMPILER,
    PART_DISPATCHES,
    PART_COPIES,
    PART_ALLOCATIONS,
    PART_SCRATCH,
    PART_HSA,
    PARTS,
};

/* On the agent's thread. Registers with rocprofiler, unless registered. Returns 0 or a failing rocprofiler status; -1:
 * unusable contexts. `step`: the function that failed. */
int client_configure(const struct rocp_api *api, const struct kit_host *host, const char **step);
bool client_configured(void);
/* For the tool library (native_tools/rocprofiler_tool.c), whose rocprofiler_configure rocprofiler calls at the start of
 * a process. */
KC_EXPORT struct rocp_tool *kc_rocprofiler_client(uint32_t version, const char *text, uint32_t priority,
                                                  struct rocp_client *client);

/* Both return a rocprofiler status. */
int client_start(enum client_part part);
void client_stop(enum client_part part);
/* On the collector's thread: on return everything in rocprofiler's buffer has been pushed. */
int client_flush(void);
/* Starts counting and checking the records of a recording. */
void client_begin(const struct kit_host *host);
/* Records of dispatches, and of all kinds, since client_begin. */
uint64_t client_dispatches(void);
uint64_t client_records(void);
/* Records that rocprofiler has dropped since the last call. */
uint64_t client_take_dropped(void);
/* The first record of unknown size, and how many there were. Such records are not pushed. */
struct client_alien {
    uint64_t count;
    uint32_t kind;
    uint64_t size;
};
struct client_alien client_alien(void);
/* On the collector's thread: adds the names of the recorded HSA operations to `space`. */
void client_tell(const struct kit_host *host, uint32_t space);
/* In a forked child. */
void client_kill(void);

#endif
