/* The CUDA contexts of this process, with two events in each, which device_drain.c queries. */
#ifndef KINETO_DRAIN_CONTEXTS_H
#define KINETO_DRAIN_CONTEXTS_H

#include <stdbool.h>
#include <stdint.h>

#include "cupti/launches.h"

#define CONTEXTS_MOST (16 + (int)CONTEXTS_NOTED)
enum { SUCCESS = 0, NOT_READY = 600, CAPTURE_MODE_RELAXED = 2, CAPTURE_IMPLICIT = 906 }; /* CUDA's */

// clang-format off: a row for each function
#define DRIVER_FUNCTIONS(X)                                                        \
    X(device_count, "cuDeviceGetCount", (int *))                                   \
    X(primary_state, "cuDevicePrimaryCtxGetState", (int, unsigned *, int *))       \
    X(retain, "cuDevicePrimaryCtxRetain", (void **, int))                          \
    X(release, "cuDevicePrimaryCtxRelease_v2", (int))                              \
    X(set_current, "cuCtxSetCurrent", (void *))                                    \
    X(exchange_mode, "cuThreadExchangeStreamCaptureMode", (int *))                 \
    X(event_create, "cuEventCreate", (void **, unsigned))                          \
    X(event_destroy, "cuEventDestroy_v2", (void *))                                \
    X(event_query, "cuEventQuery", (void *))                                       \
    X(is_capturing, "cuStreamIsCapturing", (void *, int *))                        \
    X(record, "cuCtxRecordEvent", (void *, void *)) /* CUDA 12.5 */
// clang-format on

struct drain_driver {
    void *library;
#define FIELD(field, name, parameters) int(*field) parameters;
    DRIVER_FUNCTIONS(FIELD)
#undef FIELD
};

struct drain_context {
    int device; /* of a primary context */
    bool noted; /* another context */
    uint32_t entry;
    uint32_t generation;
    void *handle;
    void *anchor; /* event that stays until it is done */
    void *probe;  /* event that is recorded anew */
};

struct drain_contexts {
    struct drain_driver driver;
    struct drain_context all[CONTEXTS_MOST];
    int count;
    uint32_t steps; /* calls of the driver that returned, and waits for another tool */
    uint32_t begun; /* contexts_call_begin without its end */
    int64_t may_wait_ns;
};

/* Around a few calls of the driver; may be nested. Waits while another tool enters CUPTI (cupti_gate.h), and lets
 * launches go on then: 0.4 s for all such waits of one question. */
void contexts_call_begin(struct drain_contexts *contexts);
void contexts_call_end(struct drain_contexts *contexts);

/* False: some functions are missing, as before CUDA 12.5; or CUDA is not loaded, then library is NULL. */
bool driver_find(struct drain_driver *driver);
/* Adds the primary ones and retains them. False: CUDA is not in use yet. */
bool contexts_find(struct drain_contexts *contexts);
/* Adds those noted since, with their events: one that was never recorded counts as done. Returns CUDA's result. */
int contexts_add_noted(struct drain_contexts *contexts);
/* Destroys the events and releases the contexts. */
void contexts_close(struct drain_contexts *contexts);
/* No call of the driver is waited for, at this moment. */
void contexts_answered(struct drain_contexts *contexts);
/* How often that was so. */
uint32_t contexts_steps(const struct drain_contexts *contexts);

typedef int (*context_call)(const struct drain_driver *driver, struct drain_context *context);
/* Calls it with each context current until a call does not return SUCCESS, and returns that result. */
int contexts_each(struct drain_contexts *contexts, context_call call);
int context_make_events(const struct drain_driver *driver, struct drain_context *context);
/* CAPTURE_IMPLICIT if a blocking stream is being captured. */
int context_ask_legacy_stream(const struct drain_driver *driver, struct drain_context *context);
/* Only within capture_gate_enter. CAPTURE_IMPLICIT: the moment is over. */
int context_record_anchor(const struct drain_driver *driver, struct drain_context *context);
int context_record_probe(const struct drain_driver *driver, struct drain_context *context);
/* NOT_READY or SUCCESS. */
int context_query_anchor(const struct drain_driver *driver, struct drain_context *context);
int context_query_probe(const struct drain_driver *driver, struct drain_context *context);

#endif
