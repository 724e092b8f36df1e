/* Recording CUDA calls from a subscriber's callbacks. */
#ifndef KINETO_RECORDS_H
#define KINETO_RECORDS_H

#include "common/arena.h"
#include "cupti/cupti_api.h"
#include "common/wake.h"

/* Room for the state of `buffers` buffers. False if there is no memory. */
bool records_init(uint32_t buffers);
void records_free(void);
/* From now on calls are recorded; `work` is posted when a buffer is full. */
void records_open(struct wake *work);
/* Calls that begin or end after this leave no record. */
void records_close(void);

/* The callbacks: on whatever thread makes a call. */
void records_enter(uint32_t domain, uint32_t cbid, const struct cupti_call *call);
void records_exit(uint32_t domain, uint32_t cbid, const struct cupti_call *call);

/* The collector's thread: gives up the buffer in use, so that records_collect finds it. */
void records_seal(void);
/* Makes given-up buffers COMPLETED and counts what was dropped. True if one still waits for a writer. */
bool records_collect(struct arena *arena);

#endif
