/* Recording HIP's calls from rocprofiler's callbacks, with stream and kernel, which its own records lack. */
#ifndef KINETO_HIP_CALLS_H
#define KINETO_HIP_CALLS_H

#include <stdbool.h>
#include <stdint.h>

#include "kit/vendor.h"
#include "rocprofiler/rocprofiler_api.h"

#define HIP_OPERATIONS_MOST 1024u /* 1.0.0 has 478 */

/* Kinds of pushed records, which can also be switched on. rocprofiler's own kinds are below 34. */
#define HIP_RUNTIME_CALL 60u
#define HIP_COMPILER_CALL 61u

struct hip_call {   /* a pushed record; kineto_trace/decode/rocprofiler_records.py has the same */
    uint64_t start; /* CLOCK_BOOTTIME ns */
    uint64_t end;
    uint64_t correlation;
    uint64_t stream;   /* hipStream_t */
    uint64_t function; /* key of the kernel's name; 0: launches none, or several */
    uint32_t thread;
    uint32_t operation;
};
_Static_assert(sizeof(struct hip_call) == 48, "no padding");

/* The operations of one table that are recorded. */
struct hip_operations {
    int32_t numbers[HIP_OPERATIONS_MOST];
    uint32_t count;
};

/* On the agent's thread, before anything is configured: finds the calls to record by their names. */
void hip_calls_choose(const struct rocp_api *api, struct hip_operations *runtime, struct hip_operations *compiler);
/* Starts recording calls. functions: string space for the names of launched kernels. all_allocations: record
 * stream-ordered ones, too. */
void hip_calls_begin(const struct kit_host *host, uint32_t functions, bool all_allocations);
void hip_calls_end(void);
/* In a forked child. */
void hip_calls_kill(void);
/* Calls recorded since hip_calls_begin, and launches of kernels among them, except graphs. */
uint64_t hip_calls_made(void);
uint64_t hip_calls_launches(void);
/* On the collector's thread: adds the names of all recorded operations to `space`, by kind << 32 | operation. */
void hip_calls_tell(const struct rocp_api *api, const struct kit_host *host, uint32_t space);

/* For rocprofiler: a rocprofiler_callback_tracing_cb_t. */
void hip_call_made(struct rocp_callback_record record, uint64_t *user, void *data);

#endif
