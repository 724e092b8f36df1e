/* Our client of rocprofiler-sdk: what is configured once in the life of a process, and switched on and off later. */
#ifndef KINETO_ROCPROFILER_CLIENT_H
#define KINETO_ROCPROFILER_CLIENT_H

#include <stdbool.h>
#include <stdint.h>

#include "common/export.h"
#include "kit/vendor.h"
#include "rocprofiler/rocprofiler_api.h"

/* What is switched on together. Each is one context of rocprofiler's. */
enum client_part {
    PART_KERNEL_NAMES, /* never switched off: a name is told once */
    PART_HIP_RUNTIME,
    PART_HIP_COMPILER,
    PART_DISPATCHES,
    PART_COPIES,
    PART_ALLOCATIONS,
    PART_SCRATCH,
    PART_HSA,
    PARTS,
};

/* On the agent's thread. Registers with rocprofiler, unless that has been done. Returns 0, or a rocprofiler status that
 * is not success; -1: it gave us contexts that we cannot use. `step`: at which of its functions. */
int client_configure(const struct rocp_api *api, const struct kit_host *host, const char **step);
bool client_configured(void);
/* For the tool library (native_tools/rocprofiler_tool.c), which rocprofiler asks when it is configured at the start of a
 * process: rocprofiler_configure. */
KC_EXPORT struct rocp_tool *kc_rocprofiler_client(uint32_t version, const char *text, uint32_t priority,
                                                  struct rocp_client *client);

/* A rocprofiler status each. */
int client_start(enum client_part part);
void client_stop(enum client_part part);
/* On the collector's thread: everything in rocprofiler's buffer has been pushed on return. */
int client_flush(void);
/* Records of a recording are counted from here on, and looked at anew. */
void client_begin(const struct kit_host *host);
/* Records of dispatches, and of all kinds, since client_begin. */
uint64_t client_dispatches(void);
uint64_t client_records(void);
/* Since the call before: records that rocprofiler has dropped. */
uint64_t client_take_dropped(void);
/* The first record whose size is not one that we know, and how many there were. Such records are not pushed. */
struct client_alien {
    uint64_t count;
    uint32_t kind;
    uint64_t size;
};
struct client_alien client_alien(void);
/* On the collector's thread: puts the names of HSA's operations that are recorded into `space`. */
void client_tell(const struct kit_host *host, uint32_t space);
/* In a forked child. */
void client_kill(void);

#endif
